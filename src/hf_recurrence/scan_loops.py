# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Recurrences along the tokens, forward and backward, one small operation a step.

"Simple Recurrence Improves Masked Language Models" (swish) and SRU. Both are not linear in the state, so there is no
parallel scan: the steps run one after the other over scratch buffers of a chunk of steps that stay in the processor's
cache, and all that does not depend on the step before is done for a chunk at once. The gradient is linear in the
state, one multiply-add a step; of the forward pass only the inputs and the states are kept for it.

Axes: B batch, T tokens, D width. Inside the loops the tokens come first, [T, B, D].
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


CHUNK = 32  # steps of a chunk whose scratch fits the cache at usual widths
SCRATCH = 1 << 17  # values of a chunk of twice as many steps at most

Maybe = torch.Tensor | None
Rows = tuple[torch.Tensor, ...]
_silu_ = torch._C._nn.silu_
_silu_backward = torch.ops.aten.silu_backward.grad_input


@cache
def fused_kernels() -> dict[str, Callable[..., Any]]:
    """The Triton kernels by name, none where Triton is not installed."""
    try:
        from .scan_triton import KERNELS
    except ImportError:
        return {}
    return KERNELS


def fused(x: torch.Tensor, name: str) -> Callable[..., Any] | None:
    return fused_kernels().get(name) if x.is_cuda else None


def chunk_size(x: torch.Tensor) -> int:
    """The steps of a chunk of x [B, T, D]."""
    return min(2 * CHUNK if 2 * CHUNK * x.shape[0] * x.shape[2] <= SCRATCH else CHUNK, x.shape[1])


def spans(x: torch.Tensor, reverse: bool) -> list[slice]:
    """The tokens of every chunk of x [B, T, D], in the order of the scan."""
    length, size = x.shape[1], chunk_size(x)
    found = [slice(start, min(start + size, length)) for start in range(0, length, size)]
    return found[::-1] if reverse else found


def subtract(
    before: torch.Tensor, x: torch.Tensor, state: torch.Tensor, span: slice, reverse: bool, out: torch.Tensor
) -> None:
    """Writes what stands before each token of a span in the order of the scan, minus x. [T, B, D]"""
    start, stop = span.start, span.stop
    if reverse and stop < len(x):
        torch.sub(before[start + 1 : stop + 1], x[span], out=out)
    elif reverse:
        torch.sub(state, x[-1], out=out[-1])
        torch.sub(before[start + 1 :], x[start:-1], out=out[:-1])
    elif start:
        torch.sub(before[start - 1 : stop - 1], x[span], out=out)
    else:
        torch.sub(state, x[0], out=out[0])
        torch.sub(before[: stop - 1], x[1:stop], out=out[1:])


def in_order(rows: Rows, size: int, reverse: bool) -> Rows:
    return rows[size - 1 :: -1] if reverse else rows[:size]


def scratch_like(x: torch.Tensor) -> tuple[torch.Tensor, Rows]:
    """A buffer for one chunk, [T, B, D], and its rows."""
    buffer = x.new_empty(chunk_size(x), x.shape[0], x.shape[2])
    return buffer, buffer.unbind(0)


def carry_back(gradient: Maybe, rows: Rows, decays: Rows) -> torch.Tensor:
    """Adds to the gradients of a chunk's states what reaches them over later ones, in place, from last to first.

    g[i] += g[i + 1] * decay[i + 1]; what comes from the chunk after goes in, what goes to the one before comes back.
    """
    after = rows[0] if gradient is None else rows[0].add_(gradient)
    for row, decay in zip(rows[1:], decays):
        after = row.addcmul_(after, decay)
    return after * decays[-1]


def swish_forward(x: torch.Tensor, state: torch.Tensor, slope: Maybe, offset: Maybe, reverse: bool) -> torch.Tensor:
    """c[i] = x[i] + u * sigmoid(slope * u + offset) with u = c[i - 1] - x[i], from [B, T, D]; slope 1 where None."""
    if (kernel := fused(x, "swish_forward")) is not None:
        return kernel(x, state, slope, offset, reverse)
    # With u[i + 1] = swish(u[i]) + (x[i] - x[i + 1]) a step is two operations, and c is made for a chunk at once.
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    with torch.inference_mode():  # operations on the scratch are then a fifth cheaper
        tokens, states = x.transpose(0, 1), output.transpose(0, 1)
        (buffer, rows), carried = scratch_like(x), torch.zeros_like(state)
        for span in spans(x, reverse):
            size = span.stop - span.start
            part = buffer[:size]
            subtract(tokens, tokens, state, span, reverse, part)
            if slope is None:
                for row in in_order(rows, size, reverse):
                    carried = _silu_(row.add_(carried))
            else:
                for row in in_order(rows, size, reverse):
                    share = torch.addcmul(offset, slope, row.add_(carried)).sigmoid_()
                    carried = row.mul_(share)
            carried = carried.clone()  # the next chunk takes its place
            torch.add(tokens[span], part, out=states[span])
    return output


def swish_slopes(u: torch.Tensor, slope: Maybe, offset: Maybe) -> tuple[torch.Tensor, Maybe]:
    """d swish / d u, written over u, and where there is a slope d swish / d offset."""
    if slope is None:
        return _silu_backward(u.new_ones(()), u, grad_input=u), None
    share = torch.addcmul(offset, slope, u).sigmoid_()
    bend = torch.addcmul(share, share, share, value=-1).mul_(u)
    return torch.addcmul(share, slope, bend, out=u), bend


def swish_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    output: torch.Tensor,
    state: torch.Tensor,
    slope: Maybe,
    offset: Maybe,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x [B, T, D], state [B, D], slope and offset [D] (empty where these are None).

    dc[i]/dc[i - 1] = s + slope * u * s * (1 - s) with s = sigmoid(slope * u + offset), and dc[i]/dx[i] = 1 - that.
    """
    if (kernel := fused(x, "swish_backward")) is not None:
        return kernel(gradient, x, output, state, slope, offset, reverse)
    result, of_state = torch.empty_like(output), torch.empty_like(state)
    of_slope, of_offset = (x.new_zeros(0 if slope is None else x.shape[2]) for _ in range(2))
    with torch.inference_mode():
        tokens, states, above, wanted = (tensor.transpose(0, 1) for tensor in (x, output, gradient, result))
        (totals, rows), (buffer, decays), carried = scratch_like(x), scratch_like(x), None
        for span in spans(x, not reverse):
            size = span.stop - span.start
            total, u = totals[:size].copy_(above[span]), buffer[:size]
            subtract(states, tokens, state, span, reverse, u)
            again = None if slope is None else u.clone()
            decay, bend = swish_slopes(u, slope, offset)
            carried = carry_back(carried, in_order(rows, size, not reverse), in_order(decays, size, not reverse))
            if bend is not None:
                of_offset += bend.mul_(total).sum((0, 1))
                of_slope += bend.mul_(again).sum((0, 1))
            torch.addcmul(total, total, decay, value=-1, out=wanted[span])
        of_state.copy_(carried)
    return result, of_state, of_slope, of_offset


def sru_forward(
    x: torch.Tensor, forget: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, reverse: bool
) -> torch.Tensor:
    """c[i] = f * c[i - 1] + (1 - f) * x[i] with f = sigmoid(forget[i] + weight * c[i - 1]), from [B, T, D]."""
    if (kernel := fused(x, "sru_forward")) is not None:
        return kernel(x, forget, weight, state, reverse)
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    with torch.inference_mode():
        share, length = torch.empty_like(state), x.shape[1]
        rows = (in_order(tensor.unbind(1), length, reverse) for tensor in (x, forget, output))
        for row, gate, result in zip(*rows):
            torch.addcmul(gate, weight, state, out=share).sigmoid_()
            state = torch.lerp(row, state, share, out=result)
    return output


def sru_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    forget: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    state: torch.Tensor,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x and forget [B, T, D], weight [D] and state [B, D].

    dc[i]/dc[i - 1] = f + weight * e with e = dc[i]/dforget[i] = (c[i - 1] - x[i]) * f * (1 - f); dc[i]/dx[i] = 1 - f.
    """
    if (kernel := fused(x, "sru_backward")) is not None:
        return kernel(gradient, x, forget, weight, output, state, reverse)
    of_x, of_forget = torch.empty_like(output), torch.empty_like(output)
    of_weight, of_state = torch.zeros_like(weight), torch.empty_like(state)
    with torch.inference_mode():
        tokens, gates, states, above = (tensor.transpose(0, 1) for tensor in (x, forget, output, gradient))
        (totals, rows), (buffer, decays), carried = scratch_like(x), scratch_like(x), None
        for span in spans(x, not reverse):
            size = span.stop - span.start
            total, decay = totals[:size].copy_(above[span]), buffer[:size]
            difference = torch.empty_like(decay)
            subtract(states, tokens, state, span, reverse, difference)
            before = difference + tokens[span]
            share = torch.addcmul(gates[span], weight, before).sigmoid_()
            bend = torch.addcmul(share, share, share, value=-1).mul_(difference)
            torch.addcmul(share, weight, bend, out=decay)
            carried = carry_back(carried, in_order(rows, size, not reverse), in_order(decays, size, not reverse))
            torch.addcmul(total, total, share, value=-1, out=of_x.transpose(0, 1)[span])
            torch.mul(total, bend, out=of_forget.transpose(0, 1)[span])
            of_weight += bend.mul_(total).mul_(before).sum((0, 1))
        of_state.copy_(carried)
    return of_x, of_forget, of_weight, of_state
