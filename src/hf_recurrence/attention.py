# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Attention of tokens to the `window_size` tokens before them, in tiles of blocks, and of states.

Axes: B batch, N blocks, W block, H heads, Q queries, K keys, D width of a head.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from .recurrence import relative_buckets


# Queries that attend together: the fewer, the less of what they compute is masked.
BAND = 64


class Bands(NamedTuple):
    """Which keys of a tile which queries attend to: those `ranges` (first and last query and key, exclusive) name.

    In each of these, `buckets` [1 or B, Q, K] are those of the distances, one more than the last of them for what is
    not seen, and `visible` [1 or B, 1, Q, K] marks what is seen; None where all is. Where there are several they are
    all alike, but for the length of the last.
    """

    ranges: list[tuple[int, int, int, int]]
    buckets: torch.Tensor
    visible: torch.Tensor | None


class Span:
    """Consecutive tokens of all rows: `num_blocks` blocks from a block's start on, or a piece inside one block.

    A piece follows `num_cached` tokens of its block, of which a row has `filled` ([B, 1] where rows differ), and a row
    has `counts` [B] tokens of its own in it. Keys are those of the block before, the cached tokens, the new ones.
    """

    def __init__(
        self,
        config: Any,
        num_blocks: int,
        length: int,
        filled: Any,
        has_previous: torch.Tensor | None,
        counts: torch.Tensor | None,
        device: torch.device,
        table: list[int],
        whole: bool,
    ) -> None:
        """`has_previous` [B] says which rows have a block before, where that matters (`empty_cache="mask"`).

        `table` are the buckets of distances. Tiles are attended to in bands of queries, or in one piece if `whole`.
        """
        self.num_blocks, self.length, self.width = num_blocks, length, config.window_size
        self.least = 0 if config.attend_to_self else 1  # distance
        self.table = table
        ragged = isinstance(filled, torch.Tensor)
        self.num_cached = int(filled.max()) if ragged else filled
        missing = None
        keys = torch.arange(-self.width, self.num_cached + length, device=device)
        if has_previous is not None:
            missing = (keys < 0) & ~has_previous[:, None]  # [B, K]
        self.bands = self._whole(filled, keys, None) if ragged or whole else self._bands(device)
        self.first = self.bands if missing is None else self._whole(filled, keys, missing)
        self.state_visible: torch.Tensor | None = None
        if ragged or counts is not None or missing is not None:
            # What a state sees is all of two whole blocks; in a piece a row may end before the others.
            seen = torch.ones(1, len(keys), dtype=torch.bool, device=device)
            if ragged:
                seen = (keys < filled) | (keys >= self.num_cached)
            if counts is not None:
                seen = seen & (keys - self.num_cached < counts[:, None])
            if missing is not None:
                seen = seen & ~missing
            self.state_visible = seen[:, None, None, :]

    def _bands(self, device: torch.device) -> Bands:
        """The tile of rows that all stand at the same place."""
        width, least = self.width, self.least
        if self.length <= BAND and not self.num_cached and self.length == width:
            return self._whole(0, torch.arange(-width, width, device=device), None)
        ranges = []
        for start in range(0, self.length, BAND):
            stop = min(start + BAND, self.length)
            first_key = self.num_cached + start + 1 - least
            ranges.append((start, stop, first_key, first_key + stop - start + width - 1))
        number = ranges[0][1]
        queries = torch.arange(number, device=device)[:, None]
        distances = least + width - 1 + queries - torch.arange(number + width - 1, device=device)
        return self._marked(ranges, distances[None], self._seen(distances)[None] if number > 1 else None)

    def _whole(self, filled: Any, keys: torch.Tensor, missing: torch.Tensor | None) -> Bands:
        """The tile where rows differ in what they see of it."""
        new = torch.arange(self.length, device=keys.device)
        queries = filled + new if isinstance(filled, torch.Tensor) else (filled + new)[None]  # [1 or B, Q]
        places, there = keys[None], torch.ones_like(keys, dtype=torch.bool)[None]
        if isinstance(filled, torch.Tensor):
            places = torch.cat([keys[: -self.length].expand(queries.shape[0], -1), queries], 1)
            there = (keys < filled) | (keys >= self.num_cached)
        there = there if missing is None else there & ~missing
        distances = queries[:, :, None] - places[:, None, :]
        return self._marked([(0, self.length, 0, len(keys))], distances, self._seen(distances) & there[:, None, :])

    def _marked(
        self, ranges: list[tuple[int, int, int, int]], distances: torch.Tensor, seen: torch.Tensor | None
    ) -> Bands:
        buckets = relative_buckets(distances, self.table)
        if seen is None:
            return Bands(ranges, buckets, None)
        return Bands(ranges, torch.where(seen, buckets, self.table[-1] + 1), seen[:, None])

    def _seen(self, distances: torch.Tensor) -> torch.Tensor:
        return (distances >= self.least) & (distances < self.least + self.width)

    def ranges(self) -> list[tuple[int, int]]:
        """The blocks that attend together: the first one apart where it sees less than the others."""
        apart = self.first is not self.bands and self.num_blocks > 1
        return [(0, 1), (1, self.num_blocks)] if apart else [(0, self.num_blocks)]

    def fold(self, heads: torch.Tensor) -> torch.Tensor:
        """Puts blocks into the batch. [B, H, T, D] -> [B * N, H, Q, D]"""
        if self.num_blocks == 1:
            return heads
        return heads.unflatten(2, (self.num_blocks, self.length)).transpose(1, 2).flatten(0, 1)

    def unfold(self, folded: torch.Tensor) -> torch.Tensor:
        """[B * N, H, Q, D] -> [B, T, H * D]"""
        merged = folded.transpose(1, 2).flatten(2)
        return merged if self.num_blocks == 1 else merged.unflatten(0, (-1, self.num_blocks)).flatten(1, 2)

    def block(self, folded: torch.Tensor, number: int) -> torch.Tensor:
        """One block of what is folded. [B * N, ...] -> [B, ...]"""
        return folded if self.num_blocks == 1 else folded.unflatten(0, (-1, self.num_blocks))[:, number]

    def tile(self, before: torch.Tensor, new: torch.Tensor, has_room: bool) -> torch.Tensor:
        """The keys (or values) of every block and what is before it. [B, H, K or T, D] -> [B * N, H, K, D]

        Those of a piece may find room in `before`, into which they are then written.
        """
        if has_room:
            before[:, :, before.shape[2] - new.shape[2] :] = new
            return before
        before = before.to(new.dtype)
        if self.num_blocks == 1:
            return torch.cat([before, new], 2)
        blocks = new.unflatten(2, (self.num_blocks, self.length)).transpose(1, 2)
        return torch.cat([torch.cat([before[:, None], blocks[:, :-1]], 1), blocks], 3).flatten(0, 1)


class BandedAttention(torch.autograd.Function):
    """softmax(query . key + bias) . value over the bands of tiles [B, H, Q, D], [B, H, K, D].

    Keeps the weights of the bands once; where the bias learns, torch's own keeps them three times, for whole tiles.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor,
        ranges: list[tuple[int, int, int, int]],
        dropout: float,
    ) -> torch.Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        outputs, kept = [], []
        for first, last, first_key, last_key in ranges:
            scores = (query[:, :, first:last] @ key[:, :, first_key:last_key].transpose(-1, -2)).to(wide)
            scores += bias[:, :, : last - first, : last_key - first_key]
            weights = torch.softmax(scores, -1, out=scores).to(value.dtype)
            kept.append(weights)
            if dropout:
                kept.append(torch.empty_like(weights, dtype=torch.bool).bernoulli_(1 - dropout))
                weights = weights * kept[-1] / (1 - dropout)
            outputs.append(weights @ value[:, :, first_key:last_key])
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
        ctx.save_for_backward(query, key, value, output, *kept)
        ctx.ranges, ctx.dropout, ctx.bias = ranges, dropout, (bias.shape, bias.dtype)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, *kept = ctx.saved_tensors
        wide = torch.promote_types(query.dtype, torch.float32)
        shape, dtype = ctx.bias
        of_bias = torch.zeros(shape, dtype=wide, device=query.device)
        of_key, of_value, of_query = torch.zeros_like(key), torch.zeros_like(value), []
        shares = (gradient * output).sum(-1, keepdim=True, dtype=wide)
        step = 2 if ctx.dropout else 1
        for number, (first, last, first_key, last_key) in enumerate(ctx.ranges):
            weights, asked = kept[step * number], slice(first, last)
            keys = slice(first_key, last_key)
            scores = (gradient[:, :, asked] @ value[:, :, keys].transpose(-1, -2)).to(wide)
            dropped = weights
            if ctx.dropout:
                left = kept[step * number + 1]
                scores.mul_(left).div_(1 - ctx.dropout)
                dropped = weights * left / (1 - ctx.dropout)
            scores.sub_(shares[:, :, asked]).mul_(weights)
            of_bias[:, :, : last - first, : last_key - first_key] += scores.sum_to_size(
                *shape[:2], last - first, last_key - first_key
            )
            scores = scores.to(query.dtype)
            of_query.append(scores @ key[:, :, keys])
            of_key[:, :, keys] += scores.transpose(-1, -2) @ query[:, :, asked]
            of_value[:, :, keys] += dropped.transpose(-1, -2) @ gradient[:, :, asked]
        return torch.cat(of_query, 2), of_key, of_value, of_bias.to(dtype), None, None


def attend_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    bands: Bands,
    dropout: float,
    eager: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention in tiles by their bands, [B, H, Q, D], and the weights where `eager` (the bands are then one).

    The bias is very low where nothing is to be seen.
    """
    learns = bias.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if eager or not learns:
        outputs = []
        for first, last, first_key, last_key in bands.ranges:
            part, part_bias, visible = query, bias, bands.visible
            if len(bands.ranges) > 1:
                part, place = query[:, :, first:last], (..., slice(last - first), slice(last_key - first_key))
                part_bias, visible = bias[place], None if visible is None else visible[place]
            keys, values = key[:, :, first_key:last_key], value[:, :, first_key:last_key]
            outputs.append(attend(part, keys, values, part_bias, visible, dropout, eager))
        return outputs[0] if len(outputs) == 1 else (torch.cat([output for output, _ in outputs], 2), None)
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast a scaled query is float32 again
    output = BandedAttention.apply(query, key, value, bias, bands.ranges, dropout)
    if bands.visible is None or len(bands.ranges) > 1:
        return output, None  # in a band each query sees something
    return output * bands.visible.any(-1, keepdim=True), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    visible: torch.Tensor | None,
    dropout: float,
    eager: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(query . key + bias) . value over what is visible, [..., H, Q, D], and the weights where `eager`.

    A bias is very low already where nothing is to be seen. A query that sees nothing gives 0.
    """
    mask = bias if bias is None else bias.to(query.dtype)
    if visible is not None and bias is None:
        mask = torch.where(visible, query.new_zeros(()), query.new_full((), torch.finfo(query.dtype).min / 2))
    something = None if visible is None else visible.any(-1, keepdim=True)
    if eager:
        scores = query @ key.transpose(-1, -2)
        scores = scores if mask is None else scores + mask
        weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(value.dtype)
        weights = weights if something is None else weights * something
        return F.dropout(weights, dropout) @ value, weights
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=1.0)
    return output if something is None else output * something, None


def heads(hidden_states: torch.Tensor, number: int) -> torch.Tensor:
    """[B, T, H * D] -> [B, H, T, D]"""
    return hidden_states.view(*hidden_states.shape[:2], number, -1).transpose(1, 2)
