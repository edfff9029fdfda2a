"""Measures of trained models: FLOPs a token, whether the state is used, and scores of tasks."""

from .flops import block_recurrent_flops
from .glue import glue_scores
from .state_use import state_gain


__all__ = ["block_recurrent_flops", "glue_scores", "state_gain"]
