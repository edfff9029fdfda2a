# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""GPT-2 run over windows, each of which attends to an embedding of the one before.

"Adding Recurrence to Pretrained Transformers": the token vectors of a window are pooled over layers and positions (eq. 1),
a feed-forward network makes an embedding of them, and one layer of the next window gets it as a further key and value.

Axes: B batch, T tokens, N windows, W window, S state vectors, D width, V vocabulary.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import can_return_tuple

from .cache_recurrent import RecurrentCache, cache_signature
from .configuration_recurrent_gpt2 import RecurrentGPT2Config
from .recurrence import TwoPassLoss, WindowRecurrence, init_recurrence
from .windowing import Rows, full_windows, gather_columns, next_labels


KeysValues = tuple[torch.Tensor, torch.Tensor]


class ResidualConv1D(Conv1D):
    """A projection onto the residual stream, which GPT-2 initialises smaller the more layers there are."""


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out, for its weights; the boolean mask says what may be seen. [B, W, heads, D / heads]"""
    if module.config.reorder_and_upcast_attn:
        query, key = query.float(), key.float()
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = F.dropout(scores.softmax(-1).to(value.dtype), dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


class RecurrentGPT2Attention(nn.Module):
    """GPT-2's attention with GPT-2's parameter names, to keys of the state, of the window so far, and of itself."""

    is_causal = True

    def __init__(self, config: RecurrentGPT2Config, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        width, self.num_heads = config.hidden_size, config.num_attention_heads
        if width % self.num_heads:
            raise ValueError(f"`n_embd` must be a multiple of `n_head` ({self.num_heads}), got {width}.")
        self.c_attn = Conv1D(3 * width, width)
        self.c_proj = ResidualConv1D(width, width)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)
        self.scaling = (width // self.num_heads) ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scaling /= layer_idx + 1

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, each [B, heads, W, D / heads]."""
        parts = self.c_attn(hidden_states).chunk(3, dim=-1)
        return tuple(part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)

    def forward(
        self,
        hidden_states: torch.Tensor,
        before: list[KeysValues],
        attention_mask: torch.Tensor | None,
        output_attentions: bool,
    ) -> tuple[torch.Tensor, KeysValues, torch.Tensor | None]:
        query, key, value = self.project(hidden_states)
        if before:
            key = torch.cat([*(keys for keys, _ in before), key], 2)
            value = torch.cat([*(values for _, values in before), value], 2)
        eager = output_attentions or self.config._attn_implementation == "eager"
        attend = eager_attention if eager else ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        dropout = self.attn_dropout.p if self.training else 0.0
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout)
        return self.resid_dropout(self.c_proj(output.flatten(-2))), (key, value), weights


class RecurrentGPT2Block(nn.Module):
    """GPT-2's block, whose attention may get the state of the window before: inputs of the layer, but no queries."""

    def __init__(self, config: RecurrentGPT2Config, layer_idx: int) -> None:
        super().__init__()
        width = config.hidden_size
        inner = config.n_inner if config.n_inner is not None else 4 * width
        self.ln_1 = nn.LayerNorm(width, eps=config.layer_norm_epsilon)
        self.attn = RecurrentGPT2Attention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(width, eps=config.layer_norm_epsilon)
        self.mlp = GPT2MLP(inner, config)
        self.mlp.c_proj = ResidualConv1D(width, inner)

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: torch.Tensor | None = None,
        projected: KeysValues | None = None,
        past: KeysValues | None = None,
        attention_mask: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, KeysValues, KeysValues | None, torch.Tensor | None]:
        """The outputs, keys and values of the window so far, those of the state (`projected` if given), the weights."""
        if state is not None and projected is None:
            projected = self.attn.project(self.ln_1(state))[1:]
        before = [pair for pair in (projected, past) if pair is not None]
        output, (keys, values), weights = self.attn(
            self.ln_1(hidden_states), before, attention_mask, output_attentions
        )
        hidden_states = hidden_states + output
        hidden_states = hidden_states + self.mlp(self.ln_2(hidden_states))
        first = 0 if projected is None else projected[0].shape[2]
        return hidden_states, (keys[:, :, first:], values[:, :, first:]), projected, weights


@dataclass
class WindowOutput:
    """What running one window gives."""

    hidden_states: torch.Tensor  # after the final norm, [B, W, D]
    vectors: torch.Tensor  # one a token, for the pooling, [B, W, D]
    keys_values: list[KeysValues]
    projected: dict[int, KeysValues]  # the state's, by layer
    layers: list[torch.Tensor]
    attentions: list[torch.Tensor]


@dataclass
class RecurrentGPT2ModelOutput(BaseModelOutputWithPast):
    """The outputs of GPT-2, and the sum of the losses over all targets where these are given."""

    loss: torch.Tensor | None = None


class RecurrentGPT2PreTrainedModel(GPT2PreTrainedModel):
    config: RecurrentGPT2Config
    config_class = RecurrentGPT2Config
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RecurrentGPT2Block"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = False
    _can_record_outputs: dict[str, Any] = {}
    # causal masks that GPT-2 checkpoints used to store
    _keys_to_ignore_on_load_unexpected = [r"\.attn\.bias$", r"\.attn\.masked_bias$"]

    def __init__(self, config: RecurrentGPT2Config) -> None:
        if getattr(config, "model_type", None) != RecurrentGPT2Config.model_type:
            raise ValueError(
                f"`config` must be a RecurrentGPT2Config, got {type(config).__name__}. For a plain GPT-2 checkpoint leave "
                "`config` out: from_pretrained(folder, window_size=...) makes it from the folder's own."
            )
        config.check_recurrence()
        super().__init__(config)

    def _set_gradient_checkpointing(self, enable: bool = True, gradient_checkpointing_func: Any = None, **kwargs: Any):
        # Windows are differentiated one by one, which reentrant checkpoints do not allow.
        func = partial(gradient_checkpointing_func or checkpoint, use_reentrant=False)
        super()._set_gradient_checkpointing(enable=enable, gradient_checkpointing_func=func, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # All at leaf modules: on others it is not called for a class that lives outside transformers.
        std = self.config.initializer_range
        if isinstance(module, ResidualConv1D):
            std /= (2 * self.config.n_layer) ** 0.5
        if init_recurrence(module):
            return
        if isinstance(module, (Conv1D, nn.Linear)):
            nn.init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


def window_masks(
    length: int,
    num_past: int,
    filled: torch.Tensor | None,
    state: torch.Tensor | None,
    has_state: torch.Tensor | None,
    eager: bool,
    device: torch.device,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What `length` tokens may see of `num_past` tokens before them and of each other, without and with the state's
    keys in front. [1 or B, 1, W, keys] of booleans, or None where the kernel knows: all, or causal."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
    before = torch.ones(1, 1, length, num_past, dtype=torch.bool, device=device)
    if filled is not None:
        before = (torch.arange(num_past, device=device) < filled)[:, None, None, :].expand(-1, 1, length, -1)
        seen = seen.expand(before.shape[0], -1, -1, -1)
    seen = torch.cat([before, seen], -1)
    with_state = None
    if state is not None and (length > 1 or filled is not None or has_state is not None):
        first = torch.ones(1, 1, length, state.shape[1], dtype=torch.bool, device=device)
        if has_state is not None:
            first = has_state.expand(-1, 1, length, state.shape[1])
        size = max(first.shape[0], seen.shape[0])
        with_state = torch.cat([first.expand(size, -1, -1, -1), seen.expand(size, -1, -1, -1)], -1)
    known = filled is None and (length == 1 or (num_past == 0 and not eager))
    return None if known else seen, with_state


def sum_of_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the cross entropies of logits [B, T, V] and targets [B, T]."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(logits.device), reduction="sum")


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
    merged = []
    for of_layer in zip(*windows, strict=True):
        merged.append(merge(list(of_layer)))
        if merged[-1].requires_grad and not torch.compiler.is_compiling():
            follow_gradient(merged[-1], of_layer, merge)
    return tuple(merged)


def follow_gradient(
    merged: torch.Tensor, windows: tuple[torch.Tensor, ...], merge: Callable[[list[torch.Tensor]], torch.Tensor]
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


def check_inputs(
    config: RecurrentGPT2Config,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    cache: RecurrentCache | None,
    attention_mask: torch.Tensor | None,
    token_type_ids: torch.Tensor | None,
    reset: torch.Tensor | None,
    others: dict[str, Any],
) -> None:
    """Raises a `ValueError` for the first argument that the model cannot work with."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Exactly one of `input_ids` and `inputs_embeds` must be given.")
    name, tokens, axes = ("input_ids", input_ids, 2) if inputs_embeds is None else ("inputs_embeds", inputs_embeds, 3)
    if tokens.dim() != axes or 0 in tokens.shape:
        shape = "[batch, tokens]" if axes == 2 else "[batch, tokens, hidden_size]"
        raise ValueError(f"`{name}` must be {shape} with at least one row and one token, got {list(tokens.shape)}.")
    if inputs_embeds is not None and inputs_embeds.shape[-1] != config.hidden_size:
        raise ValueError(
            f"`inputs_embeds` must have `hidden_size` ({config.hidden_size}) features, got {inputs_embeds.shape[-1]}."
        )
    num_rows, num_new = tokens.shape[:2]
    for key in ("position_ids", "encoder_hidden_states"):
        if others.get(key) is not None:
            raise ValueError(
                f"`{key}` must be left out: positions count from 0 in each window, pads are told by `attention_mask`, "
                f"new documents by `reset`."
            )
    if cache is not None and type(cache).__name__ != RecurrentCache.__name__:
        raise ValueError(f"`past_key_values` must be a RecurrentCache, got {type(cache).__name__}.")
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
    if reset is not None and (reset.dtype != torch.bool or tuple(reset.shape) != (num_rows,)):
        raise ValueError(
            f"`reset` must be one boolean a row, [{num_rows}], got {list(reset.shape)} of {reset.dtype}."
        )
    for key, ids in (("input_ids", input_ids), ("token_type_ids", token_type_ids)):
        if ids is not None:
            check_ids(key, ids, config.vocab_size)


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


def check_labels(config: RecurrentGPT2Config, name: str, labels: torch.Tensor, tokens: torch.Tensor | None) -> None:
    """Raises a `ValueError` for labels that do not fit the tokens or the vocabulary."""
    if tokens is not None and labels.shape != tokens.shape[:2]:
        raise ValueError(f"`{name}` must be {list(tokens.shape[:2])} as the inputs, got {list(labels.shape)}.")
    check_ids(name, labels, config.vocab_size, ignore_index=-100)


class Call:
    """One call of the model: its tokens on the windows of their rows, what the cache holds, what it will hold."""

    def __init__(
        self,
        model: "RecurrentGPT2Model",
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
        self.kept = {name: tensor.detach() for name, tensor in cache.tensors.items()} if full else {}
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
        self.past = [(layer.keys, layer.values) for layer in cache.layers] if any(places["filled"]) else None
        self.projected = cache.projected if full else {}
        self.next_projected: dict[int, KeysValues] = {}
        # the states that enter the windows; rows in their first one have none
        self.states: list[torch.Tensor | None] = [None]
        self.in_later_window = None
        if any(places["windows"]):
            self.states = [self.kept["states"][:, -1]]
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
        spread = []
        for number, maps in enumerate(windows):
            places = self._key_columns(number)
            maps = maps[..., maps.shape[-1] - places.shape[1] :]
            empty = maps.new_zeros(*maps.shape[:3], self.num_columns + self.rows.num_new)
            index = places.clamp(min=0)[:, None, None, :].expand_as(maps)
            spread.append(empty.scatter_add(3, index, maps).transpose(1, 2).flatten(2))
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
            self.next_projected = output.projected
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
            old = torch.zeros(shape, dtype=new[0].dtype, device=new[0].device) if new else self.model.wte.weight.new_zeros(shape)
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


class RecurrentGPT2Model(RecurrentGPT2PreTrainedModel):
    """GPT-2 without a head, over texts of any length.

    ```python
    >>> model = RecurrentGPT2Model.from_pretrained("gpt2", window_size=300)
    >>> model(input_ids).last_hidden_state  # [B, T, D] for any T
    ```"""

    def __init__(self, config: RecurrentGPT2Config) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.n_positions, config.hidden_size)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList([RecurrentGPT2Block(config, layer_idx) for layer_idx in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.recurrence = WindowRecurrence(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, new_embeddings: nn.Module) -> None:
        self.wte = new_embeddings

    def run_window(
        self,
        inputs: torch.Tensor,
        first: int | torch.Tensor,
        past: list[KeysValues] | None,
        filled: torch.Tensor | None,
        state: torch.Tensor | None,
        projected: dict[int, KeysValues],
        has_state: torch.Tensor | None,
        want_layers: bool,
        want_attentions: bool,
    ) -> WindowOutput:
        """Runs the tokens from slot `first` on, [B, W, D], after the keys and values `past` of the slots before them.

        `filled` [B, 1] says how many of the `past` a row has, where rows differ; `has_state` likewise for the state.
        """
        length = inputs.shape[1]
        positions = first + torch.arange(length, device=inputs.device)
        if filled is not None:  # rows that end before the others do
            positions = positions.clamp(max=self.config.window_size - 1)
        hidden = self.drop(inputs + self.wpe(positions))
        eager = want_attentions or self.config._attn_implementation == "eager"
        num_past = 0 if past is None else past[0][0].shape[2]
        mask, state_mask = window_masks(length, num_past, filled, state, has_state, eager, inputs.device)
        everywhere = self.config.insertion_layer == "all"
        layers, keys_values, attentions, used = [hidden], [], [], {}
        for number, block in enumerate(self.h):
            inserted = state is not None and (everywhere or number == self.config.insertion_layer)
            hidden, pair, of_state, weights = block(
                hidden,
                state=state if inserted else None,
                projected=projected.get(number) if inserted else None,
                past=None if past is None else past[number],
                attention_mask=state_mask if inserted else mask,
                output_attentions=want_attentions,
            )
            layers.append(hidden)
            keys_values.append(pair)
            if inserted:
                used[number] = of_state
            if want_attentions:
                attentions.append(weights)
        layers[-1] = hidden = self.ln_f(hidden)
        vectors = self.recurrence.token_vectors(layers[1:])
        return WindowOutput(hidden, vectors, keys_values, used, layers if want_layers else [], attentions)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        past_key_values: RecurrentCache | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        reset: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        targets: torch.LongTensor | None = None,
        lm_head: nn.Module | None = None,
        **kwargs: Any,
    ) -> RecurrentGPT2ModelOutput:
        r"""
        Runs the text, or its continuation after `past_key_values`, window by window.

        Args:
            input_ids, inputs_embeds: the tokens, [B, T] or [B, T, D], of any length.
            past_key_values (`RecurrentCache`): where the text before ended; no gradient flows back into it.
            attention_mask: 0 at pads, anywhere in a row, [B, T] or with the columns before. A row gives what it gives
                without its pads; outputs at pads are zero.
            reset: rows [B] that begin a new document, whatever `past_key_values` holds.
            targets, lm_head: the ids [B, T] that the tokens predict (-100: none) and the module that makes logits.
                Given these, the losses are summed window by window, and no hidden states are returned.
        """
        config = self.config
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if use_cache is None:
            use_cache = past_key_values is not None if self.training else config.use_cache
        check_inputs(config, input_ids, inputs_embeds, past_key_values, attention_mask, token_type_ids, reset, kwargs)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        mask = real_columns(attention_mask, tokens.shape[1])
        call = Call(self, tokens, token_type_ids, mask, reset, past_key_values, exact=use_cache)
        if targets is not None:
            targets = call.rows.align(targets, fill=-100)

        training = self.training and torch.is_grad_enabled()

        def step(number: int, state: torch.Tensor | None, with_loss: bool = True) -> tuple[Any, ...]:
            output = call.run(number, state, output_hidden_states, output_attentions)
            loss, state = None, call.next_state(number, output)
            if targets is not None and with_loss:
                expected = call.rows.pick(targets, call.rows.scored_columns(number), fill=-100)
                loss = sum_of_losses(lm_head(call.rows.scored(number, output.hidden_states)), expected)
            if training and len(call.rows.windows) == 1:
                # No later window uses the recurrence; data-parallel training wants its parameters in the graph.
                unused = 0 * (self.recurrence(output.vectors) if state is None else state).sum()
                output.hidden_states = output.hidden_states + unused
                loss = None if loss is None else loss + unused
            return loss, state, output

        loss, windows = None, []
        checkpointing = self.gradient_checkpointing and training
        if checkpointing and targets is not None and not (output_hidden_states or output_attentions):
            loss = self._two_pass_loss(call, step, lm_head, use_cache)
        else:
            state = call.states[0]
            for number in range(len(call.rows.windows)):
                if checkpointing:
                    window_loss, state, output = self._gradient_checkpointing_func(step, number, state)
                else:
                    window_loss, state, output = step(number, state)
                call.note(number, state, output if use_cache else None)
                loss = window_loss if loss is None else loss + window_loss
                windows.append(output)
        hidden_states = None if targets is not None else call.merge([output.hidden_states for output in windows])
        if use_cache:
            past_key_values = RecurrentCache(config) if past_key_values is None else past_key_values
            call.store(past_key_values)
        return RecurrentGPT2ModelOutput(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=merge_layers(call.merge, [o.layers for o in windows]) if output_hidden_states else None,
            attentions=(
                merge_layers(call.merge_attentions, [o.attentions for o in windows]) if output_attentions else None
            ),
            loss=loss,
        )

    @torch.compiler.disable
    def _two_pass_loss(self, call: Call, step: Callable[..., Any], lm_head: nn.Module, use_cache: bool) -> torch.Tensor:
        """The sum of the windows' losses with the activations of one window at a time."""

        def run(number: int, state: torch.Tensor | None, with_loss: bool) -> tuple[Any, ...]:
            loss, state, output = step(number, state, with_loss)
            call.note(number, state, output if use_cache and with_loss else None)
            return loss, state

        inputs = {id(parameter): parameter for module in (self, lm_head) for parameter in module.parameters()}
        inputs[id(call.tokens)] = call.tokens
        inputs = [tensor for tensor in inputs.values() if tensor.requires_grad]
        return TwoPassLoss.apply(run, len(call.rows.windows), call.states[0], call.tokens.device, *inputs)


class RecurrentGPT2LMHeadModel(RecurrentGPT2PreTrainedModel, GenerationMixin):
    """GPT-2 that predicts the next token of texts of any length, in memory that does not grow with them.

    ```python
    >>> model = RecurrentGPT2LMHeadModel.from_pretrained("gpt2", window_size=300, overlap=10)
    >>> model(input_ids, labels=input_ids).loss.backward()
    >>> model.generate(input_ids, max_new_tokens=5000)
    ```"""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: RecurrentGPT2Config) -> None:
        super().__init__(config)
        self.transformer = RecurrentGPT2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        """Puts our cache where generate() would make one of its own."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                "`cache_implementation` must be left out, the model has a cache of constant size of its own, got "
                f"{generation_config.cache_implementation!r}."
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = RecurrentCache(self.config)

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

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        past_key_values: RecurrentCache | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        reset: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        r"""
        Logits of the next tokens, and with `labels` the loss.

        Args:
            input_ids, past_key_values, attention_mask, inputs_embeds, reset: see `RecurrentGPT2Model.forward`.
            labels: ids [B, T], mostly `input_ids`; each real token predicts the label of the row's next one. -100, and
                pads, are left out.
            shift_labels: what each token predicts, instead of what `labels` say, so that the last of a segment can
                have a target too.
            logits_to_keep: only so many last columns get logits (0: all), or the columns given.
            skip_logits: no logits but only the loss, in memory of one window. By default when training with labels.
            num_items_in_batch: what the sum of the losses is divided by, the number of targets by default.
        """
        # not an argument of its own: Trainer would then expect it in every batch with labels
        targets = shift_labels = kwargs.pop("shift_labels", None)
        name, given = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
        if given is not None:
            tokens = input_ids if inputs_embeds is None else inputs_embeds
            check_labels(self.config, name, given, tokens)
            mask = real_columns(attention_mask, given.shape[1])
            if shift_labels is None:
                targets = next_labels(labels, mask)
            elif mask is not None:
                targets = shift_labels.masked_fill(~mask, -100)
        if skip_logits is None:
            skip_logits = self.training and targets is not None
        outputs = self.transformer(
            input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            reset=reset,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            targets=targets if skip_logits else None,
            lm_head=self.lm_head if skip_logits else None,
            return_dict=True,
            **kwargs,
        )
        logits, loss = None, outputs.loss
        if not skip_logits:
            if isinstance(logits_to_keep, int):
                columns = slice(-logits_to_keep if logits_to_keep else None, None)
            else:
                columns = logits_to_keep
            logits = self.lm_head(outputs.last_hidden_state[:, columns])
            if targets is not None:
                loss = sum_of_losses(logits, targets[:, columns])
        if loss is not None:
            count = (targets != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


__all__ = ["RecurrentGPT2LMHeadModel", "RecurrentGPT2Model", "RecurrentGPT2PreTrainedModel"]
