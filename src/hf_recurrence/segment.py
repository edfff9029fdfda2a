# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""One forward call of a recurrent model: its inputs checked, cut into windows, merged again, and kept in the cache.

Axes: B batch, T tokens, W window, S state vectors, D width.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .cache_recurrent import RecurrentCache, cache_signature
from .windowing import Rows, compact_order, full_windows, gather_columns, next_labels, spread_maps


KeysValues = tuple[torch.Tensor, torch.Tensor]


def check_inputs(
    config: Any,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    cache: RecurrentCache | None,
    attention_mask: torch.Tensor | None,
    token_type_ids: torch.Tensor | None,
    reset: torch.Tensor | None,
    others: dict[str, Any],
    cache_class: type = RecurrentCache,
) -> None:
    """Raises a `ValueError` for the first argument that the model cannot work with."""
    given = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "attention_mask": attention_mask}
    for key, value in (given | {"token_type_ids": token_type_ids}).items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise ValueError(f"`{key}` must be a tensor, got {type(value).__name__}.")
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Exactly one of `input_ids` and `inputs_embeds` must be given.")
    name, tokens, axes = ("input_ids", input_ids, 2) if inputs_embeds is None else ("inputs_embeds", inputs_embeds, 3)
    if tokens.dim() != axes or 0 in tokens.shape:
        shape = "[batch, tokens]" if axes == 2 else "[batch, tokens, hidden_size]"
        raise ValueError(f"`{name}` must be {shape} with at least one row and one token, got {list(tokens.shape)}.")
    if inputs_embeds is not None and not inputs_embeds.is_floating_point():
        raise ValueError(f"`inputs_embeds` must be floating point, got {inputs_embeds.dtype}.")
    if inputs_embeds is not None and inputs_embeds.shape[-1] != config.hidden_size:
        raise ValueError(
            f"`inputs_embeds` must have `hidden_size` ({config.hidden_size}) features, got {inputs_embeds.shape[-1]}."
        )
    num_rows, num_new = tokens.shape[:2]
    if others.get("encoder_hidden_states") is not None:
        raise ValueError("`encoder_hidden_states` must be left out: windows have no encoder to attend to.")
    if cache is not None and type(cache).__name__ != cache_class.__name__:
        raise ValueError(f"`past_key_values` must be a {cache_class.__name__}, got {type(cache).__name__}.")
    num_before = 0
    if cache is not None:
        expected = cache_signature(config)
        wrong = [field for field, value in expected.items() if cache.signature.get(field) != value]
        if wrong:
            raise ValueError(
                f"`past_key_values` must come from a model with `{wrong[0]}` = {expected[wrong[0]]!r}, got a cache "
                f"with {cache.signature.get(wrong[0])!r}."
            )
        if cache.num_rows not in (0, num_rows):
            raise ValueError(
                f"`past_key_values` must have as many rows as `{name}` ({num_rows}), got {cache.num_rows}."
            )
        num_before = cache.num_columns
    if attention_mask is not None:
        allowed = {(num_rows, num_new), (num_rows, num_before + num_new)}
        if tuple(attention_mask.shape) not in allowed:
            shapes = " or ".join(str(list(shape)) for shape in sorted(allowed))
            raise ValueError(
                f"`attention_mask` must be {shapes} (the new columns, or all), got {list(attention_mask.shape)}."
            )
    if token_type_ids is not None and token_type_ids.shape != tokens.shape[:2]:
        raise ValueError(
            f"`token_type_ids` must be {list(tokens.shape[:2])} as `{name}`, got {list(token_type_ids.shape)}."
        )
    position_ids = others.get("position_ids")
    if position_ids is not None and tuple(position_ids.shape) not in ((num_rows, num_new), (1, num_new)):
        raise ValueError(f"`position_ids` must be {[num_rows, num_new]} as `{name}`, got {list(position_ids.shape)}.")
    check_reset(reset, num_rows)
    for key, ids in (("input_ids", input_ids), ("token_type_ids", token_type_ids)):
        if ids is not None:
            check_ids(key, ids, config.vocab_size)


def check_finite(model: torch.nn.Module) -> None:
    """Raises a `ValueError` if a parameter that was loaded is not finite."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.is_meta and not torch.isfinite(parameter).all():
            count = int((~torch.isfinite(parameter)).sum())
            raise ValueError(f"`{name}` of the checkpoint must be finite, got {count} values of NaN or infinity.")


def check_reset(reset: torch.Tensor | None, num_rows: int) -> None:
    """Raises a `ValueError` if `reset` is not a boolean a row."""
    if reset is None:
        return
    if not isinstance(reset, torch.Tensor):
        raise ValueError(f"`reset` must be a tensor of one boolean a row, [{num_rows}], got {type(reset).__name__}.")
    if reset.dtype != torch.bool or tuple(reset.shape) != (num_rows,):
        raise ValueError(f"`reset` must be one boolean a row, [{num_rows}], got {list(reset.shape)} of {reset.dtype}.")


def check_ids(name: str, ids: torch.Tensor, vocab_size: int, ignore_index: int | None = None) -> None:
    """Raises a `ValueError` if an id is not in the vocabulary (nor `ignore_index`)."""
    if torch.compiler.is_compiling():
        return
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"`{name}` must be integers, got {ids.dtype}.")
    if ignore_index is not None:
        ids = ids.masked_fill(ids == ignore_index, 0)
    least, most = torch.aminmax(ids)
    if least < 0 or most >= vocab_size:
        value = int(least if least < 0 else most)
        also = "" if ignore_index is None else f", or {ignore_index}"
        raise ValueError(f"`{name}` must be from 0 to `vocab_size` - 1 ({vocab_size - 1}){also}, got {value}.")


def check_labels(config: Any, name: str, labels: torch.Tensor, tokens: torch.Tensor | None) -> None:
    """Raises a `ValueError` for labels that do not fit the tokens or the vocabulary."""
    if not isinstance(labels, torch.Tensor):
        raise ValueError(f"`{name}` must be a tensor, got {type(labels).__name__}.")
    if tokens is not None and labels.shape != tokens.shape[:2]:
        raise ValueError(f"`{name}` must be {list(tokens.shape[:2])} as the inputs, got {list(labels.shape)}.")
    check_ids(name, labels, config.vocab_size, ignore_index=-100)


def document_starts(
    position_ids: torch.Tensor, mask: torch.Tensor | None, shape: torch.Size, continued: bool
) -> torch.Tensor | None:
    """The columns, [B, T], where documents begin inside a row; None where there are none.

    `position_ids` count the real tokens of a document from 0; windows restart them on their own.
    """
    order, rank = compact_order(torch.ones(shape, device=position_ids.device) if mask is None else mask)
    positions = position_ids.expand(shape).gather(1, order)
    before, after = positions[:, :-1], positions[:, 1:]
    real = torch.ones_like(after, dtype=torch.bool) if mask is None else mask.gather(1, order)[:, 1:]
    wrong = real & (after != before + 1) & (after != 0)
    first = torch.ones_like(wrong[:, 0]) if mask is None else mask.any(1)
    wrong_rows = wrong.any(1) | (first & (positions[:, 0] != 0) & (not continued))
    if wrong_rows.any():
        row = int(wrong_rows.nonzero()[0])
        raise ValueError(
            "`position_ids` must count each document's tokens from 0 by ones, leaving out pads of `attention_mask`, "
            f"got {position_ids.expand(shape)[row, :8].tolist()}... in row {row}."
        )
    starts = real & (after == 0)
    return torch.nn.functional.pad(starts, (1, 0)).gather(1, rank) if starts.any() else None


def real_columns(attention_mask: torch.Tensor | None, num_new: int) -> torch.Tensor | None:
    """The part of the mask for the new columns, as booleans; None if it is known to mark no pad. [B, T]"""
    if attention_mask is None:
        return None
    mask = attention_mask[:, -num_new:].bool()
    return None if not torch.compiler.is_compiling() and mask.all() else mask


def merge_layers(
    merge: Callable[[list[torch.Tensor]], torch.Tensor], windows: list[list[torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    """The outputs of all windows merged, layer by layer."""
    return tuple(merge_layer(merge, list(of_layer)) for of_layer in zip(*windows, strict=True))


def merge_layer(merge: Callable[[list[torch.Tensor]], torch.Tensor], windows: list[torch.Tensor]) -> torch.Tensor:
    """The outputs of all windows merged; the gradient of the merged ones can be asked for."""
    merged = merge(windows)
    if merged.requires_grad and not torch.compiler.is_compiling():
        follow_gradient(merged, windows, merge)
    return merged


def follow_gradient(
    merged: torch.Tensor, windows: list[torch.Tensor], merge: Callable[[list[torch.Tensor]], torch.Tensor]
) -> None:
    """Lets `merged.retain_grad()` collect the gradients of the windows it was merged from, as if it had been used."""
    target = weakref.ref(merged)
    empty = [(window.shape, window.dtype, window.device) for window in windows]

    def add(gradient: torch.Tensor, number: int) -> None:
        found = target()
        if found is not None and found.retains_grad:
            pieces = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in empty]
            pieces[number] = gradient.detach()
            placed = merge(pieces)
            found.grad = placed if found.grad is None else found.grad + placed

    for number, window in enumerate(windows):
        if window.requires_grad:
            window.register_hook(partial(add, number=number))


@dataclass
class WindowOutput:
    """What running one window gives."""

    hidden_states: torch.Tensor  # after the final norm, [B, W, D]
    vectors: torch.Tensor  # one a token, for the pooling, [B, W, D]
    keys_values: list[KeysValues]
    projected: dict[int, KeysValues]  # the state's, by layer
    layers: list[torch.Tensor]
    attentions: list[torch.Tensor]


def make_targets(
    config: Any,
    tokens: torch.Tensor,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The id that each token predicts, -100 at pads and where there is none; None without labels. [B, T]"""
    name, given = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    if given is None:
        return None
    check_labels(config, name, given, tokens)
    mask = real_columns(attention_mask, given.shape[1])
    if shift_labels is None:
        return next_labels(given, mask, position_ids)
    return given if mask is None else given.masked_fill(~mask, -100)


class RecurrentGeneration:
    """What generate() needs to know of models that continue from a cache of their own, a `cache_class`."""

    cache_class: type

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        """Puts our cache where generate() would make one of its own."""
        if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
            raise ValueError(
                "`cache_implementation` must be left out, the model has a cache of constant size of its own, got "
                f"{generation_config.cache_implementation!r}."
            )
        cache, reset = model_kwargs.get("past_key_values"), model_kwargs.pop("reset", None)
        if reset is not None and cache is not None and cache.num_rows:  # at the start, not at every token
            check_reset(reset, cache.num_rows)
            cache.restart_rows(reset.tolist())
        if cache is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = self.cache_class(self.config)

    def _get_initial_cache_position(
        self, seq_length: int, device: Any, model_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Where the new tokens stand, which transformers before 5.10 asks; `seq_length` may be of only these."""
        cache = model_kwargs.get("past_key_values")
        if cache is not None and 0 < seq_length <= cache.get_seq_length():
            start = cache.get_seq_length()
            model_kwargs["cache_position"] = torch.arange(start, start + seq_length, device=device)
        return super()._get_initial_cache_position(seq_length, device, model_kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: torch.LongTensor, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The arguments of `forward` for the next step; `input_ids` of a continued text may be only the new ones."""
        if kwargs.get("next_sequence_length") is not None and kwargs["next_sequence_length"] <= 0:
            kwargs["next_sequence_length"] = None
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        inputs.pop("cache_position", None)
        inputs.pop("position_ids", None)
        if inputs.get("attention_mask") is not None:
            new = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
            inputs["attention_mask"] = inputs["attention_mask"][:, -new.shape[1] :]
        return inputs


class Segment:
    """What one forward call receives: its tokens on the windows of their rows, and what the cache knows of these."""

    def __init__(
        self,
        model: Any,
        tokens: torch.Tensor,
        token_types: torch.Tensor | None,
        mask: torch.Tensor | None,
        reset: torch.Tensor | None,
        cache: RecurrentCache | None,
        exact: bool,
    ) -> None:
        self.model, self.config = model, model.config
        num_rows, num_new = tokens.shape[:2]
        full = cache is not None and cache.num_rows > 0
        places = {name: [0] * num_rows for name in RecurrentCache.ROWS}
        if full:
            places = cache.rows if reset is None else cache.restarted(reset.tolist())
        self.places, self.num_columns = places, cache.num_columns if full else 0
        self.kept = dict(cache.tensors) if full else {}
        held, filled = max(places["held"]), max(places["filled"])
        for name, length in (("inputs", held), ("columns", held), ("vectors", filled)):
            if full:  # rows that were longer may be gone, or begin anew
                self.kept[name] = self.kept[name][:, :length]
        self.rows = Rows(
            self.config.window_size,
            self.config.overlap,
            (num_rows, num_new),
            tokens.device,
            mask,
            places["held"],
            places["filled"],
            exact,
        )
        self.tokens = self.rows.align(tokens)
        self.token_types = None if token_types is None else self.rows.align(token_types)
        self.past = None
        if filled:
            self.past = [(layer.keys[:, :, :filled], layer.values[:, :, :filled]) for layer in cache.layers]
        # What was projected before is used in decoding only: in training, weights change and gradients flow.
        self.projected = cache.projected if full and not torch.is_grad_enabled() else {}
        self.next_projected: dict[int, KeysValues] = {}
        # the states that enter the windows; rows in their first one have none
        self.states: list[torch.Tensor | None] = [None]
        self.in_later_window = None
        if any(places["windows"]):
            self.states = [self.kept["states"][:, -1].to(model.wte.weight.dtype)]
            if not all(places["windows"]):
                self.in_later_window = torch.tensor(places["windows"], device=tokens.device)[:, None, None, None] > 0
        self.ends: list[tuple[list[int], list[torch.Tensor]]] = []
        # windows that a next one follows, in each row
        self.full = [full_windows(total, self.rows.window_size, self.rows.overlap) for total in self.rows.totals or []]
        self.num_states = max([len(self.rows.windows) - 1, *self.full])

    def embed(self, columns: slice | torch.Tensor) -> torch.Tensor:
        """The inputs at these columns, without positions. [B, W, D]"""
        rows, wte = self.rows, self.model.wte
        new = rows.pick(self.tokens, columns)
        new = new if new.is_floating_point() else wte(new)
        if self.token_types is not None:
            new = new + wte(rows.pick(self.token_types, columns))
        if isinstance(columns, slice):
            if columns.start >= rows.held:
                return new
            return torch.cat([self.kept["inputs"][:, columns.start : rows.held].to(new.dtype), new], 1)
        if not self.kept:
            return new
        known = torch.cat([self.kept["past"], self.kept["inputs"]], 1)
        first = self.kept["past"].shape[1]
        known = gather_columns(known, (columns + first).clamp(0, known.shape[1] - 1)).to(new.dtype)
        return torch.where((columns < rows.held).unsqueeze(-1), known, new)

    def run(self, number: int, state: torch.Tensor | None, want_layers: bool, want_attentions: bool) -> WindowOutput:
        """Runs one window after `state`, in the first one after what the cache holds of it."""
        rows, continued = self.rows, number == 0 and self.past is not None
        output = self.model.run_window(
            self.embed(rows.columns(number)),
            first=0 if number else rows.filled,
            past=self.past if continued else None,
            filled=rows.filled if continued and not rows.aligned else None,
            state=state,
            projected={} if number else self.projected,
            has_state=None if number else self.in_later_window,
            want_layers=want_layers,
            want_attentions=want_attentions,
        )
        if continued:
            output.vectors = torch.cat([self.kept["vectors"].to(output.vectors.dtype), output.vectors], 1)
            if not rows.aligned:  # slot j is the row's j-th token
                num_past = self.kept["vectors"].shape[1]
                slots = torch.arange(min(rows.window_size, output.vectors.shape[1]), device=rows.filled.device)
                slots = torch.where(slots < rows.filled, slots, num_past + slots - rows.filled)
                slots = slots.clamp(max=output.vectors.shape[1] - 1)
                output.vectors = gather_columns(output.vectors, slots)
                output.keys_values = [
                    tuple(
                        part.gather(2, slots[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]))
                        for part in pair
                    )
                    for pair in output.keys_values
                ]
        return output

    def next_state(self, number: int, output: WindowOutput) -> torch.Tensor | None:
        """What the window hands on, where one follows it in any row. [B, S, D]"""
        if number >= self.num_states:
            return None
        return self.model.recurrence(output.vectors)

    def merge(self, windows: list[torch.Tensor]) -> torch.Tensor:
        """The outputs of all windows at the input columns. [B, T, D]"""
        return self.rows.merge([self.rows.scored(number, window) for number, window in enumerate(windows)])

    def merge_attentions(self, windows: list[torch.Tensor]) -> torch.Tensor:
        """The windows' maps, [B, heads, W, keys], over all columns of the text so far. [B, heads, T, columns]

        The keys of the state stand in no column and are left out.
        """
        num_columns = self.num_columns + self.rows.num_new
        spread = [spread_maps(maps, self._key_columns(number), num_columns) for number, maps in enumerate(windows)]
        return self.merge(spread).unflatten(2, (self.config.num_attention_heads, -1)).transpose(1, 2)

    def _key_columns(self, number: int) -> torch.Tensor:
        """The input columns of the tokens that window `number` attends to. [B, keys]"""
        rows, known = self.rows, self.kept.get("columns")
        run = rows.columns(number)
        columns = torch.arange(rows.num_new, device=self.tokens.device).expand(self.tokens.shape[0], -1)
        places = rows.pick(rows.align(columns + self.num_columns), run)
        if isinstance(run, slice) and run.start < rows.held:
            places = torch.cat([known[:, run.start : rows.held], places], 1)
        elif not isinstance(run, slice) and known is not None:
            places = torch.where(run < rows.held, gather_columns(known, run.clamp(max=known.shape[1] - 1)), places)
        if number == 0 and self.past is not None:
            places = torch.cat([known[:, : self.past[0][0].shape[2]], places], 1)
        return places

    def note(self, number: int, state: torch.Tensor | None, output: WindowOutput | None) -> None:
        """Remembers what the cache needs of a window that has been run."""
        if len(self.states) == number + 1 and state is not None:
            self.states.append(state.detach())
        if output is None:
            return
        rows = [row for row, full in enumerate(self.full) if full == number]
        parts = [part.detach() for pair in output.keys_values for part in pair] + [output.vectors.detach()]
        if len(rows) == len(self.full):
            self.ends.append((rows, parts))
            self.next_projected = {} if torch.is_grad_enabled() else output.projected
        elif rows:
            self.ends.append((rows, [part[rows] for part in parts]))
        self.last = output

    @torch.no_grad()
    def store(self, cache: RecurrentCache) -> None:
        """Puts where every row stands now into the cache."""
        rows, places, stride = self.rows, self.places, cache.stride
        device, num_rows = self.tokens.device, len(self.full)
        held = [total - full * stride for total, full in zip(rows.totals, self.full, strict=True)]
        filled = [count if full < len(rows.windows) else 0 for count, full in zip(held, self.full, strict=True)]
        new_places = {
            "held": held,
            "filled": filled,
            "windows": [before + full for before, full in zip(places["windows"], self.full, strict=True)],
            "reach": [min(cache.num_past, r + full) for r, full in zip(places["reach"], self.full, strict=True)],
            "first_columns": places["first_columns"],
        }
        kept = dict(self.kept)
        columns = torch.arange(rows.num_new, device=device).expand(num_rows, -1) + self.num_columns
        first, last = cache.num_past * stride, max(held)
        if rows.aligned and rows.mask is None and not self.full[0] and kept:
            new = slice(rows.held, rows.held + rows.num_new)
            kept["inputs"] = torch.cat([kept["inputs"], self.embed(new).to(kept["inputs"].dtype)], 1)
            kept["columns"] = torch.cat([kept["columns"], columns], 1)
        else:
            start = torch.tensor(self.full, device=device)[:, None] * stride - first
            grid = start + torch.arange(first + last, device=device)
            if not kept:
                kept["past"] = kept["inputs"] = self.embed(slice(0, 1) if rows.aligned else grid[:, :1])[:, :0]
                kept["past_columns"] = kept["columns"] = columns[:, :0]
            inputs, numbers = self.embed(grid), rows.pick(rows.align(columns), grid)
            known = torch.cat([kept["past_columns"], kept["columns"]], 1)
            if known.shape[1]:
                offset = kept["past"].shape[1]
                known = gather_columns(known, (grid + offset).clamp(0, known.shape[1] - 1))
                numbers = torch.where(grid < rows.held, known, numbers)
            kept |= {"past": inputs[:, :first], "inputs": inputs[:, first:]}
            kept |= {"past_columns": numbers[:, :first], "columns": numbers[:, first:]}
        kept["states"] = self._kept_states(cache)
        keys_values, kept["vectors"] = self._kept_window(max(filled))
        tensors = {name: tensor.detach() for name, tensor in kept.items()}
        projected = {layer: (k.detach(), v.detach()) for layer, (k, v) in self.next_projected.items()}
        cache.store(self.num_columns + rows.num_new, new_places, tensors, keys_values, projected)

    def _kept_states(self, cache: RecurrentCache) -> torch.Tensor:
        """What entered each row's past windows and, last, the one under way. [B, past + 1, S, D]"""
        new = [state.unsqueeze(1) for state in self.states[1:] if state is not None]
        if "states" not in self.kept:
            shape = (len(self.full), cache.num_past + 1, self.config.num_recurrent_embeddings, self.config.hidden_size)
            old = (
                torch.zeros(shape, dtype=new[0].dtype, device=new[0].device)
                if new
                else self.model.wte.weight.new_zeros(shape)
            )
        else:
            old = self.kept["states"]
        if not new:
            return old
        states = torch.cat([old, *(state.to(old.dtype) for state in new)], 1)
        index = torch.tensor(self.full, device=states.device)[:, None]
        index = index + torch.arange(cache.num_past + 1, device=states.device)
        return states[torch.arange(len(self.full), device=states.device)[:, None], index]

    def _kept_window(self, length: int) -> tuple[list[KeysValues], torch.Tensor]:
        """Keys, values and token vectors of the first `length` tokens of each row's window under way."""
        shapes = [part for pair in self.last.keys_values for part in pair] + [self.last.vectors]
        if len(self.ends) == 1 and len(self.ends[0][0]) == len(self.full):
            parts = [part.narrow(-2, 0, length) for part in self.ends[0][1]]
        else:
            parts = [part.new_zeros((len(self.full), *part.shape[1:-2], length, part.shape[-1])) for part in shapes]
            for rows, found in self.ends:
                for part, values in zip(parts, found, strict=True):
                    part[rows, ..., : values.shape[-2], :] = values[..., :length, :]
        parts = [part.detach() for part in parts]
        return list(zip(parts[:-1:2], parts[1:-1:2], strict=True)), parts[-1]
