"""Training across segments with the standard Trainer: the state of one step is where the next one begins; recipes."""

from .carry_state import CarryState, last_whole_checkpoint
from .recipe import parse_recipe
from .train import Interrupted, train


__all__ = ["CarryState", "Interrupted", "last_whole_checkpoint", "parse_recipe", "train"]
