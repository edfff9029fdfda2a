# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""From the token vectors of a window to the embeddings that the next window attends to.

Axes: B batch, W window, S state vectors, D width, L layers.
"""

import torch
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer


def mix_layers(layers: list[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    """The sum of the layers' outputs, each [B, W, D], weighted by softmax(logits [L]): eq. 1's inner sum. [B, W, D]"""
    weights = logits.softmax(0).to(layers[-1].dtype)
    return torch.tensordot(weights, torch.stack([layer.to(layers[-1].device) for layer in layers]), dims=1)


def pool_mean(tokens: torch.Tensor) -> torch.Tensor:
    """The mean over the window. [B, W, D] -> [B, D]"""
    return tokens.mean(1)


def pool_max(tokens: torch.Tensor) -> torch.Tensor:
    """The largest value of each feature over the window. [B, W, D] -> [B, D]"""
    return tokens.amax(1)


def pool_attention(tokens: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mean over the window, weighted by softmax(tokens . key / sqrt(D)), key [D]. [B, W, D] -> [B, D]"""
    scores = tokens @ key * tokens.shape[-1] ** -0.5
    return (scores.softmax(1).unsqueeze(1) @ tokens).squeeze(1)


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
    """Makes the embeddings for the next window of the token vectors of a full one: pooling and feed-forward."""

    def __init__(self, config) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.recurrence_hidden_size
        self.pooling, self.num_embeddings = config.pooling, config.num_recurrent_embeddings
        self.mix = LayerMix(config.num_hidden_layers) if config.pooling_layers == "weighted" else None
        self.key = nn.Parameter(torch.zeros(width)) if config.pooling == "attention" else None
        sizes = [width, *[inner] * config.recurrence_num_hidden_layers, width * self.num_embeddings]
        self.layers = nn.ModuleList(FanInLinear(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True))
        self.activation = ACT2FN[config.recurrence_activation]

    def token_vectors(self, layers: list[torch.Tensor]) -> torch.Tensor:
        """One vector a token from the outputs of all layers, the last one after the final norm. [B, W, D]"""
        return layers[-1] if self.mix is None else self.mix(layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, W, D] -> [B, S, D]"""
        if self.pooling == "attention":
            hidden = pool_attention(tokens, self.key)
        else:
            hidden = pool_max(tokens) if self.pooling == "max" else pool_mean(tokens)
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


class RandomState:
    """The state of the random numbers now, for dropout to fall on the same places again."""

    def __init__(self, device: torch.device) -> None:
        self.device_type = device.type
        self.cpu = torch.get_rng_state()
        self.devices, self.states = (
            ([], []) if device.type == "cpu" else get_device_states(torch.empty(0, device=device))
        )

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.states, device_type=self.device_type)


class TwoPassLoss(torch.autograd.Function):
    """The sum of the windows' losses; holds one window's activations at a time, and only the states of all.

    The first pass runs the windows without gradient and without the vocabulary, for their states. The second runs
    them again from the last to the first, each with its loss, and chains the gradient of the state. So the gradients
    are there when the loss is; `backward` scales them.
    """

    @staticmethod
    def forward(ctx, run, num_windows: int, state, device, *inputs: torch.Tensor) -> torch.Tensor:
        states, randomness = [state], []
        for number in range(num_windows - 1):
            randomness.append(RandomState(device))
            states.append(run(number, states[-1], False)[1])
        torch.clear_autocast_cache()  # its copies of the weights were made without gradient
        gradients: list[torch.Tensor | None] = [None] * len(inputs)
        total, state_gradient, after = 0.0, None, None
        for number in reversed(range(num_windows)):
            if number < num_windows - 1:
                randomness[number].restore()
            state = None if states[number] is None else states[number].detach().requires_grad_()
            with torch.enable_grad():
                loss, next_state = run(number, state, True)
            after = RandomState(device) if after is None else after
            total = total + loss.detach()
            pairs = [(loss, torch.ones_like(loss))]
            if state_gradient is not None:
                pairs.append((next_state, state_gradient))
            pairs = [(output, seed) for output, seed in pairs if output.requires_grad]
            state_gradient = None
            if pairs:
                wanted = [*inputs, *([] if state is None else [state])]
                outputs, seeds = zip(*pairs, strict=True)
                found = list(torch.autograd.grad(outputs, wanted, seeds, allow_unused=True))
                state_gradient = found.pop() if state is not None else None
                for index, gradient in enumerate(found):
                    if gradient is not None:
                        known = gradients[index]
                        gradients[index] = gradient if known is None else known.add_(gradient)
            del loss, next_state, pairs
        after.restore()
        ctx.gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("The loss of checkpointed windows can be differentiated once only.")
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, None, None, *(g.mul_(gradient.to(g.dtype)) for g in gradients)
