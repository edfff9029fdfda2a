# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Trained checkpoints at work on texts: read one, continue it, answer a question over it."""

from .texts import answer_question, continue_text, load_causal, read_ids, read_text


__all__ = ["answer_question", "continue_text", "load_causal", "read_ids", "read_text"]
