"""Whether a recurrent model uses what it has read before.

Axes: B batch, T tokens, N windows, W window.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from ..modeling_recurrent_roberta import answer_loss, flat_positions, token_mask
from ..windowing import full_windows
from .perplexity import RECURRENT, hidden_states, token_losses


@torch.no_grad()
def state_gain(model: Any, input_ids: torch.Tensor, max_distance: int = 4) -> dict[str, Any]:
    """How much worse a model predicts texts, [B, T], when every window, or block, starts from the state of a new one.

    `gain` is the mean loss with the state withheld minus the mean loss with it, in nats a token, over all whole
    windows but the first; `gain_by_position` is the same for each position in a window, from `first_position`, the
    overlap, on. `gain_by_distance[d - 1]` is what the text gives that lies d windows back and further: the loss when
    the state knows of the d - 1 windows before only, minus the loss when it knows of all, over windows with
    `max_distance` others before them.

    A gain of about 0 means that the state is ignored; compare with the gain before training, which is noise of either
    sign. A block-recurrent model still sees the tokens of the block before, so that only the state counts.

    ```python
    >>> state_gain(model, tokenizer(chapter, return_tensors="pt").input_ids)["gain"]
    ```"""
    if model.config.model_type not in RECURRENT:
        raise ValueError(
            f"`model` must be of type {' or '.join(RECURRENT)}, got {model.config.model_type!r}; see "
            "`answer_state_gain` for question answering."
        )
    if max_distance < 1:
        raise ValueError(f"`max_distance` must be at least 1, got {max_distance}.")
    width, overlap = model.config.window_size, getattr(model.config, "overlap", 0)
    stride, num_windows = width - overlap, full_windows(input_ids.shape[1], width, overlap)
    if num_windows < 2:
        raise ValueError(
            f"`input_ids` must hold at least two windows of {width} tokens with an overlap of {overlap}, got "
            f"{input_ids.shape[1]} tokens."
        )
    period = min(max_distance, num_windows - 1)
    length = width + (num_windows - 1) * stride
    targets = F.pad(input_ids, (0, 1), value=-100)[:, 1 : length + 1].to(model.device)
    ids = input_ids[:, :length].to(model.device)
    training = model.training
    model.eval()
    try:
        whole = window_losses(model, ids, targets, set())
        none = window_losses(model, ids, targets, set(range(num_windows)))
        # By turns every window has its state withheld; those after it then know of 1, 2, ... windows.
        turns = [set(range(offset, num_windows, period)) for offset in range(period)] if period > 1 else []
        runs = [window_losses(model, ids, targets, withheld) for withheld in turns]
    finally:
        model.train(training)
    known = (targets != -100)[:, width:].unflatten(1, (num_windows - 1, stride))  # windows from the second on
    numbers = range(1, num_windows)
    some = [
        torch.stack([runs[(number - memory) % period][:, number - 1] for number in numbers], 1)
        for memory in range(1, period)
    ]
    short = torch.stack([none, *some])  # [memory, B, N - 1, stride]
    differences = (short - whole) * known
    far, far_known = differences[:, :, period - 1 :], known[:, period - 1 :]
    count = known.sum()
    return {
        "gain": (differences[0].sum() / count).item(),
        "loss_with_state": (whole.sum() / count).item(),
        "loss_without_state": (short[0].sum() / count).item(),
        "first_position": overlap,
        "gain_by_position": (differences[0].sum((0, 1)) / known.sum((0, 1)).clamp(min=1)).tolist(),
        "gain_by_distance": (far.sum((1, 2, 3)) / far_known.sum()).tolist(),
        "tokens": int(count),
        "windows": num_windows,
    }


def window_losses(model: Any, ids: torch.Tensor, targets: torch.Tensor, withheld: set[int]) -> torch.Tensor:
    """The losses of what the windows from the second on add, those `withheld` without their state. [B, N - 1, stride]

    0 where there is no target.
    """
    width, cache = model.config.window_size, model.cache_class(model.config)
    stride, start = width - getattr(model.config, "overlap", 0), 0
    losses: list[torch.Tensor] = []
    while start < ids.shape[1]:
        stop = start + (stride if start else width)
        if start and len(losses) + 1 in withheld:
            withhold_state(model, cache)
        outputs = hidden_states(model, ids[:, start:stop], past_key_values=cache, use_cache=True)
        if start:
            expected = targets[:, start:stop]
            found = token_losses(
                outputs.last_hidden_state.flatten(0, 1), model.get_output_embeddings(), expected.flatten()
            )
            losses.append(found.double().view_as(expected))
        start = stop
    return torch.stack(losses, 1)


def withhold_state(model: Any, cache: Any) -> None:
    """Takes from the cache what the next window, or block, would get from the ones before, but not their tokens."""
    if model.config.model_type == "recurrent_gpt2":
        first = dict.fromkeys(("windows", "reach"), [0] * cache.num_rows)
        cache.rows, cache.projected = cache.rows | first, {}
        return
    for layer in model.config.recurrent_layers:
        states = cache.tensors[f"states.{layer}"]
        cache.tensors[f"states.{layer}"] = model.model.layers[layer].cell.initial.to(states.dtype).expand_as(states)
    cache.projected = {}


@contextlib.contextmanager
def windows_apart(encoder: Any) -> Iterator[None]:
    """Lets no window of a RecurrentRobertaModel know of another meanwhile."""
    run = encoder.run_window

    def run_alone(
        tokens: Any, token_type_ids: Any, mask: Any, state: Any, has_state: Any, output_attentions: bool
    ) -> Any:
        return run(tokens, token_type_ids, mask, None, None, output_attentions)

    encoder.run_window = run_alone
    try:
        yield
    finally:
        del encoder.run_window


@torch.no_grad()
def answer_state_gain(model: Any, batches: Iterable[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """How much worse a RecurrentRobertaForQuestionAnswering answers when no window knows of the ones before.

    `gain` is the mean loss of examples of more than one window with the states withheld minus that with them, in nats
    an example; `gain_by_distance` is the same by the number of windows before the one in which the answer begins, for
    answers that are spans. The batches are those of `QuestionAnsweringCollator`, [B, N, W], with their answers.
    """
    kind = model.config.model_type
    if kind != "recurrent_roberta":
        raise ValueError(f"`model` must be of type 'recurrent_roberta', got {kind!r}.")
    rows: list[tuple[int, float, float]] = []
    training = model.training
    model.eval()
    try:
        for given in batches:
            batch = {name: values.to(model.device) for name, values in given.items()}
            if "answer_classes" not in batch or batch["input_ids"].dim() != 3:
                raise ValueError("`batches` must have windows [batch, windows, tokens] with `answer_classes`.")
            with_state = answer_losses(model, batch)
            with windows_apart(model.roberta):
                without = answer_losses(model, batch)
            windows = batch["attention_mask"].any(2).sum(1).tolist()
            places = batch["start_positions"].view(len(windows), -1).tolist()
            spans = (batch["answer_classes"].view(-1) == 0).tolist()
            for row, count in enumerate(windows):
                if count > 1:
                    window = places[row][0] if len(places[row]) == 2 else places[row][0] // batch["input_ids"].shape[2]
                    rows.append((window if spans[row] else -1, with_state[row], without[row]))
    finally:
        model.train(training)
    if not rows:
        raise ValueError("`batches` must have an example of at least two windows, got none.")
    by_distance: dict[int, list[float]] = {}
    for window, first, second in rows:
        if window >= 0:
            by_distance.setdefault(window, []).append(second - first)
    return {
        "gain": sum(second - first for _, first, second in rows) / len(rows),
        "loss_with_state": sum(first for _, first, _ in rows) / len(rows),
        "loss_without_state": sum(second for _, _, second in rows) / len(rows),
        "gain_by_distance": {str(window): sum(values) / len(values) for window, values in sorted(by_distance.items())},
        "examples_by_distance": {str(window): len(values) for window, values in sorted(by_distance.items())},
        "examples": len(rows),
    }


def answer_losses(model: Any, batch: dict[str, torch.Tensor]) -> list[float]:
    """The loss of each example of a batch."""
    outputs = model(**batch, return_dict=True)
    shape = batch["input_ids"].shape
    starts = flat_positions("start_positions", batch["start_positions"], shape)
    ends = flat_positions("end_positions", batch["end_positions"], shape)
    allowed = token_mask(model.config, batch["input_ids"], batch.get("attention_mask"))
    allowed = torch.ones(shape, dtype=torch.bool, device=starts.device) if allowed is None else allowed
    if "context_mask" in batch:
        allowed = allowed & batch["context_mask"].bool()
    parts = (
        outputs.start_logits.flatten(1),
        outputs.end_logits.flatten(1),
        outputs.class_logits,
        starts,
        ends,
        batch["answer_classes"].view(-1),
        allowed.flatten(1),
    )
    return [answer_loss(*(part[row : row + 1] for part in parts)).item() for row in range(shape[0])]


__all__ = ["answer_state_gain", "state_gain"]
