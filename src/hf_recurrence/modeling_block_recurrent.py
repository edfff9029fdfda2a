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

from .cache_recurrent import BlockRecurrentCache
from .configuration_block_recurrent import BlockRecurrentConfig
from .losses import head_loss, logits_and_loss, number_of_items
from .recurrence import fixed_gate, lstm_gate, relative_buckets, unit_length
from .segment import KeysValues, RecurrentGeneration, check_inputs, make_targets, merge_layers, real_columns
from .windowing import Rows, full_windows, gather_columns


class BlockRecurrentRMSNorm(nn.Module):
    """Divides by the root of the mean square, in float32, and scales."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(hidden_states.dtype) * self.weight


class ScaledLinear(nn.Linear):
    """A linear map, with a variance of `gain` / fan-in at initialisation."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False, gain: float = 1.0) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.gain = gain


def make_norm(config: BlockRecurrentConfig) -> nn.Module:
    if config.norm_type == "rms":
        return BlockRecurrentRMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


class Span:
    """Consecutive tokens of all rows: `num_blocks` blocks from a block's start on, or a piece inside one block.

    A piece follows `num_cached` tokens of its block, of which a row has `filled` ([B, 1] where rows differ), and a row
    has `counts` [B] tokens of its own in it. Keys are those of the block before, the cached tokens, the new ones.
    """

    def __init__(
        self,
        config: BlockRecurrentConfig,
        num_blocks: int,
        length: int,
        filled: Any,
        has_previous: torch.Tensor | None,
        counts: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        """`has_previous` [B] says which rows have a block before, where that matters (`empty_cache="mask"`)."""
        width = config.window_size
        self.num_blocks, self.length = num_blocks, length
        self.num_cached = int(filled.max()) if isinstance(filled, torch.Tensor) else filled
        new = torch.arange(length, device=device)
        cached = torch.arange(self.num_cached, device=device)
        if isinstance(filled, torch.Tensor):
            queries = filled + new  # [B, Q]
            before = torch.arange(-width, self.num_cached, device=device).expand(queries.shape[0], -1)
            keys = torch.cat([before, queries], 1)
            there = torch.cat([torch.ones_like(before[:, :width]).bool(), cached < filled], 1)
            there = F.pad(there, (0, length), value=True)
        else:
            queries = (filled + new)[None]
            keys = torch.arange(-width, self.num_cached + length, device=device)[None]
            there = torch.ones_like(keys, dtype=torch.bool)
        distances = queries[:, :, None] - keys[:, None, :]
        least = 0 if config.attend_to_self else 1
        seen = (distances >= least) & (distances < least + width)
        self.buckets = relative_buckets(distances, config.rel_pos_buckets, config.rel_pos_max_distance)
        self.visible = (seen & there[:, None, :])[:, None]  # [1 or B, 1, Q, K]
        self.first_visible = self.visible
        # What a state sees is all of two whole blocks; in a piece a row may end before the others.
        for_state = there[:, None, None, :]
        if counts is not None:
            ended = torch.arange(keys.shape[1], device=device) - (width + self.num_cached)
            for_state = for_state & (ended < counts[:, None])[:, None, None, :]
        if has_previous is not None:
            missing = (torch.arange(keys.shape[1], device=device) < width) & ~has_previous[:, None]
            self.first_visible = self.visible & ~missing[:, None, None, :]
            for_state = for_state & ~missing[:, None, None, :]
        whole = counts is None and has_previous is None and not isinstance(filled, torch.Tensor)
        self.state_visible = None if whole else for_state

    def ranges(self) -> list[tuple[int, int]]:
        """The blocks that attend together: the first one apart where it sees less than the others."""
        apart = self.first_visible is not self.visible and self.num_blocks > 1
        return [(0, 1), (1, self.num_blocks)] if apart else [(0, self.num_blocks)]

    def tile(self, previous: torch.Tensor, cached: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """The keys (or values) of every block and what is before it. [B, H, T, D] -> [B, N, H, K, D]"""
        if self.num_blocks == 1:
            parts = [previous, new] if cached is None else [previous, cached, new]
            return torch.cat([part.to(new.dtype) for part in parts], 2)[:, None]
        blocks = new.unflatten(2, (self.num_blocks, self.length)).transpose(1, 2)
        before = torch.cat([previous[:, None].to(new.dtype), blocks[:, :-1]], 1)
        return torch.cat([before, blocks], 3)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    visible: torch.Tensor | None,
    dropout: float,
    eager: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(query . key + bias) . value over what is visible, [..., H, Q, D], and the weights where `eager`.

    A query that sees nothing gives 0.
    """
    mask = bias
    if visible is not None:
        shown = query.new_zeros(()) if bias is None else bias.to(query.dtype)
        mask = torch.where(visible, shown, query.new_full((), torch.finfo(query.dtype).min / 2))
    something = None if visible is None else visible.any(-1, keepdim=True)
    if eager:
        scores = query @ key.transpose(-1, -2)
        scores = scores if mask is None else scores + mask
        weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(value.dtype)
        weights = weights if something is None else weights * something
        return F.dropout(weights, dropout) @ value, weights
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=1.0)
    return output if something is None else output * something, None


def heads(hidden_states: torch.Tensor, number: int) -> torch.Tensor:
    """[B, T, H * D] -> [B, H, T, D]"""
    return hidden_states.unflatten(-1, (number, -1)).transpose(1, 2)


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
        self.config = config
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
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, KeysValues, torch.Tensor | None]:
        """The state that enters a block, what tokens and states read of it, and the state after the block.

        Rows that have not `begun` [B], or all where `state` is None, start from the initial state. The last is None
        unless the keys and values of the block and of the one before it are given. [B, S, D], [B, H, S, D / H]
        """
        config, number = self.config, self.config.num_attention_heads
        initial = self.initial.expand(num_rows, -1, -1)
        if state is None:
            state = initial
        elif begun is not None:
            state = torch.where(begun[:, None, None], state, initial)
        marked = self.norm(state) + self.ids
        own = (prepare_keys(config, heads(self.k_proj(marked), number)), heads(self.v_proj(marked), number))
        if key is None:
            return state, own, None
        query = prepare_queries(config, heads(self.self_q_proj(marked), number), self.self_scale)
        of_states, _ = attend(query, *own, None, None, 0.0, False)
        query = prepare_queries(config, heads(self.token_q_proj(marked), number), self.token_scale)
        of_tokens, _ = attend(query, key, value, None, visible, 0.0, False)
        read = torch.cat([of_states, of_tokens], 1).transpose(1, 2).flatten(2)
        after = state if self.attention_gate is None else self.attention_gate(state, read)
        if self.mlp_gate is not None:
            inputs = read if self.mlp_norm is None else self.mlp_norm(after)
            after = self.mlp_gate(after, self.act(self.up_proj(inputs)))
        return state, own, after


def make_scale(config: BlockRecurrentConfig) -> nn.Parameter | None:
    return nn.Parameter(torch.ones(config.num_attention_heads)) if config.qk_norm else None


def prepare_keys(config: BlockRecurrentConfig, key: torch.Tensor) -> torch.Tensor:
    return unit_length(key) if config.qk_norm else key


def prepare_queries(config: BlockRecurrentConfig, query: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Queries [..., H, T, D] such that their products with keys are the logits."""
    if scale is None:
        return query * config.head_dim**-0.5
    return unit_length(query) * scale.abs()[:, None, None]


class BlockRecurrentLayer(GradientCheckpointingLayer):
    """A layer with sliding attention that may read a state, its own or the one fed back, and may have a cell."""

    def __init__(self, config: BlockRecurrentConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        size, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.cell = StateCell(config) if layer_idx in config.recurrent_layers else None
        reads = self.cell is not None or config.feedback
        self.norm_1, self.norm_2 = make_norm(config), make_norm(config)
        self.q_proj, self.k_proj = ScaledLinear(size, inner), ScaledLinear(size, inner)
        self.v_proj = ScaledLinear(size, inner)
        self.state_q_proj = ScaledLinear(size, inner) if reads else None
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
        previous: KeysValues,
        cached: KeysValues | None,
        state: torch.Tensor | None,
        begun: torch.Tensor | None,
        shared: KeysValues | None,
        projected: KeysValues | None,
        span: Span,
        num_updates: int,
        eager: bool,
    ) -> tuple[torch.Tensor, KeysValues, KeysValues | None, list[torch.Tensor], list[torch.Tensor]]:
        """The outputs of a span, its keys and values, those of the last state, the states, and the weights.

        `previous` and `cached` are the keys and values of the block before and of this one's tokens so far; `state`
        enters the first block, in rows that have `begun`; `shared` are the keys and values of states that are fed
        back, and `projected` those of `state`, where they are known. The keys and values of a piece are those of its
        block so far. The states are those that enter the first block and that follow the first `num_updates` ones.
        """
        config, number = self.config, self.config.num_attention_heads
        normed = self.drop(self.norm_1(hidden_states))
        query = prepare_queries(config, heads(self.q_proj(normed), number), self.scale)
        key = prepare_keys(config, heads(self.k_proj(normed), number))
        value = heads(self.v_proj(normed), number)
        keys = span.tile(previous[0], None if cached is None else cached[0], key)
        values = span.tile(previous[1], None if cached is None else cached[1], value)
        query = query.unflatten(2, (span.num_blocks, span.length)).transpose(1, 2)  # [B, N, H, Q, D]
        bias = self.position_bias[:, span.buckets].transpose(0, 1)  # [1 or B, H, Q, K]
        bias = bias if self.scale is None else bias * self.scale.abs()[:, None, None]
        dropout = config.attention_dropout if self.training else 0.0
        output, weights = self._attend_blocks(query, keys, values, bias, span, dropout, eager)
        states: list[torch.Tensor] = []
        read: list[KeysValues] = []
        if self.state_q_proj is not None:
            read = [] if shared is None else [shared]
            if self.cell is not None and projected is not None and num_updates == 0:
                read, states = [projected], [state]
            elif self.cell is not None:
                read = []
                for block in range(span.num_blocks):
                    tokens = (None, None, None)
                    if block < num_updates:
                        # contiguous: torch.compile gives wrong results for fused attention to such a view
                        key_value = (part[:, block].contiguous() for part in (keys, values))
                        tokens = (*key_value, None if block else span.state_visible)
                    state, own, after = self.cell(state, None if block else begun, keys.shape[0], *tokens)
                    read.append(own)
                    states += [state] if block == 0 else []
                    if after is not None:
                        state = after
                        states.append(after)
            state_keys, state_values = (torch.stack(parts, 1).flatten(0, 1) for parts in zip(*read, strict=True))
            asked = heads(self.state_q_proj(normed), number).unflatten(2, (span.num_blocks, span.length))
            asked = prepare_queries(config, asked.transpose(1, 2), self.state_scale)
            of_states, _ = attend(asked.flatten(0, 1), state_keys, state_values, None, None, 0.0, False)
            output = torch.cat([output, of_states.unflatten(0, (-1, span.num_blocks))], 2)
        output = output.transpose(2, 3).flatten(3).flatten(1, 2)  # [B, T, H * D]
        hidden_states = hidden_states + self.o_proj(output)
        inner = self.act(self.up_proj(self.norm_2(hidden_states)))
        if span.num_blocks == 1:
            key, value = keys[:, 0, :, config.window_size :], values[:, 0, :, config.window_size :]
        own = read[-1] if self.cell is not None else None
        return hidden_states + self.drop(self.down_proj(inner)), (key, value), own, states, weights

    def _attend_blocks(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor,
        span: Span,
        dropout: float,
        eager: bool,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Sliding attention in all blocks, [B, N, H, Q, D]; in the first one the block before may be missing."""
        outputs, weights = [], []
        for start, stop in span.ranges():
            parts = [part[:, start:stop].flatten(0, 1) for part in (query, keys, values)]
            visible = span.visible if start else span.first_visible
            output, maps = attend(*parts, bias, visible, dropout, eager)
            outputs.append(output.unflatten(0, (-1, stop - start)))
            if maps is not None:
                weights.append(maps)
        return torch.cat(outputs, 1), weights


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
    ) -> None:
        self.model, self.config, self.inputs = model, model.config, inputs
        width, num_rows = self.config.window_size, inputs.shape[0]
        full = cache is not None and cache.num_rows > 0
        self.places = {name: [0] * num_rows for name in BlockRecurrentCache.ROWS}
        if full:
            self.places = cache.rows if reset is None else cache.restarted(reset.tolist())
        self.num_columns, held = cache.num_columns if full else 0, self.places["held"]
        self.rows = Rows(width, 0, inputs.shape[:2], inputs.device, mask, held, held, exact)
        self.aligned = self.rows.align(inputs)
        self.full = [full_windows(total, width, 0) for total in self.rows.totals or []]
        begun = torch.tensor(self.places["windows"], device=inputs.device) > 0
        self.has_previous = None if bool(all(self.places["windows"])) or self.config.empty_cache == "zeros" else begun
        restarted = full and reset is not None and bool(reset.any())
        self.kept = self._kept(cache, max(held), begun if restarted else None) if full else None
        self.known_columns = cache.tensors["columns"][:, : width + max(held)] if full else None
        # The states' keys and values are kept in decoding only: in training, weights change and gradients flow.
        self.grad = torch.is_grad_enabled()
        self.projected = cache.projected if full and not self.grad and not restarted else {}
        self.next_projected: dict[int, KeysValues] = {}
        # the states that entered the block before and enter the one under way, by layer; None without a cache
        self.begun = None if all(self.places["windows"]) else begun
        self.states: dict[int, list[torch.Tensor | None]] = {
            layer: [None, None] for layer in self.config.recurrent_layers
        }
        if full:
            for layer in self.states:
                known = cache.tensors[f"states.{layer}"].to(inputs.dtype)
                self.states[layer] = [known[:, 0], known[:, 1]]

    def _kept(self, cache: BlockRecurrentCache, length: int, begun: torch.Tensor | None) -> list[KeysValues]:
        """Keys and values of the two blocks before the one under way, and of that one. [B, H, 2 W + C, D] each"""
        width = 2 * self.config.window_size
        kept = []
        for layer in cache.layers:
            pair = [part[:, :, : width + length] for part in (layer.keys, layer.values)]
            if begun is not None:  # a row that begins anew has nothing before it
                blank = begun[:, None, None, None].to(pair[0].device)
                pair = [torch.cat([part[:, :, :width] * blank.to(part.dtype), part[:, :, width:]], 2) for part in pair]
            kept.append(tuple(pair))
        return kept

    def spans(self) -> list[tuple[int, int]]:
        """The first and last block, exclusive, of each run: a piece of the block under way, then whole blocks."""
        last = len(self.rows.windows)
        first = 1 if any(self.places["held"]) or not self.rows.aligned else 0
        step = 1 if self.config.feedback else max(last - first, 1)
        runs = [(0, 1)] if first else []
        return runs + [(start, min(start + step, last)) for start in range(first, last, step)]

    def span(self, start: int, stop: int) -> tuple[torch.Tensor, Span]:
        """The inputs and the tiling of these blocks."""
        rows, width, device = self.rows, self.config.window_size, self.inputs.device
        if start == 0 and (any(self.places["held"]) or not rows.aligned):
            inputs = rows.pick(self.aligned, rows.columns(0))
            counts = None
            if rows.mask is not None or not rows.aligned:
                ends = [min(total, width) - done for total, done in zip(rows.totals, self.places["held"], strict=True)]
                counts = torch.tensor(ends, device=device)
            return inputs, Span(self.config, 1, inputs.shape[1], rows.filled, self.has_previous, counts, device)
        first, end = start * width, min(stop * width, rows.windows[-1].stop)
        if rows.aligned:
            inputs = F.pad(rows.pick(self.aligned, slice(first, end)), (0, 0, 0, stop * width - end))
        else:
            columns = torch.arange(first, stop * width, device=device).expand(self.inputs.shape[0], -1)
            inputs = rows.pick(self.aligned, columns)
        previous = None if start else self.has_previous
        return inputs, Span(self.config, stop - start, width, 0, previous, None, device)

    def in_slots(self, whole: torch.Tensor, num_cached: int) -> torch.Tensor:
        """Keys of a block under way, cached and then new, at the slots of their tokens. [B, H, C, D]"""
        if self.rows.aligned or not num_cached:
            return whole
        filled = self.rows.filled
        slots = torch.arange(min(self.config.window_size, whole.shape[2]), device=whole.device)
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
        rows, width, device = self.rows, self.config.window_size, self.inputs.device
        num_rows, start = self.inputs.shape[0], number * width
        grid = torch.arange(start - width, start - width + num_keys, device=device).expand(num_rows, -1)
        if number == 0 and not rows.aligned:
            new = rows.columns(0)
            grid = torch.cat([grid[:, : num_keys - new.shape[1]], new], 1)
        columns = torch.arange(rows.num_new, device=device).expand(num_rows, -1) + self.num_columns
        columns = rows.align(columns)
        places = gather_columns(columns, (grid - rows.base).clamp(0, columns.shape[1] - 1))
        if self.known_columns is not None:
            known = gather_columns(self.known_columns, (grid + width).clamp(0, self.known_columns.shape[1] - 1))
            places = torch.where(grid < rows.held, known, places)
        begun = torch.tensor(self.places["windows"], device=device)[:, None] > 0
        return places.masked_fill((grid < 0) & ~begun, -1)

    @torch.no_grad()
    def store(self, cache: BlockRecurrentCache, keys_values: list[list[KeysValues]]) -> None:
        """Puts where every row stands now into the cache; `keys_values` hold those of the grid, run by run."""
        rows, width, device = self.rows, self.config.window_size, self.inputs.device
        held = [total - full * width for total, full in zip(rows.totals, self.full, strict=True)]
        places = {
            "held": held,
            "windows": [before + full for before, full in zip(self.places["windows"], self.full, strict=True)],
            "reach": [min(1, before + full) for before, full in zip(self.places["reach"], self.full, strict=True)],
            "first_columns": self.places["first_columns"],
        }
        start = torch.tensor(self.full, device=device)[:, None] * width
        index = start + torch.arange(2 * width + max(held), device=device)
        uniform = len(set(self.full)) == 1
        pairs = []
        for layer, found in enumerate(keys_values):
            pair = []
            for part in (0, 1):
                new = found[0][part] if len(found) == 1 else torch.cat([run[part] for run in found], 2)
                old = (
                    self.kept[layer][part][:, :, : 2 * width]
                    if self.kept
                    else new.new_zeros((*new.shape[:2], 2 * width, new.shape[3]))
                )
                whole = torch.cat([old.to(new.dtype), new], 2)
                if uniform:
                    whole = whole[:, :, self.full[0] * width : self.full[0] * width + 2 * width + max(held)]
                else:
                    where = index.clamp(max=whole.shape[2] - 1)[:, None, :, None]
                    whole = whole.gather(2, where.expand(-1, whole.shape[1], -1, whole.shape[3]))
                pair.append(whole.detach())
            pairs.append(tuple(pair))
        columns = torch.arange(rows.num_new, device=device).expand(self.inputs.shape[0], -1) + self.num_columns
        columns = rows.align(columns)
        grid = start - width + torch.arange(width + max(held), device=device)  # from the block before on
        numbers = gather_columns(columns, (grid - rows.base).clamp(0, columns.shape[1] - 1))
        if self.kept:
            known = gather_columns(self.known_columns, (grid + width).clamp(0, self.known_columns.shape[1] - 1))
            numbers = torch.where(grid < rows.held, known, numbers)
        tensors = {"columns": numbers}
        for layer, states in self.states.items():
            before = torch.zeros_like(states[1]) if states[0] is None else states[0]
            stacked = torch.stack([before, *states[1:]], 1).detach()
            which = torch.tensor(self.full, device=stacked.device)[:, None] + torch.arange(2, device=stacked.device)
            tensors[f"states.{layer}"] = stacked[torch.arange(len(self.full), device=stacked.device)[:, None], which]
        current = uniform and self.full[0] == len(rows.windows) - 1  # the last block that was run is under way
        projected = self.next_projected if current and not self.grad else {}
        cache.store(self.num_columns + rows.num_new, places, tensors, pairs, projected)


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
        segment = BlockSegment(self, inputs, mask, reset, past_key_values, exact=use_cache)
        eager = output_attentions or config._attn_implementation == "eager"
        runs: list[list[torch.Tensor]] = []
        maps: list[list[torch.Tensor]] = []
        ranges: list[tuple[int, int]] = []
        kept: list[list[KeysValues]] = [[] for _ in self.layers]
        needed = max([len(segment.rows.windows) - 1, *segment.full])
        for start, stop in segment.spans():
            hidden, span = segment.span(start, stop)
            layers, weights = [hidden], []
            shared, begun = None, None if start else segment.begun
            if config.feedback:
                top = config.recurrent_layers[-1]
                shared = None if start else segment.projected.get(top)
                if shared is None:
                    _, shared, _ = self.layers[top].cell(segment.states[top][-1], begun, hidden.shape[0])
            for index, layer in enumerate(self.layers):
                previous, cached = self._before(segment, kept, index, start)
                state = None if layer.cell is None else segment.states[index][-1]
                updates = max(0, min(stop, needed) - start)
                projected = None if start else segment.projected.get(index)
                hidden, pair, own, states, weight = layer(
                    hidden, previous, cached, state, begun, shared, projected, span, updates, eager
                )
                if layer.cell is not None:
                    segment.states[index][-1:] = states
                    segment.next_projected[index] = own
                kept[index].append(tuple(segment.in_slots(part, span.num_cached) for part in pair))
                layers.append(hidden)
                weights.append(weight)
            layers[-1] = self.norm(hidden)
            runs.append(layers)
            if output_attentions:
                maps += [list(of_range) for of_range in zip(*weights, strict=True)]
                ranges += [(start + first, start + last) for first, last in span.ranges()]
        hidden_states = segment.merge([layers[-1] for layers in runs])
        if self.training and torch.is_grad_enabled():
            # A state that no later block reads leaves its cell out; data-parallel training wants it in the graph.
            cells = [layer.cell for layer in self.layers if layer.cell is not None]
            for parameter in (parameter for cell in cells for parameter in cell.parameters()):
                hidden_states = hidden_states + (0 * parameter).sum()
        if use_cache:
            past_key_values = BlockRecurrentCache(config) if past_key_values is None else past_key_values
            segment.store(past_key_values, kept)
        merge_maps = partial(segment.merge_attentions, ranges=ranges)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=merge_layers(segment.merge, runs) if output_hidden_states else None,
            attentions=merge_layers(merge_maps, maps) if output_attentions else None,
        )

    def _before(
        self, segment: BlockSegment, kept: list[list[KeysValues]], layer: int, start: int
    ) -> tuple[KeysValues, KeysValues | None]:
        """Keys and values of the block before `start`, and of what the cache holds of block `start` itself."""
        width = self.config.window_size
        if start:
            return tuple(part[:, :, -width:] for part in kept[layer][-1]), None
        if segment.kept is None:
            shape = (segment.inputs.shape[0], self.config.num_attention_heads, width, self.config.head_dim)
            zeros = segment.inputs.new_zeros(shape)
            return (zeros, zeros), None
        previous = tuple(part[:, :, width : 2 * width] for part in segment.kept[layer])
        if not any(segment.places["held"]):
            return previous, None
        return previous, tuple(part[:, :, 2 * width :] for part in segment.kept[layer])


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
