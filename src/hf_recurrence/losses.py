# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""The loss of a text in the memory of one window.

Axes: B batch, T tokens, W window, S state vectors, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import get_device_states, set_device_states


def sum_of_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the cross entropies of logits [B, T, V] and targets [B, T], where these are not -100."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(logits.device), reduction="sum")


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of the cross entropies of `hidden @ weight.T`, from [T, D], [V, D] and targets [T].

    Logits are made for `chunk` tokens at a time, and turned in place into what the gradients need, so that they exist
    once instead of three times. With `weight_sum`, the gradient of the weight is added to it and returned as None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        chunk: int,
        weight_sum: torch.Tensor | None,
    ) -> torch.Tensor:
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        ctx.added = weight_sum is not None
        if want_weight and weight_sum is None:
            weight_sum = torch.zeros_like(weight)
        losses, gradients = [], []
        for inputs, expected in zip(hidden.split(chunk), targets.to(hidden.device).split(chunk), strict=True):
            logits = inputs @ weight.T
            logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
            counted = (expected != -100).unsqueeze(1)
            expected = expected.clamp(min=0).unsqueeze(1)
            largest, place = logits.max(1, keepdim=True)
            chosen = logits.gather(1, expected)
            torch.softmax(logits, 1, out=logits)
            log_sum = largest - logits.gather(1, place).log()
            losses.append(((log_sum - chosen) * counted).sum())
            if not (want_hidden or want_weight):
                continue
            logits.scatter_add_(1, expected, logits.new_full((1, 1), -1.0).expand_as(expected))
            difference = (logits if counted.all() else logits.mul_(counted)).to(weight.dtype)
            if want_hidden:
                gradients.append((difference @ weight).to(hidden.dtype))
            if want_weight:
                weight_sum.addmm_(difference.T, inputs.to(weight.dtype))
        ctx.gradients = (torch.cat(gradients) if want_hidden else None, None if ctx.added else weight_sum)
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = take_gradients(ctx)
        return *(None if g is None else g.mul_(gradient.to(g.dtype)) for g in found), None, None, None


def take_gradients(ctx: Any) -> Any:
    """The gradients that were computed with the loss, which are scaled in place and so can be used once."""
    if ctx.gradients is None:
        raise RuntimeError("The loss can be differentiated once only: its gradients are computed together with it.")
    gradients, ctx.gradients = ctx.gradients, None
    return gradients


def head_loss(
    lm_head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor, chunk: int, weight_sum: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of the losses of hidden states [B, T, D], without logits of more than `chunk` tokens a row at a time."""
    if is_plain_linear(lm_head) and torch.is_grad_enabled():
        hidden, targets, size = hidden.transpose(0, 1).flatten(0, 1), targets.T.flatten(), chunk * hidden.shape[0]
        return LinearCrossEntropy.apply(hidden, lm_head.weight, targets, size, weight_sum)
    pairs = zip(hidden.split(chunk, 1), targets.split(chunk, 1), strict=True)
    return torch.stack([sum_of_losses(lm_head(part), expected) for part, expected in pairs]).sum()


def logits_and_loss(
    lm_head: nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor | None,
    logits_to_keep: int | torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits of the columns to keep, and the sum of the losses of all columns where there are targets."""
    if isinstance(logits_to_keep, int):
        logits = lm_head(hidden[:, -logits_to_keep if logits_to_keep else None :])
    else:
        logits = lm_head(hidden[:, logits_to_keep])
    if targets is None:
        return logits, None
    if logits.shape[1] == targets.shape[1]:
        return logits, sum_of_losses(logits, targets)
    return logits, head_loss(lm_head, hidden, targets, chunk)


def number_of_items(targets: torch.Tensor, given: int | torch.Tensor | None) -> torch.Tensor:
    """What the sum of the losses is divided by: what was given, or the number of targets; 1 where there are none."""
    return ((targets != -100).sum() if given is None else torch.as_tensor(given)).clamp(min=1)


def is_plain_linear(lm_head: nn.Module) -> bool:
    """Whether the module does nothing but multiply by its weight: no bias, adapter or hook."""
    hooks = (lm_head._forward_hooks, lm_head._forward_pre_hooks, lm_head._backward_hooks, lm_head._backward_pre_hooks)
    changed = any(hooks) or "forward" in vars(lm_head)
    return type(lm_head) is nn.Linear and lm_head.bias is None and not changed


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


def add_gradients(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    state: torch.Tensor | None,
    inputs: tuple[torch.Tensor, ...],
    gradients: list[torch.Tensor | None],
) -> torch.Tensor | None:
    """The gradient of the state, from a window's outputs and their gradients; those of `inputs` are added in place."""
    pairs = [(output, seed) for output, seed in pairs if output.requires_grad]
    if not pairs:
        return None
    wanted = [*inputs, *([] if state is None else [state])]
    outputs, seeds = zip(*pairs, strict=True)
    found = list(torch.autograd.grad(outputs, wanted, seeds, allow_unused=True))
    state_gradient = found.pop() if state is not None else None
    for index, gradient in enumerate(found):
        if gradient is not None and gradients[index] is None:
            gradients[index] = gradient.to_dense()
        elif gradient is not None:
            gradients[index].add_(gradient)
    return state_gradient


class TwoPassLoss(torch.autograd.Function):
    """The sum of the windows' losses; holds one window's activations at a time, and only the states of all.

    The first pass runs the windows without gradient and without the vocabulary, for their states. The second runs
    them again from the last to the first, each with its loss, and chains the gradient of the state. So the gradients
    are there when the loss is; `backward` scales them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[int, torch.Tensor | None, bool], tuple[torch.Tensor | None, torch.Tensor | None]],
        num_windows: int,
        state: torch.Tensor | None,
        device: torch.device,
        sums: dict[int, torch.Tensor],
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        """`run(number, state, with_loss)` gives the loss of a window, or None, and the state after it.

        `sums` may hold, by id of an input, a tensor of zeros to which `run` itself adds a part of its gradient.
        """
        states, randomness = [state], []
        for number in range(num_windows - 1):
            randomness.append(RandomState(device))
            states.append(run(number, states[-1], False)[1])
        torch.clear_autocast_cache()  # its copies of the weights were made without gradient
        gradients = [sums.get(id(tensor)) for tensor in inputs]
        losses: list[torch.Tensor] = []
        state_gradient: torch.Tensor | None = None
        after: RandomState | None = None
        for number in reversed(range(num_windows)):
            if number < num_windows - 1:
                randomness[number].restore()
            state = None if states[number] is None else states[number].detach().requires_grad_()
            with torch.enable_grad():
                loss, next_state = run(number, state, True)
            after = RandomState(device) if after is None else after
            losses.append(loss.detach())
            pairs = [(loss, torch.ones_like(loss))]
            if state_gradient is not None:
                pairs.append((next_state, state_gradient))
            state_gradient = add_gradients(pairs, state, inputs, gradients)
            del loss, next_state, pairs
        after.restore()
        ctx.gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, None, None, *(g.mul_(gradient.to(g.dtype)) for g in take_gradients(ctx))


class TwoPassWindows(torch.autograd.Function):
    """The outputs of all windows, one after the other; holds one window's activations at a time, and all states.

    For losses over all windows at once. The windows are run without gradient; `backward` runs them again from the
    last to the first, and chains the gradient of the state.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[int, torch.Tensor | None], tuple[tuple[torch.Tensor, ...], torch.Tensor | None]],
        num_windows: int,
        device: torch.device,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """`run(number, state)` gives the outputs of a window and the state after it."""
        states: list[torch.Tensor | None] = [None]
        outputs, randomness = [], []
        for number in range(num_windows):
            randomness.append(RandomState(device))
            of_window, state = run(number, states[-1])
            outputs.append(of_window)
            states.append(state)
        torch.clear_autocast_cache()  # its copies of the weights were made without gradient
        ctx.run, ctx.states, ctx.randomness, ctx.inputs, ctx.device = run, states, randomness, inputs, device
        ctx.autocast = {
            "enabled": torch.is_autocast_enabled(device.type),
            "dtype": torch.get_autocast_dtype(device.type),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        ctx.set_materialize_grads(False)
        return tuple(output for of_window in outputs for output in of_window)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *seeds: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        gradients: list[torch.Tensor | None] = [None] * len(ctx.inputs)
        state_gradient: torch.Tensor | None = None
        now, size = RandomState(ctx.device), len(seeds) // len(ctx.randomness)
        for number, random_state in reversed(list(enumerate(ctx.randomness))):
            random_state.restore()
            state = ctx.states[number]
            state = None if state is None else state.detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(ctx.device.type, **ctx.autocast):
                outputs, next_state = ctx.run(number, state)
            pairs = list(zip(outputs, seeds[number * size : (number + 1) * size], strict=True))
            pairs.append((next_state, state_gradient))
            pairs = [(output, seed) for output, seed in pairs if seed is not None]
            state_gradient = add_gradients(pairs, state, ctx.inputs, gradients)
            del outputs, next_state, pairs
        now.restore()
        return None, None, None, *(torch.zeros_like(x) if g is None else g for x, g in zip(ctx.inputs, gradients))
