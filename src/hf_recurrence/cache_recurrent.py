# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""A transformers cache that holds, for every row, its window under way and what led to it.

Axes: B batch, H heads, W window, S state vectors, D width.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.cache_utils import Cache, CacheLayerMixin


# `crop` reaches back over the window before the one under way, and over this many tokens where windows are shorter.
CROP_TOKENS = 64
FORMAT = "hf_recurrence.recurrent_cache.1"


class WindowLayer(CacheLayerMixin):
    """One layer's keys and values of the window under way, [B, H, W, D], slot j a row's j-th token in it."""

    is_sliding = False
    is_croppable = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Puts the keys and values of the whole window under way in place of those held so far."""
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states, value_states
        return self.keys, self.values

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + length, 0

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False


# the fields of a model that a cache must fit
SIGNATURES = {
    "recurrent_gpt2": (
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_size",
        "window_size",
        "overlap",
        "insertion_layer",
        "pooling",
        "pooling_layers",
        "num_recurrent_embeddings",
    ),
    "block_recurrent": (
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "hidden_size",
        "window_size",
        "recurrent_layers",
        "num_states",
        "empty_cache",
        "attend_to_self",
    ),
}


def cache_signature(config: Any) -> dict[str, Any]:
    """The fields of this model that a cache must fit, with their values."""
    return {name: getattr(config, name) for name in ("model_type", *SIGNATURES[config.model_type])}


class RowCache(Cache):
    """Keys and values of all layers, further tensors, and numbers that say where each row stands.

    All tensors have the batch as their first axis. `rows` holds a list of numbers, one a row, for each of `ROWS`.
    """

    ROWS: tuple[str, ...] = ()
    model_type = ""

    def __init__(self, config: Any) -> None:
        super().__init__(layers=[WindowLayer() for _ in range(config.num_hidden_layers)])
        self.signature = cache_signature(config)
        self.reset()

    def reset(self) -> None:
        """Empties the cache."""
        for layer in self.layers:
            layer.reset()
        self.num_columns = 0  # input columns seen, pads included
        self.rows: dict[str, list[int]] = {name: [] for name in self.ROWS}
        self.tensors: dict[str, torch.Tensor] = {}
        self.projected: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer -> keys and values of the state

    @property
    def num_rows(self) -> int:
        """The number of rows, 0 as long as the cache is empty."""
        return len(self.rows[self.ROWS[0]])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_columns

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.num_columns + length, 0

    def nbytes(self) -> int:
        """The bytes of all tensors that the cache holds."""
        kept = [*self.tensors.values(), *(t for pair in self.projected.values() for t in pair)]
        kept += [t for layer in self.layers for t in (layer.keys, layer.values) if t is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def store(
        self,
        num_columns: int,
        rows: dict[str, list[int]],
        tensors: dict[str, torch.Tensor],
        keys_values: list[tuple[torch.Tensor, torch.Tensor]],
        projected: dict[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Takes over where a call has left every row, all at once: a call that fails leaves the cache as it was."""
        self.num_columns, self.rows, self.tensors, self.projected = num_columns, rows, tensors, projected
        for layer, (keys, values) in zip(self.layers, keys_values, strict=True):
            layer.update(keys, values)

    # -- rows --------------------------------------------------------------------------------------------------------
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Puts row `beam_idx[b]`, with all of its state, in place of row b."""
        if not self.num_rows:
            return

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(0, beam_idx.to(tensor.device))

        for layer in self.layers:
            layer.keys, layer.values = pick(layer.keys), pick(layer.values)
        self.tensors = {name: pick(tensor) for name, tensor in self.tensors.items()}
        self.projected = {layer: (pick(keys), pick(values)) for layer, (keys, values) in self.projected.items()}
        self.rows = {name: [values[row] for row in beam_idx.tolist()] for name, values in self.rows.items()}

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps only these rows."""
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Puts `repeats` copies of each row side by side."""
        self.reorder_cache(torch.arange(self.num_rows).repeat_interleave(repeats))

    def restart_rows(self, restart: list[bool]) -> None:
        """Lets the marked rows begin a new document with the next call."""
        self.rows, self.projected = self.restarted(restart), {}

    def restarted(self, restart: list[bool]) -> dict[str, list[int]]:
        """The rows' places with those marked at the start of a new document."""
        start = dict.fromkeys(self.ROWS, 0) | {"first_columns": self.num_columns}
        return {
            name: [start[name] if new else value for new, value in zip(restart, values, strict=True)]
            for name, values in self.rows.items()
        }

    def _length_after_crop(self, max_length: int) -> int:
        if not isinstance(max_length, int):
            raise ValueError(f"`max_length` must be an integer, got {max_length!r}.")
        return max_length if max_length > 0 else self.num_columns + max_length

    def keys_values(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values of all layers, without room for more."""
        return [(layer.keys, layer.values) for layer in self.layers]

    # -- files -------------------------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache to one safetensors file, whole or not at all."""
        if not self.num_rows:
            raise ValueError("The cache is empty: run the model over some text with it first.")
        tensors = {f"state.{name}": tensor for name, tensor in self.tensors.items()}
        for number, (keys, values) in enumerate(self.keys_values()):
            tensors[f"layers.{number}.keys"], tensors[f"layers.{number}.values"] = keys, values
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        facts = {"signature": self.signature, "num_columns": self.num_columns, "rows": self.rows}
        partial = Path(f"{path}.partial")
        save_file(tensors, partial, metadata={"format": FORMAT, "cache": json.dumps(facts)})
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Any:
        """The cache that `save` wrote; the text goes on from it as if it had never been away."""
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata, names = file.metadata() or {}, file.keys()
                tensors = {name: file.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise ValueError(f"`path` must be a whole safetensors file, got {str(path)!r}: {error}.") from error
        if metadata.get("format") != FORMAT:
            raise ValueError(f"`path` must be a file written by `{cls.__name__}.save`, got {str(path)!r}.")
        facts = json.loads(metadata["cache"])
        if facts["signature"]["model_type"] != cls.model_type:
            raise ValueError(
                f"`path` must be a file written by `{cls.__name__}.save`, got {str(path)!r} of a model of type "
                f"{facts['signature']['model_type']!r}."
            )
        cache = cls(SimpleNamespace(**facts["signature"]))
        keys_values = [
            (tensors[f"layers.{number}.keys"], tensors[f"layers.{number}.values"])
            for number in range(len(cache.layers))
        ]
        kept = {name.removeprefix("state."): tensor for name, tensor in tensors.items() if name.startswith("state.")}
        cache.store(facts["num_columns"], facts["rows"], kept, keys_values, {})
        return cache


class RecurrentCache(RowCache):
    """What each row needs to go on: keys, values, token vectors and inputs of its window under way, the embeddings it
    got from the window before, and what `crop` needs to go back. Its size does not grow with the text.

    Rows stand at places of their own, which the lists in `rows` tell. Of a row's window under way `held` tokens are
    known and `filled` of them have been run (the rest, an overlap or what `crop` left, is run with the next call);
    `windows` lie before it, the last `reach` of which can be gone back to; its document began at `first_columns`.

    The tensors: states [B, past + 1, S, D], what entered each of the past windows and, last, the one under way; past
    [B, past * stride, D] and past_columns, the inputs before it and their columns; inputs [B, W, D] and columns, those
    of the window under way; vectors [B, W, D], its token vectors.

    ```python
    >>> cache = model(book_ids, use_cache=True, logits_to_keep=1).past_key_values
    >>> cache.save("book.safetensors")
    >>> cache = RecurrentCache.load("book.safetensors")
    ```"""

    ROWS = ("held", "filled", "windows", "reach", "first_columns")
    model_type = "recurrent_gpt2"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.stride = config.window_size - config.overlap
        # windows kept for `crop`, which a token of the previous window that lies in its overlap goes back to
        self.num_past = max(-(-CROP_TOKENS // self.stride), 1 - (-config.overlap // self.stride))

    @property
    def state(self) -> torch.Tensor | None:
        """The embeddings that the windows under way attend to, [B, S, D]; None while all are first windows."""
        return self.tensors["states"][:, -1] if any(self.rows["windows"]) else None

    # -- going back --------------------------------------------------------------------------------------------------
    def crop(self, max_length: int) -> None:
        """Forgets the columns from `max_length` on, or the last `-max_length` where it is negative (0 forgets none).

        Reaches back over the window under way and the one before it (over more where windows are short); a
        `ValueError` says when that is not enough, and the cache stays as it was.
        """
        length = self._length_after_crop(max_length)
        if length >= self.num_columns or not self.num_rows:
            return
        kept, first = self.tensors, self.num_past * self.stride
        columns = torch.cat([kept["past_columns"], kept["columns"]], 1).tolist()
        rows: dict[str, list[int]] = {name: [] for name in self.ROWS}
        steps = []
        for row in range(self.num_rows):
            place = {name: values[row] for name, values in self.rows.items()}
            known = columns[row][first - place["reach"] * self.stride : first + place["held"]]
            left = sum(column < length for column in known) - place["reach"] * self.stride
            lost = place["windows"] > place["reach"] and not (known and known[0] <= length)
            back = 0
            while left < self.signature["overlap"] and back < place["windows"]:
                left, back = left + self.stride, back + 1
            if lost or back > place["reach"] or length < place["first_columns"]:
                raise ValueError(
                    f"`max_length` must not reach further back than the {place['reach']} windows before the one under "
                    f"way, nor before a reset, got {max_length} in row {row} of a cache of {self.num_columns} columns."
                )
            place |= {"held": left, "filled": 0 if back else min(place["filled"], left)}
            place |= {"windows": place["windows"] - back, "reach": place["reach"] - back}
            for name in self.ROWS:
                rows[name].append(place[name])
            steps.append(back)
        self._go_back(length, rows, torch.tensor(steps))

    def _go_back(self, length: int, rows: dict[str, list[int]], steps: torch.Tensor) -> None:
        """Cuts all tensors to the places in `rows`, each of them `steps` windows before the one it had."""
        kept, first, moved = self.tensors, self.num_past * self.stride, bool(steps.any())
        held, filled = max(rows["held"]), max(rows["filled"])
        if moved:
            device = kept["past"].device
            index = torch.arange(first + held, device=device) - steps.to(device)[:, None] * self.stride
            everything = torch.cat([kept["past"], kept["inputs"]], 1)
            index = index.clamp(0, everything.shape[1] - 1)
            inputs = everything.gather(1, index.unsqueeze(-1).expand(-1, -1, everything.shape[-1]))
            columns = torch.cat([kept["past_columns"], kept["columns"]], 1).gather(1, index)
            which = (torch.arange(self.num_past + 1, device=device) - steps.to(device)[:, None]).clamp(min=0)
            states = kept["states"][torch.arange(len(steps), device=device)[:, None], which]
            kept = kept | {"past": inputs[:, :first], "past_columns": columns[:, :first], "states": states}
            kept |= {"inputs": inputs[:, first:], "columns": columns[:, first:]}
        kept = kept | {"inputs": kept["inputs"][:, :held], "columns": kept["columns"][:, :held]}
        kept |= {"vectors": kept["vectors"][:, :filled]}
        keys_values = [(layer.keys[:, :, :filled], layer.values[:, :, :filled]) for layer in self.layers]
        self.store(length, rows, kept, keys_values, {} if moved else self.projected)


class BlockRecurrentCache(RowCache):
    """What each row needs to go on: keys and values of two blocks and of the one under way, and states.

    The lists in `rows` tell of each row: `held` tokens of its block under way are known; `windows` blocks lie before
    it, of which the last can be gone back to if `reach` is 1; its document began at column `first_columns`.

    The keys of slot j are those of the j-th token since two blocks before; there may be room behind the last. The
    tensors: `states.LAYER` [B, 2, S, D], what entered the block before and the one under way; columns [B, W + C], the
    input columns of the tokens of both.
    """

    ROWS = ("held", "windows", "reach", "first_columns")
    model_type = "block_recurrent"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.window_size = config.window_size

    def keys_values(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        length = 2 * self.window_size + max(self.rows["held"])
        return [(keys[:, :, :length], values[:, :, :length]) for keys, values in super().keys_values()]

    @property
    def states(self) -> dict[int, torch.Tensor]:
        """The states that enter the blocks under way, [B, S, D], by layer."""
        layers = self.signature["recurrent_layers"] if self.num_rows else []
        return {layer: self.tensors[f"states.{layer}"][:, 1] for layer in layers}

    def crop(self, max_length: int) -> None:
        """Forgets the columns from `max_length` on, or the last `-max_length` where it is negative (0 forgets none).

        Reaches back over the block under way and the one before it; a `ValueError` says when that is not enough, and
        the cache stays as it was.
        """
        length = self._length_after_crop(max_length)
        if length >= self.num_columns or not self.num_rows:
            return
        width, columns = self.window_size, self.tensors["columns"].tolist()
        rows: dict[str, list[int]] = {name: [] for name in self.ROWS}
        steps = []
        for row in range(self.num_rows):
            place = {name: values[row] for name, values in self.rows.items()}
            known = columns[row][width - place["reach"] * width : width + place["held"]]
            left = sum(column < length for column in known) - place["reach"] * width
            back = int(left < 0)
            lost = place["windows"] > place["reach"] and not (known and known[0] <= length)
            if lost or length < place["first_columns"]:
                raise ValueError(
                    f"`max_length` must not reach further back than the block before the one under way, nor before a "
                    f"reset, got {max_length} in row {row} of a cache of {self.num_columns} columns."
                )
            place |= {"held": left + back * width, "windows": place["windows"] - back, "reach": place["reach"] - back}
            for name in self.ROWS:
                rows[name].append(place[name])
            steps.append(back)
        moved, held = torch.tensor(steps), max(rows["held"])

        def shift(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
            """The first `size` places after those of `axis` have moved by a block where a row has gone back."""
            if not any(steps):
                return tensor.narrow(axis, 0, size)
            index = torch.arange(size) - moved[:, None] * width
            index = index.clamp(0, tensor.shape[axis] - 1).to(tensor.device)
            index = index.view(len(steps), *[1] * (axis - 1), size, *[1] * (tensor.dim() - axis - 1))
            return tensor.gather(axis, index.expand(*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]))

        tensors = {"columns": shift(self.tensors["columns"], 1, width + held)}
        for layer in self.signature["recurrent_layers"]:
            states = self.tensors[f"states.{layer}"]
            gone = moved.to(states.device)[:, None, None].bool()
            current = torch.where(gone, states[:, 0], states[:, 1])
            tensors[f"states.{layer}"] = torch.stack([states[:, 0], current], 1)
        pairs = [
            (shift(layer.keys, 2, 2 * width + held), shift(layer.values, 2, 2 * width + held)) for layer in self.layers
        ]
        self.store(length, rows, tensors, pairs, {})


__all__ = ["BlockRecurrentCache", "RecurrentCache"]
