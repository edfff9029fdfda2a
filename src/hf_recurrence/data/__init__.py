"""Texts made ready for training: documents, their tokens, and batches of them."""

from .documents import documents
from .lanes import Lanes, LaneSegment, Tokens, collate_lanes
from .token_store import TokenStore


__all__ = ["LaneSegment", "Lanes", "TokenStore", "Tokens", "collate_lanes", "documents"]
