# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""What passes from window to window: pooling of token vectors, gates of state vectors, relative positions.

Axes: B batch, W window, S state vectors, D width, L layers.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer


def mix_layers(layers: list[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    """The sum of the layers' outputs, each [B, W, D], weighted by softmax(logits [L]): eq. 1's inner sum. [B, W, D]"""
    weights = logits.softmax(0).to(layers[-1].dtype)
    return torch.tensordot(weights, torch.stack([layer.to(layers[-1].device) for layer in layers]), dims=1)


def pool_mean(tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The mean over the window, or over its tokens in `mask` [B, W], at least one a row. [B, W, D] -> [B, D]"""
    if mask is None:
        return tokens.mean(1)
    return tokens.masked_fill(~mask.unsqueeze(-1), 0).sum(1) / mask.sum(1, keepdim=True).to(tokens.dtype)


def pool_max(tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The largest value of each feature over the window, or over its tokens in `mask`. [B, W, D] -> [B, D]"""
    if mask is not None:
        tokens = tokens.masked_fill(~mask.unsqueeze(-1), torch.finfo(tokens.dtype).min)
    return tokens.amax(1)


def pool_attention(tokens: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The mean over the window, or over its tokens in `mask`, weighted by softmax(tokens . key / sqrt(D)), key [D].

    [B, W, D] -> [B, D]
    """
    scores = tokens @ key * tokens.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return (scores.softmax(1).unsqueeze(1) @ tokens).squeeze(1)


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


class Normalisation(torch.autograd.Function):
    """`normalised` vectors with their gradient; keeps what it returns, not what it was given."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, mean: bool, eps: float) -> torch.Tensor:
        output, shrink = normalised(vectors, mean, eps)
        ctx.save_for_backward(output, shrink)
        ctx.mean = mean
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        output, shrink = ctx.saved_tensors
        wide, along = at_least_float32(gradient), at_least_float32(output)
        share = (wide * along).sum(-1, keepdim=True)
        scale = -1 / wide.shape[-1] if ctx.mean else -1
        return torch.addcmul(wide, along, share, value=scale).mul_(shrink).to(gradient.dtype), None, None


def normalised(vectors: torch.Tensor, mean: bool, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The vectors of the last axis at a mean, or a sum, of squares of 1, and what they were multiplied by."""
    wide = at_least_float32(vectors)
    squares = wide.square().sum(-1, keepdim=True)
    shrink = (squares.div_(wide.shape[-1]) if mean else squares).add_(eps).rsqrt_()
    output = wide * shrink
    return output if wide is vectors else output.to(vectors.dtype), shrink


def normalise(vectors: torch.Tensor, mean: bool, eps: float) -> torch.Tensor:
    """The vectors of the last axis at a mean, or a sum, of squares of 1, computed in float32 at least."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return Normalisation.apply(vectors, mean, eps)
    return normalised(vectors, mean, eps)[0]


def unit_length(vectors: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """The vectors of the last axis at length 1."""
    return normalise(vectors, False, eps)


def bucket_table(num_buckets: int, max_distance: int) -> list[int]:
    """T5's buckets of the distances from 0 to `max_distance`, exact up to half of them, then on a log scale."""
    exact = num_buckets // 2
    step = math.log(max_distance / exact) / (num_buckets - exact)
    far = [exact + int(math.log(distance / exact) / step) for distance in range(exact, max_distance)]
    return [min(bucket, num_buckets - 1) for bucket in [*range(exact), *far, num_buckets - 1]]


def relative_buckets(distances: torch.Tensor, table: list[int]) -> torch.Tensor:
    """The bucket of each distance (of 0 for negative ones, of the last in the table for larger ones)."""
    return torch.tensor(table, device=distances.device)[distances.clamp(0, len(table) - 1)]


def fixed_gate(carried: torch.Tensor, new: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """g * carried + (1 - g) * new with g = sigmoid(bias [D]): a learned share a feature. [B, S, D]"""
    keep = torch.sigmoid(bias)
    return keep * carried + (1 - keep) * new


def lstm_gate(carried: torch.Tensor, new: torch.Tensor, take: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """sigmoid(keep + 1) * carried + sigmoid(take - 1) * new: shares that depend on the input. [B, S, D]"""
    return torch.sigmoid(keep + 1) * carried + torch.sigmoid(take - 1) * new


class FanInLinear(nn.Linear):
    """A linear map that is initialised by its fan-in (He), at 0.02 four of them in a row would erase their input."""


class LayerMix(nn.Module):
    """Makes one vector a token of the outputs of all layers; holds the layers' weights."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(num_layers))

    def forward(self, layers: list[torch.Tensor]) -> torch.Tensor:
        return mix_layers(layers, self.logits)


class WindowRecurrence(GradientCheckpointingLayer):
    """Makes the embeddings for the next window of the token vectors of one: pooling and feed-forward."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.recurrence_hidden_size
        self.pooling, self.num_embeddings = config.pooling, config.num_recurrent_embeddings
        self.mix = LayerMix(config.num_hidden_layers) if config.pooling_layers == "weighted" else None
        self.key = nn.Parameter(torch.zeros(width)) if config.pooling == "attention" else None
        sizes = [width, *[inner] * config.recurrence_num_hidden_layers, width * self.num_embeddings]
        self.layers = nn.ModuleList(FanInLinear(a, b) for a, b in pairwise(sizes))
        self.activation = ACT2FN[config.recurrence_activation]

    def token_vectors(self, layers: list[torch.Tensor]) -> torch.Tensor:
        """One vector a token from the outputs of all layers, the last one after the final norm. [B, W, D]"""
        return layers[-1] if self.mix is None else self.mix(layers)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """[B, W, D], of which the tokens in `mask` [B, W] count -> [B, S, D]"""
        if self.key is not None:
            hidden = pool_attention(tokens, self.key, mask)
        else:
            hidden = pool_max(tokens, mask) if self.pooling == "max" else pool_mean(tokens, mask)
        for layer in self.layers[:-1]:
            hidden = self.activation(layer(hidden))
        return self.layers[-1](hidden).unflatten(-1, (self.num_embeddings, -1))


@torch.no_grad()
def init_recurrence(module: nn.Module) -> bool:
    """Whether the module is of this file; then it is initialised: by fan-in, or with equal weights."""
    if isinstance(module, FanInLinear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(module.bias)
    elif isinstance(module, LayerMix):
        nn.init.zeros_(module.logits)
    elif isinstance(module, WindowRecurrence) and module.key is not None:
        nn.init.zeros_(module.key)
    return isinstance(module, (FanInLinear, LayerMix, WindowRecurrence))
