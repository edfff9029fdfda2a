"""Whether a recurrent model uses what it has read before."""

from typing import Any

import torch
from torch.nn import functional as F


@torch.no_grad()
def state_gain(model: Any, input_ids: torch.Tensor) -> dict[str, Any]:
    """How much worse a model predicts a text, [B, T], when every window, or block, starts from the state of a new one.

    `gain` is the mean loss with the state withheld minus the mean loss with it, in nats a token, over all windows but
    the first; `gain_by_position` is the same for each position in a window. A gain of about 0 means that the state is
    ignored; compare with the gain before training, which is noise of either sign. A block-recurrent model still sees
    the tokens of the block before, so that only the state counts.

    ```python
    >>> state_gain(model, tokenizer(chapter, return_tensors="pt").input_ids)["gain"]
    ```"""
    width, overlap = model.config.window_size, getattr(model.config, "overlap", 0)
    if overlap:
        raise ValueError(f"`overlap` must be 0 for windows to be withheld from each other, got {overlap}.")
    num_windows = input_ids.shape[1] // width
    if num_windows < 2:
        raise ValueError(
            f"`input_ids` must hold at least two windows of {width} tokens, got {input_ids.shape[1]} tokens."
        )
    ids = input_ids[:, : num_windows * width]
    targets = F.pad(input_ids, (0, 1), value=-100)[:, 1 : num_windows * width + 1]
    training = model.training
    model.eval()
    try:
        with_state = losses_of(model, ids, targets)
        if model.config.model_type == "block_recurrent":
            without = losses_with_states_reset(model, ids, targets)
        else:
            without = losses_of(model, ids.reshape(-1, width), targets.reshape(-1, width)).view_as(with_state)
    finally:
        model.train(training)
    known = (targets != -100).unflatten(1, (num_windows, width))[:, 1:]
    difference = (without - with_state).unflatten(1, (num_windows, width))[:, 1:] * known
    count = known.sum()
    return {
        "gain": (difference.sum() / count).item(),
        "loss_with_state": (with_state.unflatten(1, (num_windows, width))[:, 1:].sum() / count).item(),
        "loss_without_state": (without.unflatten(1, (num_windows, width))[:, 1:].sum() / count).item(),
        "gain_by_position": (difference.sum((0, 1)) / known.sum((0, 1)).clamp(min=1)).tolist(),
        "tokens": int(count),
    }


def losses_with_states_reset(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of every token where each block starts from the initial states, and sees the block before as ever."""
    cache, losses, width = model.cache_class(model.config), [], model.config.window_size
    for block, expected in zip(ids.split(width, 1), targets.split(width, 1), strict=True):
        logits = model(block, past_key_values=cache, use_cache=True).logits.float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), expected, reduction="none"))
        for layer in model.config.recurrent_layers:
            states = cache.tensors[f"states.{layer}"]
            cache.tensors[f"states.{layer}"] = model.model.layers[layer].cell.initial.expand_as(states)
    return torch.cat(losses, 1)


def losses_of(model: Any, ids: torch.Tensor, targets: torch.Tensor, chunk: int = 32) -> torch.Tensor:
    """The loss of every token of rows [B, T], 0 where it has no target."""
    losses = []
    for rows, expected in zip(ids.split(chunk), targets.split(chunk), strict=True):
        logits = model(rows, use_cache=False).logits.float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), expected, reduction="none"))
    return torch.cat(losses)
