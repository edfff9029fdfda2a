# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""A transformer with sliding attention, some of whose layers hand a state from block to block.

"Block-Recurrent Transformers" (arXiv 2203.07852): tokens attend to the `window_size` tokens before them and, in a
recurrent layer, to state vectors; the states attend to themselves and to the tokens of two blocks, and are updated
through gates once a block.

Axes: B batch, T tokens, N blocks, W block, S state vectors, D width, H heads, K keys.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .attention import Span, attend, attend_tiles, heads
from .cache_recurrent import BlockRecurrentCache
from .configuration_block_recurrent import BlockRecurrentConfig
from .losses import head_loss, logits_and_loss, number_of_items
from .recurrence import bucket_table, fixed_gate, lstm_gate, normalise, unit_length
from .segment import KeysValues, RecurrentGeneration, check_inputs, make_targets, merge_layer, real_columns
from .windowing import Rows, full_windows, gather_columns


# Tokens of a row that are run together: what is longer is read in such runs, in the memory of one.
RUN = 4096


class BlockRecurrentRMSNorm(nn.Module):
    """Divides by the root of the mean square, in float32, and scales."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return normalise(hidden_states, True, self.eps) * self.weight


class ScaledLinear(nn.Linear):
    """A linear map, with a variance of `gain` / fan-in at initialisation."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False, gain: float = 1.0) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.gain = gain


def make_norm(config: BlockRecurrentConfig) -> nn.Module:
    if config.norm_type == "rms":
        return BlockRecurrentRMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


class Gate(nn.Module):
    """Updates carried values [B, S, D] by a projection of its inputs [B, S, E]."""

    def __init__(self, config: BlockRecurrentConfig, in_features: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.z_proj = ScaledLinear(in_features, size, bias=config.gate_z_bias)
        self.tanh = config.gate_type == "lstm" if config.gate_z_tanh == "lstm" else config.gate_config == "single"
        self.bias = self.i_proj = self.f_proj = None
        if config.gate_type == "fixed":
            self.bias = nn.Parameter(torch.zeros(size))
        else:
            self.i_proj = ScaledLinear(in_features, size, bias=True, gain=0.1)
            self.f_proj = ScaledLinear(in_features, size, bias=True, gain=0.1)

    def forward(self, carried: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        new = self.z_proj(inputs)
        new = torch.tanh(new) if self.tanh else new
        if self.bias is not None:
            return fixed_gate(carried, new, self.bias)
        return lstm_gate(carried, new, self.i_proj(inputs), self.f_proj(inputs))


class StateCell(nn.Module):
    """The horizontal direction of a recurrent layer: how state vectors read tokens and are updated."""

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.num_heads = config.num_attention_heads
        self.norm = make_norm(config)
        self.ids = nn.Parameter(torch.zeros(config.num_states, size))
        self.initial = nn.Parameter(torch.zeros(config.num_states, size))
        self.k_proj, self.v_proj = ScaledLinear(size, inner), ScaledLinear(size, inner)
        self.self_q_proj, self.token_q_proj = ScaledLinear(size, inner), ScaledLinear(size, inner)
        self.self_scale, self.token_scale = make_scale(config), make_scale(config)
        self.attention_gate = self.mlp_gate = self.mlp_norm = self.up_proj = None
        if config.gate_config != "single":
            self.attention_gate = Gate(config, 2 * inner)
        if config.gate_config != "skip":
            self.mlp_norm = make_norm(config) if config.gate_config == "dual" else None
            self.up_proj = ScaledLinear(size if config.gate_config == "dual" else 2 * inner, config.intermediate_size)
            self.mlp_gate = Gate(config, config.intermediate_size)
        self.act = ACT2FN[config.hidden_act]

    def forward(
        self,
        state: torch.Tensor | None,
        begun: torch.Tensor | None,
        num_rows: int,
        own: KeysValues | None = None,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, KeysValues, torch.Tensor | None]:
        """The state that enters a block, what tokens and states read of it, and the state after the block.

        Rows that have not `begun` [B], or all where `state` is None, start from the initial state. The keys and values
        that are read may be known already, `own`. The last is None unless the keys and values of the block and of the
        one before it are given. [B, S, D], [B, H, S, D / H]
        """
        initial = self.initial.expand(num_rows, -1, -1)
        if state is None:
            state = initial
        elif begun is not None:
            state = torch.where(begun[:, None, None], state, initial)
        marked = self.norm(state) + self.ids
        if own is None:
            own = (self._match(self.k_proj(marked)), heads(self.v_proj(marked), self.num_heads))
        if key is None:
            return state, own, None
        scales = (
            None if scale is None else scale.abs()[:, None, None] for scale in (self.self_scale, self.token_scale)
        )
        queries = (self._match(self.self_q_proj(marked)), self._match(self.token_q_proj(marked)))
        of_self, of_token = (scale_queries(query, scale) for query, scale in zip(queries, scales, strict=True))
        of_states, _ = attend(of_self, *own, None, None, 0.0, False)
        of_tokens, _ = attend(of_token, key, value, None, visible, 0.0, False)
        read = torch.cat([of_states, of_tokens], 1).transpose(1, 2).flatten(2)
        after = state if self.attention_gate is None else self.attention_gate(state, read)
        if self.mlp_gate is not None:
            inputs = read if self.mlp_norm is None else self.mlp_norm(after)
            after = self.mlp_gate(after, self.act(self.up_proj(inputs)))
        return state, own, after

    def _match(self, projections: torch.Tensor) -> torch.Tensor:
        """Queries or keys, at length 1 where they have a learned scale. [B, S, H * D] -> [B, H, S, D]"""
        split = heads(projections, self.num_heads)
        return split if self.self_scale is None else unit_length(split)


def make_scale(config: BlockRecurrentConfig) -> nn.Parameter | None:
    return nn.Parameter(torch.ones(config.num_attention_heads)) if config.qk_norm else None


def scale_queries(query: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Queries [B, H, T, D] whose products with keys are the logits, at a learned scale [H, 1, 1] or at a fixed one."""
    return query * (query.shape[-1] ** -0.5 if scale is None else scale)


def fold_states(keys_values: list[KeysValues]) -> KeysValues:
    """Keys and values of the states of N blocks, with these in the batch. [B, H, S, D] each -> [B * N, H, S, D]"""
    if len(keys_values) == 1:
        return keys_values[0]
    keys, values = (torch.stack(parts, 1).flatten(0, 1) for parts in zip(*keys_values, strict=True))
    return keys, values


class BlockRecurrentLayer(GradientCheckpointingLayer):
    """A layer with sliding attention that may read a state, its own or the one fed back, and may have a cell."""

    def __init__(self, config: BlockRecurrentConfig, layer_idx: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.attention_dropout = config.attention_dropout
        size, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.cell = StateCell(config) if layer_idx in config.recurrent_layers else None
        reads = self.cell is not None or config.feedback
        self.norm_1, self.norm_2 = make_norm(config), make_norm(config)
        # rows: queries of tokens, those of states if these are read, keys, values
        self.qkv_proj = ScaledLinear(size, (4 if reads else 3) * inner)
        self.o_proj = ScaledLinear(2 * inner if reads else inner, size)
        self.scale = make_scale(config)
        self.state_scale = make_scale(config) if reads else None
        self.position_bias = nn.Parameter(torch.zeros(config.num_attention_heads, config.rel_pos_buckets))
        self.up_proj = ScaledLinear(size, config.intermediate_size)
        self.down_proj = ScaledLinear(config.intermediate_size, size)
        self.act, self.drop = ACT2FN[config.hidden_act], nn.Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        keys_before: torch.Tensor,
        values_before: torch.Tensor,
        state: torch.Tensor | None,
        state_keys: torch.Tensor | None,
        state_values: torch.Tensor | None,
        begun: torch.Tensor | None,
        span: Span,
        num_updates: int,
        has_room: bool,
        eager: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        """The outputs of a span, its keys, its values, keys and values of the last state, the states, and the weights.

        What comes before are the keys and values of the block before and of this one's tokens so far, which may have
        room for those of the span. `state` enters the first block, in rows that have `begun`; its keys and values are
        given where they are known, or in a layer without a cell those of the states that are fed back, of all blocks.
        The keys and values that come out of a piece are those of its block so far. The states, if there is a cell, are
        the one that enters the first block and those that follow the first `num_updates` ones.

        All tensors are arguments or outputs of their own, for checkpointing to see them.
        """
        number = self.num_heads
        normed = self.drop(self.norm_1(hidden_states))
        projections = heads(self.qkv_proj(normed), self.qkv_proj.out_features // self.head_dim)
        matched, value = projections.split([projections.shape[1] - number, number], 1)
        scale = None if self.scale is None else self.scale.abs()[:, None, None]
        *queries, key = (matched if scale is None else unit_length(matched)).split(number, 1)
        query = scale_queries(queries[0], scale)
        keys, values = span.tile(keys_before, key, has_room), span.tile(values_before, value, has_room)
        output, weights = self._attend_blocks(span.fold(query), keys, values, scale, span, eager)
        states: list[torch.Tensor] = []
        own = (None, None) if state_keys is None else (state_keys, state_values)
        if self.cell is not None and (state_keys is None or num_updates):
            read = []
            for block in range(span.num_blocks):
                tokens = (None, None, None)
                if block < num_updates:
                    # contiguous: torch.compile gives wrong results for fused attention to such a view
                    key_value = (span.block(part, block).contiguous() for part in (keys, values))
                    tokens = (*key_value, None if block else span.state_visible)
                known = None if block or state_keys is None else own
                state, own, after = self.cell(state, None if block else begun, len(normed), known, *tokens)
                read.append(own)
                states += [state] if block == 0 else []
                if after is not None:
                    state = after
                    states.append(after)
            state_keys, state_values = fold_states(read)
        elif self.cell is not None:
            states = [state]
        if state_keys is not None:
            state_scale = None if self.state_scale is None else self.state_scale.abs()[:, None, None]
            asked = span.fold(scale_queries(queries[1], state_scale))
            of_states, _ = attend(asked, state_keys, state_values, None, None, 0.0, False)
            output = torch.cat([output, of_states], 1)
        hidden_states = hidden_states + self.o_proj(span.unfold(output))
        inner = self.act(self.up_proj(self.norm_2(hidden_states)))
        if span.num_blocks == 1:
            key, value = keys[:, :, span.width :], values[:, :, span.width :]
        return hidden_states + self.drop(self.down_proj(inner)), key, value, *own, *states, *weights

    def _attend_blocks(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: torch.Tensor | None,
        span: Span,
        eager: bool,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Sliding attention in all blocks, [B * N, H, Q, D]; in the first one the block before may be missing."""
        dropout = self.attention_dropout if self.training else 0.0
        outputs, weights, ranges = [], [], span.ranges()
        table = self.position_bias if scale is None else self.position_bias * scale.squeeze(-1)
        if span.bands.visible is not None or span.first.visible is not None:
            table = F.pad(table, (0, 1), value=torch.finfo(values.dtype).min / 2)  # the bucket of what is not seen
        for start, stop in ranges:
            parts, bands = [query, keys, values], span.bands if start else span.first
            if len(ranges) > 1:
                parts = [part.unflatten(0, (-1, span.num_blocks))[:, start:stop].flatten(0, 1) for part in parts]
            bias = table[:, bands.buckets].transpose(0, 1)  # [1 or B, H, Q, K]
            output, maps = attend_tiles(*parts, bias, bands, dropout, eager)
            outputs.append(output)
            weights += [] if maps is None else [maps]
        if len(ranges) > 1:
            parts = [
                output.unflatten(0, (-1, stop - start)) for output, (start, stop) in zip(outputs, ranges, strict=True)
            ]
            return torch.cat(parts, 1).flatten(0, 1), weights
        return outputs[0], weights


class BlockRecurrentPreTrainedModel(PreTrainedModel):
    config: BlockRecurrentConfig
    config_class = BlockRecurrentConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BlockRecurrentLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = False

    def __init__(self, config: BlockRecurrentConfig) -> None:
        config.check_recurrence()
        super().__init__(config)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers looks for a certain line in the source

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ScaledLinear):
            std = (module.gain / module.in_features) ** 0.5 / 0.8796256610342398  # the std that truncation at 2 leaves
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
        elif isinstance(module, (nn.Embedding, nn.Linear)):  # the head, where it is not tied
            nn.init.normal_(module.weight, std=1.0)
        elif isinstance(module, (BlockRecurrentRMSNorm, nn.LayerNorm)):
            nn.init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm):
                nn.init.zeros_(module.bias)
        elif isinstance(module, Gate) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.1)
        elif isinstance(module, StateCell):
            nn.init.normal_(module.ids, std=1.0)
            nn.init.normal_(module.initial, std=0.1)
            for scale in (module.self_scale, module.token_scale):
                if scale is not None:
                    nn.init.constant_(scale, self.config.qk_scale_init)
        elif isinstance(module, BlockRecurrentLayer):
            nn.init.normal_(module.position_bias, std=self.config.rel_pos_buckets**-0.5)
            for scale in (module.scale, module.state_scale):
                if scale is not None:
                    nn.init.constant_(scale, self.config.qk_scale_init)


class BlockSegment:
    """What one forward call receives: its tokens on the blocks of their rows, and what the cache knows of these."""

    def __init__(
        self,
        model: "BlockRecurrentModel",
        inputs: torch.Tensor,
        mask: torch.Tensor | None,
        reset: torch.Tensor | None,
        cache: BlockRecurrentCache | None,
        exact: bool,
        eager: bool,
    ) -> None:
        self.config, self.width, self.inputs, self.eager = model.config, model.config.window_size, inputs, eager
        self.table = model.bucket_table
        width, num_rows = self.width, inputs.shape[0]
        full = cache is not None and cache.num_rows > 0
        self.places = {name: [0] * num_rows for name in BlockRecurrentCache.ROWS}
        if full:
            self.places = cache.rows if reset is None else cache.restarted(reset.tolist())
        self.num_columns, held = cache.num_columns if full else 0, self.places["held"]
        self.rows = Rows(width, 0, inputs.shape[:2], inputs.device, mask, held, held, exact)
        self.aligned = self.rows.align(inputs)
        self.full = [full_windows(total, width, 0) for total in self.rows.totals or []]
        begun = None  # which rows have blocks behind them; None where all have
        if not all(self.places["windows"]):
            begun = torch.tensor(self.places["windows"], device=inputs.device) > 0
        self.begun, self.has_previous = begun, begun if self.config.empty_cache == "mask" else None
        restarted = full and reset is not None and bool(reset.any())
        self.kept = self._kept(cache, max(held), begun if restarted else None) if full else None
        self.known_columns = cache.tensors["columns"][:, : width + max(held)] if full else None
        # The states' keys and values are kept in decoding only: in training, weights change and gradients flow.
        self.grad = torch.is_grad_enabled()
        self.room = self._room(cache, held[0]) if full and self.rows.aligned and not restarted else None
        self.forgets = self.rows.aligned and mask is None and not self.grad
        self.projected = cache.projected if full and not self.grad and not restarted else {}
        self.next_projected: dict[int, KeysValues] = {}
        # the states that entered the block before and enter the one under way, by layer; None without a cache
        self.states: dict[int, list[torch.Tensor | None]] = {
            layer: [None, None] for layer in self.config.recurrent_layers
        }
        if full:
            for layer in self.states:
                known = cache.tensors[f"states.{layer}"].to(inputs.dtype)
                self.states[layer] = [known[:, 0], known[:, 1]]

    def _kept(self, cache: BlockRecurrentCache, length: int, begun: torch.Tensor | None) -> list[KeysValues]:
        """Keys and values of the two blocks before the one under way, and of that one. [B, H, 2 W + C, D] each"""
        width = 2 * self.width
        kept = []
        for layer in cache.layers:
            pair = [part[:, :, : width + length] for part in (layer.keys, layer.values)]
            if begun is not None:  # a row that begins anew has nothing before it
                blank = begun[:, None, None, None].to(pair[0].device)
                pair = [torch.cat([part[:, :, :width] * blank.to(part.dtype), part[:, :, width:]], 2) for part in pair]
            kept.append(tuple(pair))
        return kept

    def _room(self, cache: BlockRecurrentCache, held: int) -> list[KeysValues] | None:
        """The cache's own keys and values from the block before on, with room for what this call adds to the block.

        What is written there counts only when the cache is told so, by `store`. None where there is no such room.
        """
        layer, length = cache.layers[0], min(held + self.rows.num_new, self.width)
        start, stop = self.width, 2 * self.width + length
        other = layer.keys.dtype != self.inputs.dtype or torch.is_autocast_enabled(self.inputs.device.type)
        blocks = not held and self.rows.num_new > self.width
        if self.grad or other or blocks or layer.keys.shape[2] < stop:
            return None
        return [(layer.keys[:, :, start:stop], layer.values[:, :, start:stop]) for layer in cache.layers]

    def spans(self, together: bool) -> list[tuple[int, int]]:
        """The first and last block, exclusive, of each run: a piece of the block under way, then whole blocks."""
        last = len(self.rows.windows)
        first = 1 if any(self.places["held"]) or not self.rows.aligned else 0
        step = max(RUN // self.width, 1) if together else 1
        runs = [(0, 1)] if first else []
        return runs + [(start, min(start + step, last)) for start in range(first, last, step)]

    def span(self, start: int, stop: int) -> tuple[torch.Tensor, Span]:
        """The inputs and the tiling of these blocks."""
        rows, width, device, eager = self.rows, self.width, self.inputs.device, self.eager
        if start == 0 and (any(self.places["held"]) or not rows.aligned):
            inputs = rows.pick(self.aligned, rows.columns(0))
            counts = None
            if rows.mask is not None or not rows.aligned:
                ends = [min(total, width) - done for total, done in zip(rows.totals, self.places["held"], strict=True)]
                counts = torch.tensor(ends, device=device)
            return inputs, Span(
                self.config, 1, inputs.shape[1], rows.filled, self.has_previous, counts, device, self.table, eager
            )
        first, end = start * width, min(stop * width, rows.windows[-1].stop)
        length = width if stop - start > 1 else end - first  # a last block alone may be short
        last = first + (stop - start) * length
        if rows.aligned:
            inputs = F.pad(rows.pick(self.aligned, slice(first, end)), (0, 0, 0, last - end))
        else:
            columns = torch.arange(first, last, device=device).expand(self.inputs.shape[0], -1)
            inputs = rows.pick(self.aligned, columns)
        previous = None if start else self.has_previous
        return inputs, Span(self.config, stop - start, length, 0, previous, None, device, self.table, eager)

    def in_slots(self, whole: torch.Tensor, num_cached: int) -> torch.Tensor:
        """Keys of a block under way, cached and then new, at the slots of their tokens. [B, H, C, D]"""
        if self.rows.aligned or not num_cached:
            return whole
        filled = self.rows.filled
        slots = torch.arange(min(self.width, whole.shape[2]), device=whole.device)
        slots = torch.where(slots < filled, slots, num_cached + slots - filled).clamp(max=whole.shape[2] - 1)
        return whole.gather(2, slots[:, None, :, None].expand(-1, whole.shape[1], -1, whole.shape[3]))

    def merge(self, windows: list[torch.Tensor]) -> torch.Tensor:
        """The outputs of all runs at the input columns. [B, T, D]"""
        rows = self.rows
        if rows.aligned:
            merged = torch.cat(windows, 1)[:, : rows.windows[-1].stop - rows.filled]
            return rows.merge([merged])
        return rows.merge(windows)

    def merge_attentions(self, windows: list[torch.Tensor], ranges: list[tuple[int, int]]) -> torch.Tensor:
        """Maps of the blocks in each range, [B * N, H, Q, K], over all columns of the text. [B, H, T, columns]

        What stands before a document is in no column and is left out.
        """
        num_rows, total = self.inputs.shape[0], self.num_columns + self.rows.num_new
        spread = []
        for maps, (start, stop) in zip(windows, ranges, strict=True):
            blocks = maps.unflatten(0, (num_rows, stop - start)).unbind(1)
            for number, block in enumerate(blocks, start):
                places = self._key_columns(number, block.shape[-1])
                there = ((places >= 0) & (places < total))[:, None, None, :]
                index = places.clamp(0, total - 1)[:, None, None, :].expand_as(block)
                empty = block.new_zeros(*block.shape[:3], total)
                spread.append(empty.scatter_add(3, index, block * there).transpose(1, 2).flatten(2))
        return self.merge(spread).unflatten(2, (self.config.num_attention_heads, -1)).transpose(1, 2)

    def _key_columns(self, number: int, num_keys: int) -> torch.Tensor:
        """The input columns of the keys of block `number`, -1 where there is none. [B, K]"""
        rows, width, device = self.rows, self.width, self.inputs.device
        num_rows, start = self.inputs.shape[0], number * width
        grid = torch.arange(start - width, start - width + num_keys, device=device).expand(num_rows, -1)
        if number == 0 and not rows.aligned:
            new = rows.columns(0)
            grid = torch.cat([grid[:, : num_keys - new.shape[1]], new], 1)
        columns = rows.align(self._new_columns())
        places = gather_columns(columns, (grid - rows.base).clamp(0, columns.shape[1] - 1))
        if self.known_columns is not None:
            known = gather_columns(self.known_columns, (grid + width).clamp(0, self.known_columns.shape[1] - 1))
            places = torch.where(grid < rows.held, known, places)
        begun = torch.tensor(self.places["windows"], device=device)[:, None] > 0
        return places.masked_fill((grid < 0) & ~begun, -1)

    @torch.no_grad()
    def store(self, cache: BlockRecurrentCache, outputs: "LayerOutputs") -> None:
        """Puts where every row stands now into the cache."""
        rows, width, device = self.rows, self.width, self.inputs.device
        held = [total - full * width for total, full in zip(rows.totals, self.full, strict=True)]
        places = {
            "held": held,
            "windows": [before + full for before, full in zip(self.places["windows"], self.full, strict=True)],
            "reach": [min(1, before + full) for before, full in zip(self.places["reach"], self.full, strict=True)],
            "first_columns": self.places["first_columns"],
        }
        num_columns = self.num_columns + rows.num_new
        uniform = len(set(self.full)) == 1
        current = uniform and self.full[0] == len(rows.windows) - 1  # the last block that was run is under way
        projected = self.next_projected if current and not self.grad else {}
        if self.room is not None and not any(self.full) and rows.mask is None:
            columns = cache.tensors["columns"]
            columns[:, width + held[0] - rows.num_new : width + held[0]] = self._new_columns()
            pairs = [(layer.keys, layer.values) for layer in cache.layers]
            cache.store(num_columns, places, cache.tensors, pairs, projected)
            return
        start = torch.tensor(self.full, device=device)[:, None] * width
        grid = start + torch.arange(3 * width, device=device)  # of two blocks before, and room for a whole one
        pairs = []
        for layer, found in enumerate(outputs.keys_values):
            pair = []
            for part in (0, 1):
                new = torch.cat([run[part] for run in found], 2) if len(found) > 1 else found[0][part]
                shape = (*new.shape[:2], 2 * width, new.shape[3])
                old = self.kept[layer][part][:, :, : 2 * width].to(new.dtype) if self.kept else new.new_zeros(shape)
                if uniform:
                    whole = torch.cat([old, new, torch.zeros_like(old)], 2)
                    first = self.full[0] * width - outputs.dropped[layer]
                    whole = whole[:, :, first : first + 3 * width].contiguous()
                else:
                    whole = torch.cat([old, new], 2)
                    where = grid.clamp(max=whole.shape[2] - 1)[:, None, :, None]
                    whole = whole.gather(2, where.expand(-1, whole.shape[1], -1, whole.shape[3]))
                pair.append(whole.detach())
            pairs.append(tuple(pair))
        columns, grid = rows.align(self._new_columns()), grid[:, : 2 * width] - width  # from the block before on
        numbers = gather_columns(columns, (grid - rows.base).clamp(0, columns.shape[1] - 1))
        if self.kept:
            known = gather_columns(self.known_columns, (grid + width).clamp(0, self.known_columns.shape[1] - 1))
            numbers = torch.where(grid < rows.held, known, numbers)
        tensors = {"columns": numbers}
        for layer, states in self.states.items():
            before = torch.zeros_like(states[1]) if states[0] is None else states[0]
            stacked = torch.stack([before, *states[1:]], 1).detach()
            if self.forgets:
                tensors[f"states.{layer}"] = stacked
                continue
            which = torch.tensor(self.full, device=stacked.device)[:, None] + torch.arange(2, device=stacked.device)
            tensors[f"states.{layer}"] = stacked[torch.arange(len(self.full), device=stacked.device)[:, None], which]
        cache.store(num_columns, places, tensors, pairs, projected)

    def _new_columns(self) -> torch.Tensor:
        """The numbers of the new columns in the text, the same in all rows. [B, T]"""
        columns = torch.arange(self.num_columns, self.num_columns + self.rows.num_new, device=self.inputs.device)
        return columns.expand(self.inputs.shape[0], -1)


class LayerOutputs:
    """What the layers give: the inputs and outputs of all, and their keys, values and weights, run by run.

    `ranges` are the first and last blocks, exclusive, that the weights are of.
    """

    def __init__(self, num_layers: int, keeps_layers: bool) -> None:
        self.keeps_layers = keeps_layers  # or only the outputs of the last
        self.dropped = [0] * num_layers  # tokens whose keys and values no cache needs, the first ones
        self.layers: list[list[torch.Tensor]] = [[] for _ in range(num_layers + 1)]
        self.keys_values: list[list[KeysValues]] = [[] for _ in range(num_layers)]
        self.maps: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self.ranges: list[tuple[int, int]] = []


class BlockRecurrentModel(BlockRecurrentPreTrainedModel):
    """The stack without a head, over texts of any length.

    ```python
    >>> model = BlockRecurrentModel(BlockRecurrentConfig(num_hidden_layers=2, recurrent_layers=[1]))
    >>> model(input_ids).last_hidden_state  # [B, T, D] for any T
    ```"""

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([BlockRecurrentLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.bucket_table = bucket_table(config.rel_pos_buckets, config.rel_pos_max_distance)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, new_embeddings: nn.Module) -> None:
        self.embed_tokens = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        past_key_values: BlockRecurrentCache | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        reset: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        r"""
        Runs the text, or its continuation after `past_key_values`.

        Args:
            input_ids, inputs_embeds: the tokens, [B, T] or [B, T, D], of any length.
            past_key_values (`BlockRecurrentCache`): where the text before ended; no gradient flows back into it.
            attention_mask: 0 at pads, anywhere in a row, [B, T] or with the columns before. A row gives what it gives
                without its pads; outputs at pads are zero.
            reset: rows [B] that begin a new document, whatever `past_key_values` holds.
        """
        config = self.config
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if use_cache is None:
            use_cache = past_key_values is not None if self.training else config.use_cache
        check_inputs(
            config, input_ids, inputs_embeds, past_key_values, attention_mask, None, reset, kwargs, BlockRecurrentCache
        )
        inputs = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        mask = real_columns(attention_mask, inputs.shape[1])
        eager = output_attentions or config._attn_implementation == "eager"
        segment = BlockSegment(self, inputs, mask, reset, past_key_values, exact=use_cache, eager=eager)
        # Blocks are run together, but not where a layer waits for the state of the block before (up to the layer that
        # feeds it back), nor where memory is to be that of one block.
        apart = (self.gradient_checkpointing and self.training) or (config.feedback and output_attentions)
        turn = config.recurrent_layers[-1] + 1 if config.feedback else 0
        found = LayerOutputs(len(self.layers), bool(output_hidden_states or turn))
        shared: list[KeysValues] = []
        for start, stop in segment.spans(together=False) if turn else []:
            hidden, span = segment.span(start, stop)
            known = None if start else segment.projected.get(turn - 1)
            begun, states = None if start else segment.begun, segment.states[turn - 1]
            states[-1], own, _ = self.layers[turn - 1].cell(states[-1], begun, hidden.shape[0], known)
            shared.append(own)
            self._run(segment, found, range(turn), hidden, span, (start, stop), shared)
        for start, stop in segment.spans(together=not apart) if turn < len(self.layers) else []:
            hidden, span = segment.span(start, stop)
            if turn:
                hidden = torch.cat(found.layers[turn][start:stop], 1)
                hidden = F.pad(hidden, (0, 0, 0, span.num_blocks * span.length - hidden.shape[1]))
            self._run(segment, found, range(turn, len(self.layers)), hidden, span, (start, stop), shared)
        hidden_states = segment.merge(found.layers[-1])
        if self.training and torch.is_grad_enabled() and config.recurrent_layers:
            # Rows that go on leave out the initial state, and a state that no later block reads leaves out its cell;
            # data-parallel training wants them in the graph.
            cells = [layer.cell for layer in self.layers if layer.cell is not None]
            alone = len(segment.rows.windows) == 1
            unread = [part for cell in cells for part in (cell.parameters() if alone else [cell.initial])]
            hidden_states = hidden_states + torch.stack([(0 * part).sum() for part in unread]).sum()
        if use_cache:
            past_key_values = BlockRecurrentCache(config) if past_key_values is None else past_key_values
            segment.store(past_key_values, found)
        merge_maps = partial(segment.merge_attentions, ranges=found.ranges)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(merge_layer(segment.merge, of) for of in found.layers)
            if output_hidden_states
            else None,
            attentions=tuple(merge_layer(merge_maps, of) for of in found.maps) if output_attentions else None,
        )

    def _run(
        self,
        segment: BlockSegment,
        found: LayerOutputs,
        numbers: range,
        hidden: torch.Tensor,
        span: Span,
        blocks: tuple[int, int],
        shared: list[KeysValues],
    ) -> None:
        """Runs the layers of these numbers over the blocks from the first to the last, exclusive, into `found`."""
        start, stop = blocks
        room = None if start else segment.room
        needed = max([len(segment.rows.windows) - 1, *segment.full])  # states after as many blocks are read, or kept
        if numbers.start == 0:
            found.layers[0].append(hidden)
            found.ranges += [(start + first, start + last) for first, last in span.ranges()]
        fed_back = fold_states(shared[start:stop]) if shared else (None, None)
        num_updates = max(0, min(stop, needed) - start)
        for index in numbers:
            layer, kept = self.layers[index], found.keys_values[index]
            known = (None, None) if start else segment.projected.get(index, (None, None))
            if shared and (layer.cell is None or index == self.config.recurrent_layers[-1]):
                known = fed_back
            hidden, key, value, own_keys, own_values, *others = layer(
                hidden,
                *(self._before(segment, kept, index, start) if room is None else room[index]),
                None if layer.cell is None else segment.states[index][-1],
                *known,
                None if start else segment.begun,
                span,
                num_updates,
                room is not None,
                segment.eager,
            )
            if layer.cell is not None:
                segment.states[index][-1:] = others[: num_updates + 1]
                segment.next_projected[index] = (own_keys, own_values)
                if segment.forgets:
                    del segment.states[index][:-2]
                others = others[num_updates + 1 :]
            kept.append(tuple(segment.in_slots(part, span.num_cached) for part in (key, value)))
            while segment.forgets and sum(pair[0].shape[2] for pair in kept[1:]) >= 3 * segment.width:
                found.dropped[index] += kept.pop(0)[0].shape[2]
            found.layers[index + 1].append(hidden)
            if not found.keeps_layers:
                found.layers[index].clear()
            found.maps[index] += others
        if numbers.stop == len(self.layers):
            found.layers[-1][-1] = self.norm(hidden)

    def _before(self, segment: BlockSegment, kept: list[KeysValues], layer: int, start: int) -> KeysValues:
        """Keys and values of the block before `start`, and of what the cache holds of block `start` itself."""
        width = self.config.window_size
        if start:
            return tuple(part[:, :, -width:] for part in kept[-1])
        if segment.kept is not None:
            return tuple(part[:, :, width:] for part in segment.kept[layer])
        shape = (segment.inputs.shape[0], self.config.num_attention_heads, width, self.config.head_dim)
        zeros = segment.inputs.new_zeros(shape)
        return zeros, zeros


class BlockRecurrentForCausalLM(BlockRecurrentPreTrainedModel, RecurrentGeneration, GenerationMixin):
    """A block-recurrent transformer that predicts the next token of texts of any length.

    ```python
    >>> model = BlockRecurrentForCausalLM(BlockRecurrentConfig(num_hidden_layers=2, recurrent_layers=[1]))
    >>> model(input_ids, labels=input_ids).loss.backward()
    ```"""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    cache_class = BlockRecurrentCache

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__(config)
        self.model = BlockRecurrentModel(config)
        self.drop = nn.Dropout(config.dropout)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        past_key_values: BlockRecurrentCache | None = None,
        attention_mask: torch.Tensor | None = None,
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
            input_ids, past_key_values, attention_mask, inputs_embeds, reset: see `BlockRecurrentModel.forward`.
            labels, shift_labels, logits_to_keep, skip_logits, num_items_in_batch: see
                `RecurrentGPT2LMHeadModel.forward`.
        """
        # not an argument of its own: Trainer would then expect it in every batch with labels
        shift_labels = kwargs.pop("shift_labels", None)
        if labels is not None or shift_labels is not None:
            check_inputs(
                self.config,
                input_ids,
                inputs_embeds,
                past_key_values,
                attention_mask,
                None,
                reset,
                kwargs,
                BlockRecurrentCache,
            )
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        targets = make_targets(self.config, tokens, labels, shift_labels, attention_mask)
        if skip_logits is None:
            skip_logits = self.training and targets is not None
        elif skip_logits and targets is None:
            raise ValueError("`skip_logits` must be False without `labels`, there would be no output, got True.")
        outputs = self.model(
            input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            reset=reset,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        hidden = self.drop(outputs.last_hidden_state) * self.config.logit_scale
        logits = loss = None
        if not skip_logits:
            logits, loss = logits_and_loss(self.lm_head, hidden, targets, logits_to_keep, self.config.window_size)
        elif targets is not None:
            loss = head_loss(self.lm_head, hidden, targets, self.config.window_size)
        if loss is not None:
            loss = loss / number_of_items(targets, num_items_in_batch).to(loss.device)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


__all__ = ["BlockRecurrentForCausalLM", "BlockRecurrentModel", "BlockRecurrentPreTrainedModel"]
