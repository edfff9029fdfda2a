# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Recurrences along the tokens, with gradients: several steps at once, both directions, pads anywhere, carried states.

"Simple Recurrence Improves Masked Language Models" (swish) and SRU.

Axes: B batch, T tokens, S steps, D width.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

from .scan_loops import Maybe, sru_backward, sru_forward, swish_backward, swish_forward


class SwishScan(torch.autograd.Function):
    """`swish_forward` with its gradient; it can be differentiated once, by backpropagation."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, state: torch.Tensor, slope: Maybe, offset: Maybe, reverse: bool
    ) -> torch.Tensor:
        output = swish_forward(x, state, slope, offset, reverse)
        ctx.reverse = reverse
        ctx.save_for_backward(x, output, state, slope, offset)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Maybe, ...]:
        tensors = ctx.saved_tensors  # once only: a checkpoint may compute them here
        *found, of_slope, of_offset = swish_backward(gradient, *tensors, ctx.reverse)
        trained = tensors[3] is not None
        return *found, of_slope if trained else None, of_offset if trained else None, None


class SRUScan(torch.autograd.Function):
    """`sru_forward` with its gradient; it can be differentiated once, by backpropagation."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forget: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, reverse: bool
    ) -> torch.Tensor:
        output = sru_forward(x, forget, weight, state, reverse)
        ctx.reverse = reverse
        ctx.save_for_backward(x, forget, weight, output, state)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Maybe, ...]:
        return *sru_backward(gradient, *ctx.saved_tensors, ctx.reverse), None


# A compiler that traces the loops would unroll every step; these operators stand for them in its graphs. Copies of
# this file (one travels with every checkpoint) may live in one process, so each has a namespace of its own.
_NAMESPACE = re.sub(r"\W", "_", __name__)
_swish_op = torch.library.custom_op(f"{_NAMESPACE}::swish", swish_forward, mutates_args=())
_swish_backward_op = torch.library.custom_op(f"{_NAMESPACE}::swish_backward", swish_backward, mutates_args=())
_sru_op = torch.library.custom_op(f"{_NAMESPACE}::sru", sru_forward, mutates_args=())
_sru_backward_op = torch.library.custom_op(f"{_NAMESPACE}::sru_backward", sru_backward, mutates_args=())


@_swish_op.register_fake
@_sru_op.register_fake
def _shape_of_output(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_swish_backward_op.register_fake
def _shapes_of_swish_gradients(
    gradient: torch.Tensor, x: torch.Tensor, output: torch.Tensor, state: torch.Tensor, slope: Maybe, *_: Any
) -> tuple[torch.Tensor, ...]:
    width = 0 if slope is None else x.shape[2]
    return torch.empty_like(output), torch.empty_like(state), x.new_empty(width), x.new_empty(width)


@_sru_backward_op.register_fake
def _shapes_of_sru_gradients(
    gradient: torch.Tensor,
    x: torch.Tensor,
    forget: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    state: torch.Tensor,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(output), torch.empty_like(output), torch.empty_like(weight), torch.empty_like(state)


def _keep_swish(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.reverse = inputs
    ctx.save_for_backward(tensors[0], output, *tensors[1:])


def _keep_sru(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, forget, weight, state, ctx.reverse = inputs
    ctx.save_for_backward(x, forget, weight, output, state)


def _swish_gradients(ctx: Any, gradient: torch.Tensor) -> tuple[Maybe, ...]:
    tensors = ctx.saved_tensors
    *found, of_slope, of_offset = _swish_backward_op(gradient, *tensors, ctx.reverse)
    trained = tensors[3] is not None
    return *found, of_slope if trained else None, of_offset if trained else None, None


def _sru_gradients(ctx: Any, gradient: torch.Tensor) -> tuple[Maybe, ...]:
    return *_sru_backward_op(gradient, *ctx.saved_tensors, ctx.reverse), None


_swish_op.register_autograd(_swish_gradients, setup_context=_keep_swish)
_sru_op.register_autograd(_sru_gradients, setup_context=_keep_sru)


class Permute(torch.autograd.Function):
    """The tokens [B, T, D] in another order, given with its inverse as places in [B * T]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order, inverse)
        return x.flatten(0, 1).index_select(0, order).view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Maybe, ...]:
        order, inverse = ctx.saved_tensors
        return Permute.apply(gradient, inverse, order), None, None


def permute(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """The tokens [B, T, D] in another order; the gradient of plain indexing, a scatter, would be slow."""
    if torch.compiler.is_compiling():
        return x.flatten(0, 1)[order].view_as(x)
    return Permute.apply(x, order, inverse)


def real_tokens_first(mask: torch.Tensor, reverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """An order of the tokens [B, T] in which a scan meets the real ones first, and its inverse; both [B * T]."""
    order = torch.argsort((mask if reverse else ~mask).to(torch.int8), dim=1, stable=True)
    rows = torch.arange(mask.shape[0], device=mask.device)[:, None] * mask.shape[1]
    return (order + rows).flatten(), (torch.argsort(order, dim=1) + rows).flatten()


def last_states(c: torch.Tensor, state: torch.Tensor, lengths: Maybe, reverse: bool) -> torch.Tensor:
    """The states of the tokens last met, of `lengths` [B] or all; `state`'s where there are too few. [B, S, D]"""
    length, steps = c.shape[1], state.shape[1]
    if lengths is None and reverse:
        return c[:, :steps] if length >= steps else torch.cat([c, state], 1)[:, :steps]
    if lengths is None:
        return c[:, length - steps :] if length >= steps else torch.cat([state, c], 1)[:, length:]
    places = torch.arange(steps, device=c.device) + (length - lengths if reverse else lengths - steps)[:, None]
    inside = places < length if reverse else places >= 0
    others = (places - length if reverse else places + steps).clamp(0, steps - 1)
    found = torch.take_along_dim(c, places.clamp(0, length - 1)[..., None], 1)
    return torch.where(inside[..., None], found, torch.take_along_dim(state, others[..., None], 1))


def run_scan(
    core: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    initial_state: Maybe,
    mask: Maybe,
    steps: int,
    reverse: bool,
) -> tuple[torch.Tensor, Callable[[], torch.Tensor], torch.Tensor]:
    """The states c [B, T, D]; a function for those `steps` real tokens before them; the last of them [B, S, D].

    `core` runs one recurrence; `steps` of them, interleaved, are one over features: [B, T / steps, steps * D].
    """
    x = inputs[0]
    (batch, length, width), dtype = x.shape, torch.promote_types(x.dtype, torch.float32)
    if initial_state is not None and initial_state.shape != (batch, steps, width):
        rule = f"`initial_state` must be {[batch, steps, width]}, rows, steps and width"
        raise ValueError(f"{rule}, got {list(initial_state.shape)}.")
    if mask is not None and mask.shape != (batch, length):
        raise ValueError(f"`mask` must be {[batch, length]}, a boolean a token, got {list(mask.shape)}.")
    state = x.new_zeros(batch, steps, width, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    if length == 0:
        return x, lambda: x, state.to(x.dtype)
    order, inverse, lengths = None, None, None
    if mask is not None:
        mask = mask.bool()
        order, inverse = real_tokens_first(mask, reverse)
        inputs, lengths = [permute(tensor, order, inverse) for tensor in inputs], mask.sum(1)
    filling = -length % steps
    if filling:
        edges = (0, 0, filling, 0) if reverse else (0, 0, 0, filling)
        inputs = [torch.nn.functional.pad(tensor, edges) for tensor in inputs]
    inputs = [tensor.to(dtype) for tensor in inputs]
    if steps == 1:  # every view that is left out saves a copy in the backward pass, or a node
        c = core(*inputs, state[:, 0])
    else:
        c = core(*(tensor.reshape(batch, -1, steps * width) for tensor in inputs), state.flatten(1))
        c = c.view(batch, -1, width)
    if filling:
        c = c[:, filling:] if reverse else c[:, :length]

    def in_place(states: torch.Tensor) -> torch.Tensor:
        if mask is not None:
            states = permute(states, inverse, order).masked_fill(~mask[..., None], 0)
        return states.to(x.dtype)

    def previous() -> torch.Tensor:
        return in_place(torch.cat([c, state], 1)[:, steps:] if reverse else torch.cat([state, c], 1)[:, :length])

    return in_place(c), previous, last_states(c, state, lengths, reverse).to(x.dtype)


def tile(weight: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(torch.promote_types(dtype, torch.float32)).repeat(steps)


def swish_scan(
    x: torch.Tensor,
    slope: Maybe = None,
    offset: Maybe = None,
    initial_state: Maybe = None,
    mask: Maybe = None,
    steps: int = 1,
    reverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states c [B, T, D] and the last `steps` of them [B, S, D], from x [B, T, D], slope and offset [D].

    c[i] = swish(c[i - steps] - x[i]) + x[i], swish(u) = u * sigmoid(slope * u + offset). Tokens that the mask [B, T]
    excludes are passed over, wherever they are, and get 0. States are computed in float32 at least.
    """
    if (slope is None) != (offset is None):
        raise ValueError("`slope` and `offset` must be given both or not at all, got one of them.")
    weights = [None if weight is None else tile(weight, steps, x.dtype) for weight in (slope, offset)]

    def core(values: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        run = _swish_op if torch.compiler.is_compiling() else SwishScan.apply
        return run(values, state, *weights, reverse)

    c, _, final = run_scan(core, [x], initial_state, mask, steps, reverse)
    return c, final


def sru_scan(
    x: torch.Tensor,
    forget: torch.Tensor,
    weight: torch.Tensor,
    initial_state: Maybe = None,
    mask: Maybe = None,
    steps: int = 1,
    reverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The states c [B, T, D], those before them, and the last `steps` of them [B, S, D], from x and forget [B, T, D].

    c[i] = f * c[i - steps] + (1 - f) * x[i] with f = sigmoid(forget[i] + weight * c[i - steps]); the mask as above.
    """
    wide = tile(weight, steps, x.dtype)

    def core(values: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        run = _sru_op if torch.compiler.is_compiling() else SRUScan.apply
        return run(values, gates, wide, state, reverse)

    c, previous, final = run_scan(core, [x, forget], initial_state, mask, steps, reverse)
    return c, previous(), final
