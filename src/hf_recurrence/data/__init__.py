"""From texts and data sets to what the models take, and back."""

from .documents import documents
from .glue import GLUE_TASKS, GLUETask, glue_task, read_glue
from .lanes import Lanes, LaneSegment, Tokens, collate_lanes
from .masked_lm import MaskedSegments, masked_lm_collator
from .question_answering import HotpotQAProcessor, QuestionAnsweringCollator, flat_example
from .token_store import TokenStore


__all__ = [
    "GLUE_TASKS",
    "GLUETask",
    "HotpotQAProcessor",
    "LaneSegment",
    "Lanes",
    "MaskedSegments",
    "QuestionAnsweringCollator",
    "TokenStore",
    "Tokens",
    "collate_lanes",
    "documents",
    "flat_example",
    "glue_task",
    "masked_lm_collator",
    "read_glue",
]
