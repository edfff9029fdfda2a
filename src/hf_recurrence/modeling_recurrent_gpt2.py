# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""GPT-2 run over windows, each of which attends to an embedding of the one before.

"Adding Recurrence to Pretrained Transformers": the token vectors of a window are pooled over layers and positions
(eq. 1), a feed-forward network makes an embedding of them, and one layer of the next window gets it as one more key
and value.

Axes: B batch, T tokens, N windows, W window, S state vectors, D width, V vocabulary.
"""

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

from .cache_recurrent import RecurrentCache
from .configuration_recurrent_gpt2 import RecurrentGPT2Config
from .losses import TwoPassLoss, head_loss, is_plain_linear, logits_and_loss, number_of_items
from .recurrence import WindowRecurrence, init_recurrence
from .segment import (
    KeysValues,
    RecurrentGeneration,
    Segment,
    WindowOutput,
    check_finite,
    check_inputs,
    document_starts,
    make_targets,
    merge_layers,
    real_columns,
)
from .windowing import Documents


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
            key = torch.cat([*(keys.to(key.dtype) for keys, _ in before), key], 2)
            value = torch.cat([*(values.to(value.dtype) for _, values in before), value], 2)
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
        """The outputs, keys and values of the window so far, those of the state (`projected` if given), weights."""
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
                f"`config` must be a RecurrentGPT2Config, got {type(config).__name__}. For a plain GPT-2 checkpoint "
                "leave `config` out: from_pretrained(folder, window_size=...) makes it from the folder's own."
            )
        config.check_recurrence()
        super().__init__(config)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """The model of a checkpoint, ours or a plain GPT-2's; one with values that are not finite is refused."""
        loaded = super().from_pretrained(*args, **kwargs)
        check_finite(loaded[0] if kwargs.get("output_loading_info") else loaded)
        return loaded

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, **kwargs: Any
    ) -> None:
        # Windows are differentiated one by one, which reentrant checkpoints do not allow.
        func = partial(gradient_checkpointing_func or checkpoint, use_reentrant=False)
        super()._set_gradient_checkpointing(enable=enable, gradient_checkpointing_func=func, **kwargs)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers looks for a certain line in the source

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
        position_ids: torch.LongTensor | None = None,
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
            position_ids: not needed; a 0 inside a row begins a new document there (packed rows).
            reset: rows [B] that begin a new document, whatever `past_key_values` holds.
            targets, lm_head: the ids [B, T] that the tokens predict (-100: none) and the module that makes logits.
                Given these, the losses are summed window by window, and no hidden states are returned.
        """
        config = self.config
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if use_cache is None:
            use_cache = past_key_values is not None if self.training else config.use_cache
        others = {**kwargs, "position_ids": position_ids}
        check_inputs(config, input_ids, inputs_embeds, past_key_values, attention_mask, token_type_ids, reset, others)
        if (targets is None) != (lm_head is None):
            raise ValueError("`targets` and `lm_head` must be given together.")
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        mask = real_columns(attention_mask, tokens.shape[1])
        if position_ids is not None:
            continued = past_key_values is not None and past_key_values.num_rows > 0
            starts = document_starts(position_ids, mask, tokens.shape[:2], continued)
            if starts is not None:
                if continued or output_attentions:
                    name = "past_key_values" if continued else "output_attentions"
                    raise ValueError(f"`{name}` must be left out where `position_ids` pack documents into a row.")
                documents = Documents(starts, mask)
                return self._run_documents(documents, tokens, token_type_ids, output_hidden_states, targets, lm_head)
        training = self.training and torch.is_grad_enabled()
        checkpointing = self.gradient_checkpointing and training
        two_pass = checkpointing and targets is not None and not (output_hidden_states or output_attentions)
        if torch.is_grad_enabled() and not two_pass:
            # all at once: the gradient of the embeddings is as large as their matrix, however few the tokens
            tokens = self.wte(tokens) if inputs_embeds is None else tokens
            tokens = tokens if token_type_ids is None else tokens + self.wte(token_type_ids)
            token_type_ids = None
        segment = Segment(self, tokens, token_type_ids, mask, reset, past_key_values, exact=use_cache)
        if targets is not None:
            targets = segment.rows.align(targets, fill=-100)

        def step(number: int, state: torch.Tensor | None) -> tuple[torch.Tensor | None, WindowOutput]:
            output = segment.run(number, state, output_hidden_states, output_attentions)
            state = segment.next_state(number, output)
            if training and len(segment.rows.windows) == 1:
                # No later window uses the recurrence; data-parallel training wants its parameters in the graph.
                unused = self.recurrence(output.vectors) if state is None else state
                output.hidden_states = output.hidden_states + (0 * unused).sum()
            return state, output

        loss, windows, state = None, [], segment.states[0]
        if two_pass:
            loss = self._two_pass_loss(segment, step, targets, lm_head, use_cache)
        else:
            for number in range(len(segment.rows.windows)):
                run = partial(self._gradient_checkpointing_func, step) if checkpointing else step
                state, output = run(number, state)
                segment.note(number, state, output if use_cache else None)
                windows.append(output)
            if targets is not None:
                scored = [segment.rows.scored(number, output.hidden_states) for number, output in enumerate(windows)]
                expected = [segment.rows.scored_values(number, targets, -100) for number in range(len(windows))]
                loss = head_loss(lm_head, torch.cat(scored, 1), torch.cat(expected, 1), config.window_size)
        hidden_states = None if targets is not None else segment.merge([output.hidden_states for output in windows])
        if use_cache:
            past_key_values = RecurrentCache(config) if past_key_values is None else past_key_values
            segment.store(past_key_values)
        return RecurrentGPT2ModelOutput(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=merge_layers(segment.merge, [o.layers for o in windows]) if output_hidden_states else None,
            attentions=(
                merge_layers(segment.merge_attentions, [o.attentions for o in windows]) if output_attentions else None
            ),
            loss=loss,
        )

    def _run_documents(
        self,
        documents: Documents,
        tokens: torch.Tensor,
        token_type_ids: torch.Tensor | None,
        output_hidden_states: bool,
        targets: torch.Tensor | None,
        lm_head: nn.Module | None,
    ) -> RecurrentGPT2ModelOutput:
        """Runs packed documents as rows of their own."""
        outputs = self(
            **{"inputs_embeds" if tokens.is_floating_point() else "input_ids": documents.unpack(tokens)},
            attention_mask=documents.unpack(documents.mask),
            token_type_ids=None if token_type_ids is None else documents.unpack(token_type_ids),
            use_cache=False,
            output_hidden_states=output_hidden_states,
            targets=None if targets is None else documents.unpack(targets, fill=-100),
            lm_head=lm_head,
            return_dict=True,
        )
        if outputs.last_hidden_state is not None:
            outputs.last_hidden_state = documents.pack(outputs.last_hidden_state)
        if output_hidden_states:
            outputs.hidden_states = tuple(documents.pack(layer) for layer in outputs.hidden_states)
        return outputs

    @torch.compiler.disable
    def _two_pass_loss(
        self,
        segment: Segment,
        step: Callable[..., Any],
        targets: torch.Tensor,
        lm_head: nn.Module,
        use_cache: bool,
    ) -> torch.Tensor:
        """The sum of the windows' losses with the activations of one window at a time."""
        inputs = {id(parameter): parameter for module in (self, lm_head) for parameter in module.parameters()}
        inputs[id(segment.tokens)] = segment.tokens
        inputs = [tensor for tensor in inputs.values() if tensor.requires_grad]
        weight_sum = None
        if is_plain_linear(lm_head) and lm_head.weight.requires_grad:
            weight_sum = torch.zeros_like(lm_head.weight)
        sums = {} if weight_sum is None else {id(lm_head.weight): weight_sum}

        def run(number: int, state: torch.Tensor | None, with_loss: bool) -> tuple[Any, ...]:
            state, output = step(number, state)
            segment.note(number, state, output if use_cache and with_loss else None)
            if not with_loss:
                return None, state
            scored = segment.rows.scored(number, output.hidden_states)
            expected = segment.rows.scored_values(number, targets, -100)
            return head_loss(lm_head, scored, expected, self.config.window_size, weight_sum), state

        num_windows, device = len(segment.rows.windows), segment.tokens.device
        sparse, self.wte.sparse = getattr(self.wte, "sparse", False), True  # a window has few of the embeddings
        try:
            return TwoPassLoss.apply(run, num_windows, segment.states[0], device, sums, *inputs)
        finally:
            self.wte.sparse = sparse


class RecurrentGPT2LMHeadModel(RecurrentGPT2PreTrainedModel, RecurrentGeneration, GenerationMixin):
    """GPT-2 that predicts the next token of texts of any length, in memory that does not grow with them.

    ```python
    >>> model = RecurrentGPT2LMHeadModel.from_pretrained("gpt2", window_size=300, overlap=10)
    >>> model(input_ids, labels=input_ids).loss.backward()
    >>> model.generate(input_ids, max_new_tokens=5000)
    ```"""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    cache_class = RecurrentCache

    def __init__(self, config: RecurrentGPT2Config) -> None:
        super().__init__(config)
        self.transformer = RecurrentGPT2Model(config)
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
        past_key_values: RecurrentCache | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
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
        shift_labels = kwargs.pop("shift_labels", None)
        if labels is not None or shift_labels is not None:
            others = {**kwargs, "position_ids": position_ids}
            check_inputs(
                self.config, input_ids, inputs_embeds, past_key_values, attention_mask, token_type_ids, reset, others
            )
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        targets = make_targets(self.config, tokens, labels, shift_labels, attention_mask, position_ids)
        if skip_logits is None:
            skip_logits = self.training and targets is not None
        elif skip_logits and targets is None:
            raise ValueError("`skip_logits` must be False without `labels`, there would be no output, got True.")
        outputs = self.transformer(
            input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
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
            hidden, chunk = outputs.last_hidden_state, self.config.window_size
            logits, loss = logits_and_loss(self.lm_head, hidden, targets, logits_to_keep, chunk)
        if loss is not None:
            loss = loss / number_of_items(targets, num_items_in_batch).to(loss.device)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


__all__ = ["RecurrentGPT2LMHeadModel", "RecurrentGPT2Model", "RecurrentGPT2PreTrainedModel"]
