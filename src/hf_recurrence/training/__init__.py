"""Training across segments with the standard Trainer: the state of one step is where the next one begins."""

from .carry_state import CarryState, last_whole_checkpoint


__all__ = ["CarryState", "last_whole_checkpoint"]
