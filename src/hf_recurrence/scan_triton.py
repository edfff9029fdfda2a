# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""The loops of `scan.py` as Triton kernels: a program runs some channels of a row from the first token to the last.

Axes: B batch, T tokens, D width.
"""

from typing import Any

import torch


try:
    import triton
    import triton.language as tl
except ImportError as error:  # inside `try`, for whoever loads a checkpoint does not need it
    raise ImportError("The fused scan needs Triton.") from error


BLOCK = 64  # channels a program


@triton.jit
def place(step, length, REVERSE: tl.constexpr):
    return length - 1 - step if REVERSE else step


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def swish_forward_kernel(
    x, state, slope, offset, output, length, width, TRAINED: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < width
    c = tl.load(state + row * width + channels, mask=inside, other=0)
    if TRAINED:
        a = tl.load(slope + channels, mask=inside, other=0)
        b = tl.load(offset + channels, mask=inside, other=0)
    for step in range(length):
        at = (row * length + place(step, length, REVERSE)) * width + channels
        value = tl.load(x + at, mask=inside, other=0)
        u = c - value
        c = value + u * sigmoid(a * u + b if TRAINED else u)
        tl.store(output + at, c, mask=inside)


@triton.jit
def swish_backward_kernel(
    gradient,
    x,
    output,
    state,
    slope,
    offset,
    of_x,
    of_state,
    of_slope,
    of_offset,
    length,
    width,
    TRAINED: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < width
    first = tl.load(state + row * width + channels, mask=inside, other=0)
    carried = tl.zeros_like(first)
    if TRAINED:
        a = tl.load(slope + channels, mask=inside, other=0)
        b = tl.load(offset + channels, mask=inside, other=0)
        slope_sum = tl.zeros_like(first)
        offset_sum = tl.zeros_like(first)
    for back in range(length):
        step = length - 1 - back
        at = (row * length + place(step, length, REVERSE)) * width + channels
        earlier = (row * length + place(tl.maximum(step - 1, 0), length, REVERSE)) * width + channels
        before = tl.where(step > 0, tl.load(output + earlier, mask=inside, other=0), first)
        u = before - tl.load(x + at, mask=inside, other=0)
        share = sigmoid(a * u + b if TRAINED else u)
        bend = u * share * (1 - share)
        decay = share + (a * bend if TRAINED else bend)
        total = tl.load(gradient + at, mask=inside, other=0) + carried
        tl.store(of_x + at, total * (1 - decay), mask=inside)
        carried = total * decay
        if TRAINED:
            slope_sum += total * bend * u
            offset_sum += total * bend
    tl.store(of_state + row * width + channels, carried, mask=inside)
    if TRAINED:
        tl.store(of_slope + row * width + channels, slope_sum, mask=inside)
        tl.store(of_offset + row * width + channels, offset_sum, mask=inside)


@triton.jit
def sru_forward_kernel(x, forget, weight, state, output, length, width, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < width
    c = tl.load(state + row * width + channels, mask=inside, other=0)
    v = tl.load(weight + channels, mask=inside, other=0)
    for step in range(length):
        at = (row * length + place(step, length, REVERSE)) * width + channels
        value = tl.load(x + at, mask=inside, other=0)
        share = sigmoid(tl.load(forget + at, mask=inside, other=0) + v * c)
        c = value + share * (c - value)
        tl.store(output + at, c, mask=inside)


@triton.jit
def sru_backward_kernel(
    gradient,
    x,
    forget,
    weight,
    output,
    state,
    of_x,
    of_forget,
    of_weight,
    of_state,
    length,
    width,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < width
    first = tl.load(state + row * width + channels, mask=inside, other=0)
    v = tl.load(weight + channels, mask=inside, other=0)
    carried = tl.zeros_like(first)
    weight_sum = tl.zeros_like(first)
    for back in range(length):
        step = length - 1 - back
        at = (row * length + place(step, length, REVERSE)) * width + channels
        earlier = (row * length + place(tl.maximum(step - 1, 0), length, REVERSE)) * width + channels
        before = tl.where(step > 0, tl.load(output + earlier, mask=inside, other=0), first)
        share = sigmoid(tl.load(forget + at, mask=inside, other=0) + v * before)
        bend = (before - tl.load(x + at, mask=inside, other=0)) * share * (1 - share)
        total = tl.load(gradient + at, mask=inside, other=0) + carried
        tl.store(of_x + at, total * (1 - share), mask=inside)
        tl.store(of_forget + at, total * bend, mask=inside)
        weight_sum += total * bend * before
        carried = total * (share + v * bend)
    tl.store(of_state + row * width + channels, carried, mask=inside)
    tl.store(of_weight + row * width + channels, weight_sum, mask=inside)


def grid(x: torch.Tensor) -> tuple[int, int]:
    return x.shape[0], triton.cdiv(x.shape[2], BLOCK)


def swish_forward(x: Any, state: Any, slope: Any, offset: Any, reverse: bool) -> torch.Tensor:
    x, state, trained = x.contiguous(), state.contiguous(), slope is not None
    weights = (slope.contiguous(), offset.contiguous()) if trained else (x, x)  # these are not read
    output = torch.empty_like(x)
    swish_forward_kernel[grid(x)](x, state, *weights, output, x.shape[1], x.shape[2], trained, reverse, BLOCK)
    return output


def swish_backward(
    gradient: Any, x: Any, output: Any, state: Any, slope: Any, offset: Any, reverse: bool
) -> tuple[torch.Tensor, ...]:
    gradient, x, state, trained = gradient.contiguous(), x.contiguous(), state.contiguous(), slope is not None
    weights = (slope.contiguous(), offset.contiguous()) if trained else (x, x)
    of_x, of_state = torch.empty_like(output), torch.empty_like(state)
    of_slope, of_offset = (torch.empty_like(state) if trained else x.new_empty(0, 0) for _ in range(2))
    found = (of_x, of_state, of_slope, of_offset)
    shape = x.shape[1:]
    swish_backward_kernel[grid(x)](gradient, x, output, state, *weights, *found, *shape, trained, reverse, BLOCK)
    return of_x, of_state, of_slope.sum(0), of_offset.sum(0)


def sru_forward(x: Any, forget: Any, weight: Any, state: Any, reverse: bool) -> torch.Tensor:
    x, forget, weight, state = (tensor.contiguous() for tensor in (x, forget, weight, state))
    output = torch.empty_like(x)
    sru_forward_kernel[grid(x)](x, forget, weight, state, output, x.shape[1], x.shape[2], reverse, BLOCK)
    return output


def sru_backward(
    gradient: Any, x: Any, forget: Any, weight: Any, output: Any, state: Any, reverse: bool
) -> tuple[torch.Tensor, ...]:
    tensors = [tensor.contiguous() for tensor in (gradient, x, forget, weight, output, state)]
    of_x, of_forget, of_weight, of_state = (torch.empty_like(tensor) for tensor in (output, output, state, state))
    found = (of_x, of_forget, of_weight, of_state)
    sru_backward_kernel[grid(x)](*tensors, *found, x.shape[1], x.shape[2], reverse, BLOCK)
    return of_x, of_forget, of_weight.sum(0), of_state


KERNELS = {
    "swish_forward": swish_forward,
    "swish_backward": swish_backward,
    "sru_forward": sru_forward,
    "sru_backward": sru_backward,
}
