"""From data sets to what the models take, and back."""

from .question_answering import HotpotQAProcessor, QuestionAnsweringCollator, flat_example


__all__ = ["HotpotQAProcessor", "QuestionAnsweringCollator", "flat_example"]
