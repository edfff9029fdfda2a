"""Measures of trained models: FLOPs a token, whether the state is used, and scores of answers."""

from .answers import answer_scores, scores_by_class
from .flops import block_recurrent_flops
from .question_answering import evaluate_answers, predict_answers
from .state_use import state_gain


__all__ = [
    "answer_scores",
    "block_recurrent_flops",
    "evaluate_answers",
    "predict_answers",
    "scores_by_class",
    "state_gain",
]
