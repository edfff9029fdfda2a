# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Questions over documents: windows of the question and a piece of the document each, and spans back from scores.

Axes: N windows, W window, C tokens of the document.
"""

from typing import Any, NamedTuple

import torch

from .windowing import plan_windows


class QuestionWindows(NamedTuple):
    """Windows `<s> question </s></s> piece </s>` of one document, and where its tokens are in them and in its text."""

    input_ids: list[list[int]]
    context_mask: list[list[int]]  # 1 at tokens of the document, in the first window only that holds them
    places: list[tuple[int, int]]  # the window and the slot of each token of the document
    offsets: list[tuple[int, int]]  # its first character in the document, and the one behind its last


def question_windows(
    tokenizer: Any, question: str, context: str, window_size: int, overlap: int = 0
) -> QuestionWindows:
    """The windows of at most `window_size` tokens, neighbours sharing `overlap` tokens of the document."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"`tokenizer` must be a fast one, which gives the offsets of tokens, got {type(tokenizer).__name__}."
        )
    begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    if begin is None or end is None:
        raise ValueError(f"`tokenizer` must have a cls and a sep token, got ids {begin} and {end}.")
    for name, text in (("question", question), ("context", context)):
        if not isinstance(text, str):
            raise ValueError(f"`{name}` must be one text, got {type(text).__name__}.")
    asked = tokenizer(question, add_special_tokens=False, verbose=False)["input_ids"]
    encoded = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens = encoded["input_ids"]
    if not asked:
        raise ValueError(f"`question` must hold at least one token, got {question!r}.")
    if not tokens:
        raise ValueError(f"`context` must hold at least one token, got {context!r}.")
    room = window_size - len(asked) - 4
    if room <= overlap:
        raise ValueError(
            f"`question` must leave more than `overlap` ({overlap}) tokens of a window of {window_size} to the "
            f"context, got a question of {len(asked)} tokens beside 4 special ones."
        )
    before = [begin, *asked, end, end]
    input_ids, context_mask, places = [], [], []
    for number, window in enumerate(plan_windows(len(tokens), room, overlap)):
        input_ids.append([*before, *tokens[window.start : window.stop], end])
        known = len(before) + window.scored - window.start
        num_new = window.stop - window.scored
        context_mask.append([0] * known + [1] * num_new + [0])
        places += [(number, known + index) for index in range(num_new)]
    return QuestionWindows(input_ids, context_mask, places, [tuple(pair) for pair in encoded["offset_mapping"]])


def best_span(start_scores: torch.Tensor, end_scores: torch.Tensor, max_answer_length: int) -> tuple[int, int]:
    """The first and the last token of the best span of at most so many tokens, from scores [C] of each as either."""
    if max_answer_length < 1:
        raise ValueError(f"`max_answer_length` must be at least 1, got {max_answer_length}.")
    best, found = -float("inf"), (0, 0)
    for more in range(min(max_answer_length, len(start_scores))):
        scores = start_scores[: len(start_scores) - more] + end_scores[more:]
        first = int(scores.argmax())
        if scores[first] > best:
            best, found = float(scores[first]), (first, first + more)
    return found
