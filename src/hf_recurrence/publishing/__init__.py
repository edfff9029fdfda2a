# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""A plain checkpoint made recurrent, and a trained one brought to the Hub, where anyone can load it."""

from .card import render_card
from .conversion import convert
from .publication import publish
from .reloading import verify


__all__ = ["convert", "publish", "render_card", "verify"]
