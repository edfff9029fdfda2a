"""Measures of trained models: perplexity by window plans, FLOPs a token, use of the state, topics, tasks."""

from .checkpoint import evaluate, evaluate_glue
from .flops import block_recurrent_flops, flops_per_token, word_perplexity
from .glue import glue_scores
from .masked_lm import evaluate_pseudo_perplexity
from .perplexity import evaluate_perplexity
from .state_use import answer_state_gain, state_gain
from .topics import TopicModel, topic_propagation


__all__ = [
    "TopicModel",
    "answer_state_gain",
    "block_recurrent_flops",
    "evaluate",
    "evaluate_glue",
    "evaluate_perplexity",
    "evaluate_pseudo_perplexity",
    "flops_per_token",
    "glue_scores",
    "state_gain",
    "topic_propagation",
    "word_perplexity",
]
