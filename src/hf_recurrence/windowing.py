# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Windows over a row of tokens: where they lie, which positions are scored in which, rows with and without padding.

Axes: B batch, T tokens, N windows, W window, S state vectors, D width. Positions count from 0.
"""

from typing import Any, NamedTuple

import torch


class Window(NamedTuple):
    """Tokens `start` to `stop` (exclusive) attend together; those from `scored` on are in no window before."""

    start: int
    stop: int
    scored: int


def plan_windows(length: int, window_size: int, overlap: int) -> list[Window]:
    """The windows over `length` tokens: each token is scored in the earliest window that holds it.

    >>> plan_windows(20, window_size=10, overlap=3)
    [Window(start=0, stop=10, scored=0), Window(start=7, stop=17, scored=10), Window(start=14, stop=20, scored=17)]
    """
    if length < 0:
        raise ValueError(f"`length` must be at least 0, got {length}.")
    if window_size < 1:
        raise ValueError(f"`window_size` must be at least 1, got {window_size}.")
    if not 0 <= overlap < window_size:
        raise ValueError(
            f"`overlap` must be at least 0 and smaller than `window_size` ({window_size}), got {overlap}."
        )
    windows = [Window(0, min(window_size, length), 0)] if length else []
    while windows and windows[-1].stop < length:
        start = windows[-1].start + window_size - overlap
        windows.append(Window(start, min(start + window_size, length), start + overlap))
    return windows


def full_windows(length: int, window_size: int, overlap: int) -> int:
    """How many windows over `length` tokens are full, so that a next one follows them."""
    return 0 if length < window_size else 1 + (length - window_size) // (window_size - overlap)


def compact_order(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`order[b, i]`, the column of row b's i-th real token (then come its pads), and `rank`, its inverse.

    At a pad, `rank` is the number of the real token before it (0 where there is none). [B, T] both.
    """
    real = mask.bool()
    order = torch.argsort((~real).long(), dim=1, stable=True)
    rank = (real.long().cumsum(1) - 1).clamp(min=0)
    return order, rank


def gather_columns(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`values[b, columns[b, i]]` for values [B, T] or [B, T, D] and columns [B, I]."""
    if values.dim() == 3:
        columns = columns.unsqueeze(-1).expand(-1, -1, values.shape[-1])
    return values.gather(1, columns)


def next_labels(
    labels: torch.Tensor,
    mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """What each token predicts: the label of the row's next real one, `ignore_index` at its last and at pads. [B, T]

    With `position_ids`, a token at position 0 begins a document and is predicted by none.
    """
    if position_ids is not None:
        labels = labels.masked_fill(position_ids == 0, ignore_index)
    pad = torch.nn.functional.pad
    if mask is None:
        return pad(labels[:, 1:], (0, 1), value=ignore_index)
    order, rank = compact_order(mask)
    following = pad(labels.gather(1, order)[:, 1:], (0, 1), value=ignore_index).gather(1, rank)
    last = rank + 1 >= mask.sum(1, keepdim=True)
    return following.masked_fill(last | ~mask.bool(), ignore_index)


class Documents:
    """Documents packed into rows, unpacked to a row each and back; `starts` [B, T] marks their first tokens."""

    def __init__(self, starts: torch.Tensor, mask: torch.Tensor | None) -> None:
        self.mask = torch.ones_like(starts) if mask is None else mask
        token = self.mask.long().cumsum(1) - 1
        starts = (starts | (token == 0)) & self.mask
        document = (starts.long().cumsum(1) - 1).clamp(min=0)
        counts = document.amax(1, keepdim=True) + 1
        self.row = counts.cumsum(0) - counts + document
        self.rank = token - torch.where(starts, token, 0).cummax(1).values
        self.shape = (int(counts.sum()), int((self.rank * self.mask).max()) + 1)

    def unpack(self, values: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """[B, T] or [B, T, D] -> the same with a document a row, and `fill` behind it."""
        unpacked = values.new_full((*self.shape, *values.shape[2:]), fill)
        return unpacked.index_put((self.row[self.mask], self.rank[self.mask]), values[self.mask])

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """What `unpack` took apart, [B, T, D], with zeros at pads."""
        return values[self.row, self.rank.clamp(min=0)] * self.mask.unsqueeze(-1).to(values.dtype)


class Rows:
    """How the new tokens of one call lie on the windows of their rows.

    Each row counts from the start of its window under way, pads left out: column v of a row is its v-th token since
    then. Of these, `held` are known from before and `filled` of those have been run. Both are numbers where all rows
    stand at the same place (`aligned`), else [B, 1], and windows are cut by gathering instead of slicing. What the
    new tokens have (ids, labels, ...) is brought onto this grid by `align`, and begins there at column `base`.

    Nothing depends on the values of `mask` unless `exact` asks for `totals`, the tokens of each row on the grid:
    without it, there are as many windows as a row without pads would need.
    """

    def __init__(
        self,
        window_size: int,
        overlap: int,
        shape: tuple[int, int],
        device: torch.device,
        mask: torch.Tensor | None = None,
        held: list[int] | None = None,
        filled: list[int] | None = None,
        exact: bool = False,
    ) -> None:
        num_rows, self.num_new = shape
        held, filled = held or [0] * num_rows, filled or [0] * num_rows
        self.window_size, self.overlap, self.mask = window_size, overlap, mask
        self.order: torch.Tensor | None = None
        self.rank: torch.Tensor | None = None
        if mask is not None:
            self.order, self.rank = compact_order(mask)
        self.totals: list[int] | None = None
        longest = self.num_new
        if exact or any(held):
            lengths = [self.num_new] * num_rows if mask is None else mask.sum(1).tolist()
            self.totals = [before + length for before, length in zip(held, lengths, strict=True)]
            longest = max(1, *self.totals)
        self.windows = plan_windows(longest, window_size, overlap)
        stop = self.windows[0].stop
        self.base, self.shift = min(held), max(held) - min(held)
        self.aligned = self.shift == 0 and min(filled) == max(filled) and longest > held[0]
        self.held: Any = held[0]
        self.filled: Any = filled[0]
        self.num_first = stop - filled[0]  # tokens run in the first window
        if not self.aligned:
            self.held = torch.tensor(held, device=device)[:, None]
            self.filled = torch.tensor(filled, device=device)[:, None]
            counts = [min(window_size, total) - done for total, done in zip(self.totals or [], filled, strict=True)]
            self.num_first = max(1, *counts)

    def align(self, values: torch.Tensor, fill: int | None = None) -> torch.Tensor:
        """The values of the input columns, [B, T] or [B, T, D], on the grid; `fill` where a row has no new token."""
        if self.aligned:
            return values if self.order is None else gather_columns(values, self.order)
        index = torch.arange(self.num_new + self.shift, device=values.device) - (self.held - self.base)
        outside = (index < 0) | (index >= self.num_new)
        index = index.clamp(0, self.num_new - 1)
        aligned = gather_columns(values, index if self.order is None else self.order.gather(1, index))
        return aligned if fill is None else aligned.masked_fill(outside, fill)

    def columns(self, number: int) -> slice | torch.Tensor:
        """The columns to run in window `number`: those not yet `filled` in the first, all in the others."""
        window = self.windows[number]
        if self.aligned:
            return slice(window.start + (0 if number else self.filled), window.stop)
        first = self.filled if number == 0 else window.start * torch.ones_like(self.filled)
        length = window.stop - window.start if number else self.num_first
        return first + torch.arange(length, device=first.device)

    def pick(self, aligned: torch.Tensor, columns: slice | torch.Tensor) -> torch.Tensor:
        """The aligned values at these columns; those without a new token are left out of a slice, or any value."""
        if isinstance(columns, slice):
            return aligned[:, max(columns.start - self.base, 0) : columns.stop - self.base]
        return gather_columns(aligned, (columns - self.base).clamp(0, aligned.shape[1] - 1))

    def scored(self, number: int, outputs: torch.Tensor) -> torch.Tensor:
        """The outputs of window `number` that `merge` takes: no overlap, and no token known from before if aligned."""
        if number:
            return outputs[:, self.overlap :]
        return outputs[:, self.held - self.filled :] if self.aligned else outputs

    def scored_values(self, number: int, aligned: torch.Tensor, fill: int) -> torch.Tensor:
        """The aligned values of what `scored` keeps of window `number`; `fill` where that is no new token of it."""
        columns, window = self.columns(number), self.windows[number]
        if isinstance(columns, slice):
            return self.pick(aligned, slice(window.scored if number else self.base, columns.stop))
        columns = columns[:, self.overlap :] if number else columns
        end = min(window.start + self.window_size, self.base + aligned.shape[1])
        return self.pick(aligned, columns).masked_fill((columns < self.held) | (columns >= end), fill)

    def merge(self, scored: list[torch.Tensor]) -> torch.Tensor:
        """What `scored` kept of all windows, at the input columns again, with zeros at pads. [B, T, D]"""
        merged = scored[0] if len(scored) == 1 else torch.cat(scored, 1)
        if not self.aligned:
            token = torch.arange(self.num_new, device=merged.device) if self.rank is None else self.rank
            column = token + self.held
            later = self.num_first + column - self.window_size
            index = torch.where(column < self.window_size, column - self.filled, later)
            merged = gather_columns(merged, index.clamp(max=merged.shape[1] - 1))  # beyond it only for pads
        elif self.rank is not None:
            merged = gather_columns(merged, self.rank)
        return merged if self.mask is None else merged * self.mask.unsqueeze(-1).to(merged.dtype)


class Windows:
    """The tokens of one call as windows, each with its pads: cut here from rows [B, T], or given cut, [B, N, W].

    Rows are cut as `Rows` does it, their pads left out; windows that were given keep theirs where they are. Either
    way, a row has only those windows that hold new tokens of it, and the others change nothing for it.
    """

    def __init__(
        self, window_size: int, overlap: int, shape: torch.Size, device: torch.device, mask: torch.Tensor | None
    ) -> None:
        self.mask = mask
        self.rows: Rows | None = None
        self.lengths: torch.Tensor | None = None  # real tokens of each row, [B, 1]
        self.existing: torch.Tensor | None = None  # whether a row has the window, [B, N]; None where all have all
        if len(shape) == 3:
            self.count = shape[1]
            self.existing = None if mask is None else mask.any(2)
            return
        self.rows = Rows(window_size, overlap, (shape[0], shape[1]), device, mask)
        self.count = len(self.rows.windows)
        if mask is not None:
            self.lengths = mask.sum(1, keepdim=True)
            self.existing = self.lengths > torch.tensor([window.scored for window in self.rows.windows], device=device)

    def align(self, values: torch.Tensor) -> torch.Tensor:
        """The values of the inputs, [B, T, ...] or [B, N, W, ...], as `pick` wants them."""
        return values if self.rows is None else self.rows.align(values)

    def pick(self, aligned: torch.Tensor, number: int) -> torch.Tensor:
        """The aligned values of window `number`. [B, W, ...]"""
        return aligned[:, number] if self.rows is None else self.rows.pick(aligned, self.rows.columns(number))

    def tokens(self, number: int) -> torch.Tensor | None:
        """Which slots of window `number` hold tokens; None where all do. [B, W]"""
        if self.rows is None or self.lengths is None:
            return None if self.mask is None else self.mask[:, number]
        window = self.rows.windows[number]
        return torch.arange(window.start, window.stop, device=self.lengths.device) < self.lengths

    def merge(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """The outputs of all windows, each [B, W, D], at the places of the inputs, with zeros at pads."""
        if self.rows is not None:
            return self.rows.merge([self.rows.scored(number, output) for number, output in enumerate(outputs)])
        merged = torch.stack(outputs, 1)
        return merged if self.mask is None else merged * self.mask.unsqueeze(-1).to(merged.dtype)

    def merge_attentions(self, maps: list[torch.Tensor]) -> torch.Tensor:
        """The windows' maps, [B, heads, W, keys], over all columns, [B, heads, T, T]; or stacked, [B, N, heads, W, W].

        The keys of the state stand in no column and are left out.
        """
        if self.rows is None:
            return torch.stack([of_window[..., of_window.shape[-1] - of_window.shape[-2] :] for of_window in maps], 1)
        columns = torch.arange(self.rows.num_new, device=maps[0].device).expand(maps[0].shape[0], -1)
        aligned, heads = self.align(columns), maps[0].shape[1]
        spread = [
            spread_maps(of_window, self.pick(aligned, number), self.rows.num_new)
            for number, of_window in enumerate(maps)
        ]
        return self.merge(spread).unflatten(2, (heads, -1)).transpose(1, 2)


def spread_maps(maps: torch.Tensor, places: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Attention maps [B, heads, W, keys] over all columns, where their keys stand at `places` [B, keys].

    Keys in front of those that have a place, which are the state's, are left out. [B, W, heads * columns]
    """
    maps = maps[..., maps.shape[-1] - places.shape[1] :]
    empty = maps.new_zeros(*maps.shape[:3], num_columns)
    index = places.clamp(0, num_columns - 1)[:, None, None, :].expand_as(maps)  # weight 0 where outside
    return empty.scatter_add(3, index, maps).transpose(1, 2).flatten(2)
