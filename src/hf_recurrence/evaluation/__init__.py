"""Measures of trained models: FLOPs a token, and whether the state is used."""

from .flops import block_recurrent_flops
from .state_use import state_gain


__all__ = ["block_recurrent_flops", "state_gain"]
