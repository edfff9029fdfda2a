"""Measures of trained models: perplexity by window plans, FLOPs a token, use of the state, topics, tasks."""

from .answers import answer_scores, scores_by_class
from .checkpoint import evaluate, evaluate_glue
from .flops import block_recurrent_flops, flops_per_token, word_perplexity
from .glue import glue_scores
from .masked_lm import evaluate_pseudo_perplexity
from .perplexity import evaluate_perplexity
from .question_answering import evaluate_answers, predict_answers
from .report import report
from .state_use import answer_state_gain, state_gain
from .topics import TopicModel, topic_propagation


__all__ = [
    "TopicModel",
    "answer_scores",
    "answer_state_gain",
    "block_recurrent_flops",
    "evaluate",
    "evaluate_answers",
    "evaluate_glue",
    "evaluate_perplexity",
    "evaluate_pseudo_perplexity",
    "flops_per_token",
    "glue_scores",
    "predict_answers",
    "report",
    "scores_by_class",
    "state_gain",
    "topic_propagation",
    "word_perplexity",
]
