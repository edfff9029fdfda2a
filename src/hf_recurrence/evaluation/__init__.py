"""Measures of trained models: perplexity by window plans, FLOPs a token, and whether the state is used."""

from .flops import block_recurrent_flops, flops_per_token, word_perplexity
from .perplexity import evaluate_perplexity
from .state_use import answer_state_gain, state_gain


__all__ = [
    "answer_state_gain",
    "block_recurrent_flops",
    "evaluate_perplexity",
    "flops_per_token",
    "state_gain",
    "word_perplexity",
]
