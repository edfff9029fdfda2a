"""Texts made ready for training: documents, their tokens, and batches of them."""

from .documents import documents
from .lanes import Lanes, LaneSegment, Tokens, collate_lanes
from .masked_lm import MaskedSegments, masked_lm_collator
from .token_store import TokenStore


__all__ = [
    "LaneSegment",
    "Lanes",
    "MaskedSegments",
    "TokenStore",
    "Tokens",
    "collate_lanes",
    "documents",
    "masked_lm_collator",
]
