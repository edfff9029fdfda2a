# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""BERT whose layers have a light recurrence in place of the feed-forward network.

"Simple Recurrence Improves Masked Language Models": two projections of the token vectors, one runs through an
elementwise recurrence and the other gates what comes out of it, and a third goes back to the width of the model. All
else is BERT's, with BERT's parameter names.

Axes: B batch, T tokens, S steps, D width, R width of the recurrence, V vocabulary.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_outputs import MaskedLMOutput
from transformers.models.bert.modeling_bert import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLayer,
    BertModel,
    BertPreTrainedModel,
    BertSelfAttention,
)
from transformers.utils import can_return_tuple

from .configuration_sru_bert import SRUBertConfig
from .losses import number_of_items, sum_of_losses
from .scan import sru_scan, swish_scan
from .scan_loops import Maybe


if TYPE_CHECKING:  # transformers 4 copies only the files that this one names
    from .scan_triton import KERNELS  # noqa: F401


class Recurrence(nn.Module):
    """What both cells share: the width, the directions, and the projections in and out."""

    def __init__(self, config: SRUBertConfig, layer_idx: int) -> None:
        super().__init__()
        width, size = config.hidden_size, config.recurrence_width
        self.steps = config.recurrence_steps
        self.directions = [config.recurrence_direction == "alternate" and layer_idx % 2 == 1]  # whether in reverse
        if config.recurrence_direction == "bidirectional":
            self.directions = [False, True]
        self.in_proj = nn.Linear(width, size, bias=False)
        self.out_proj = nn.Linear(size, width)

    def scan(self, run: Callable[..., tuple], inputs: list[torch.Tensor | None], mask: Maybe, state: Maybe) -> tuple:
        """What `run` gives for the inputs [..., R], a part of the features for each direction, put together again."""
        count = len(self.directions)
        parts = [[None] * count if tensor is None else tensor.chunk(count, -1) for tensor in inputs]
        states = [None] * count if state is None else state.chunk(count, -1)
        found = [
            run(*part, initial_state=states[index], mask=mask, steps=self.steps, reverse=self.directions[index])
            for index, part in enumerate(zip(*parts, strict=True))
        ]
        return found[0] if count == 1 else tuple(torch.cat(tensors, -1) for tensors in zip(*found, strict=True))


class SwishRecurrence(Recurrence):
    """((C + bias) * sigmoid(gate_proj(X))) out_proj with c[i] = swish(c[i - 1] - x[i]) + x[i], x = in_proj(X)."""

    def __init__(self, config: SRUBertConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        size = config.recurrence_width
        self.gate_proj = nn.Linear(config.hidden_size, size)
        self.bias = nn.Parameter(torch.zeros(size))
        self.slope = nn.Parameter(torch.ones(size)) if config.trainable_swish else None
        self.offset = nn.Parameter(torch.zeros(size)) if config.trainable_swish else None

    def forward(
        self, hidden_states: torch.Tensor, mask: Maybe = None, state: Maybe = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T, D], a boolean mask of real tokens [B, T], states [B, S, R] -> [B, T, D], [B, S, R]"""
        inputs = [self.in_proj(hidden_states), self.slope, self.offset]
        states, final = self.scan(swish_scan, inputs, mask, state)
        gate = torch.sigmoid(self.gate_proj(hidden_states))
        return self.out_proj((states + self.bias.to(states.dtype)) * gate), final


class SRURecurrence(Recurrence):
    """(C * r) out_proj with SRU's gates, which read the state before: no highway, since the widths differ."""

    def __init__(self, config: SRUBertConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        size = config.recurrence_width
        self.forget_proj = nn.Linear(config.hidden_size, size)
        self.reset_proj = nn.Linear(config.hidden_size, size)
        self.forget_weight = nn.Parameter(torch.zeros(size))
        self.reset_weight = nn.Parameter(torch.zeros(size))

    def forward(
        self, hidden_states: torch.Tensor, mask: Maybe = None, state: Maybe = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T, D], a boolean mask of real tokens [B, T], states [B, S, R] -> [B, T, D], [B, S, R]"""
        inputs = [self.in_proj(hidden_states), self.forget_proj(hidden_states), self.forget_weight]
        states, before, final = self.scan(sru_scan, inputs, mask, state)
        gate = torch.sigmoid(self.reset_proj(hidden_states) + self.reset_weight.to(before.dtype) * before)
        return self.out_proj(states * gate), final


RECURRENCES = {"swish": SwishRecurrence, "sru": SRURecurrence}


def seen_tokens(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """The tokens [B, T] that any token may attend to, from what a layer gets: booleans, or what is added to scores."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 4:
        given = (
            list(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask).__name__
        )
        raise ValueError(f"`attention_mask` must be [batch, 1, queries, tokens] inside a layer, got {given}.")
    if attention_mask.dtype == torch.bool:
        return attention_mask.any(2).any(1)
    return attention_mask.amax((1, 2)) > torch.finfo(attention_mask.dtype).min / 2


class SRUBertOutput(nn.Module):
    """BERT's residual connection and norm behind the feed-forward network, without its second half."""

    def __init__(self, config: SRUBertConfig) -> None:
        super().__init__()
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dropout(hidden_states) + input_tensor)


class SRUBertLayer(BertLayer):
    """BERT's layer with the recurrence in place of the feed-forward network."""

    def __init__(self, config: SRUBertConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx=layer_idx)
        self.chunk_size_feed_forward = 0  # pieces of a text would cut the recurrence
        del self.intermediate
        self.recurrence = RECURRENCES[config.recurrence_cell](config, layer_idx)
        self.output = SRUBertOutput(config)

    def feed_forward_chunk(self, attention_output: torch.Tensor) -> torch.Tensor:
        return attention_output  # BERT's forward ends here; what follows needs the mask

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(hidden_states, attention_mask, *args, **kwargs)
        # with transformers 4 a tuple, whose second part are the attention weights
        attended, more = (outputs[0], outputs[1:]) if isinstance(outputs, tuple) else (outputs, ())
        found, _ = self.recurrence(attended, seen_tokens(attention_mask))
        layer_output = self.output(found, attended)
        return (layer_output, *more) if isinstance(outputs, tuple) else layer_output


class SRUBertPreTrainedModel(BertPreTrainedModel):
    config: SRUBertConfig
    config_class = SRUBertConfig
    _no_split_modules = ["BertEmbeddings", "SRUBertLayer"]
    _supports_flash_attn = False  # their masks do not tell a layer which tokens are real
    _supports_flex_attn = False
    _can_record_outputs = {"hidden_states": SRUBertLayer, "attentions": BertSelfAttention}

    def __init__(self, config: SRUBertConfig, *args: Any, **kwargs: Any) -> None:
        if getattr(config, "model_type", None) != SRUBertConfig.model_type:
            raise ValueError(
                f"`config` must be a SRUBertConfig, got {type(config).__name__}. For a plain BERT checkpoint leave "
                "`config` out: from_pretrained(folder, recurrence_steps=...) makes it from the folder's own."
            )
        config.check_recurrence()
        checkpointing = getattr(config, "gradient_checkpointing", False)
        super().__init__(config, *args, **kwargs)
        if checkpointing:  # a request that BERT's own layers, which are replaced after this, have used up
            config.gradient_checkpointing = True

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """The model of a checkpoint, ours or a plain BERT's; one with values that are not finite is refused."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if kwargs.get("output_loading_info") else loaded
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and not parameter.is_meta and not torch.isfinite(parameter).all():
                count = int((~torch.isfinite(parameter)).sum())
                raise ValueError(f"`{name}` of the checkpoint must be finite, got {count} values of NaN or infinity.")
        return loaded

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers looks for a certain line in the source

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, SwishRecurrence):
            nn.init.zeros_(module.bias)
            if module.slope is not None:
                nn.init.ones_(module.slope)
                nn.init.zeros_(module.offset)
        elif isinstance(module, SRURecurrence):
            for weight in (module.forget_weight, module.reset_weight):
                nn.init.uniform_(weight, -(1.5**0.5), 1.5**0.5)  # SRU's own: a variance of one half
        else:
            super()._init_weights(module)


def check_inputs(
    config: SRUBertConfig,
    input_ids: Any,
    inputs_embeds: Any,
    attention_mask: Any,
    token_type_ids: Any,
    position_ids: Any,
    others: dict[str, Any],
) -> None:
    """Raises a `ValueError` for the first argument that the model cannot work with."""
    ids = {"input_ids": input_ids, "token_type_ids": token_type_ids, "position_ids": position_ids}
    for name, value in (ids | {"inputs_embeds": inputs_embeds, "attention_mask": attention_mask}).items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise ValueError(f"`{name}` must be a tensor, got {type(value).__name__}.")
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
    rows, length = tokens.shape[:2]
    if length > config.max_position_embeddings:
        raise ValueError(
            f"`{name}` must have at most `max_position_embeddings` ({config.max_position_embeddings}) tokens, "
            f"got {length}."
        )
    if attention_mask is not None and tuple(attention_mask.shape) not in ((rows, length), (rows, 1, length, length)):
        raise ValueError(
            f"`attention_mask` must be {[rows, length]}, or {[rows, 1, length, length]} for every pair of tokens, "
            f"got {list(attention_mask.shape)}."
        )
    if token_type_ids is not None and token_type_ids.shape != (rows, length):
        raise ValueError(f"`token_type_ids` must be {[rows, length]} as `{name}`, got {list(token_type_ids.shape)}.")
    if position_ids is not None and tuple(position_ids.shape) not in ((rows, length), (1, length)):
        raise ValueError(f"`position_ids` must be {[rows, length]} as `{name}`, got {list(position_ids.shape)}.")
    sizes = ("vocab_size", "type_vocab_size", "max_position_embeddings")
    for (key, value), size in zip(ids.items(), sizes, strict=True):
        if value is not None:
            check_ids(key, value, size, getattr(config, size))
    for key in ("encoder_hidden_states", "past_key_values"):
        if others.get(key) is not None:
            raise ValueError(f"`{key}` must be left out: the model is an encoder.")


def check_ids(name: str, ids: torch.Tensor, size_name: str, size: int, ignored: bool = False) -> None:
    """Raises a `ValueError` if ids are not integers from 0 to `size` - 1, or -100 where that is ignored."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"`{name}` must be integers, got {ids.dtype}.")
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or not ids.numel():
        return  # a look at the values would make a device wait, or break a graph
    wrong = ids[((ids < 0) | (ids >= size)) & ~((ids == -100) & ignored)]
    if wrong.numel():
        also = ", or -100" if ignored else ""
        raise ValueError(f"`{name}` must be from 0 to `{size_name}` - 1 ({size - 1}){also}, got {wrong[0].item()}.")


class SRUBertModel(SRUBertPreTrainedModel, BertModel):
    """BERT's encoder with recurrence.

    ```python
    >>> model = SRUBertModel.from_pretrained("bert-base-uncased")
    >>> model(input_ids, attention_mask=mask).last_hidden_state  # [B, T, D]
    ```"""

    def __init__(self, config: SRUBertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)
        self.encoder.layer = nn.ModuleList(
            [SRUBertLayer(config, layer_idx=number) for number in range(config.num_hidden_layers)]
        )
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """BERT's outputs. The mask may exclude tokens anywhere; the recurrence passes over them."""
        check_inputs(self.config, input_ids, inputs_embeds, attention_mask, token_type_ids, position_ids, kwargs)
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


class SRUBertForMaskedLM(SRUBertPreTrainedModel, BertForMaskedLM):
    """SRUBert with BERT's head for masked tokens.

    ```python
    >>> model = SRUBertForMaskedLM.from_pretrained("bert-base-uncased")
    >>> model(input_ids, labels=labels).loss  # in training no logits but those of the masked tokens are made
    ```"""

    def __init__(self, config: SRUBertConfig) -> None:
        super().__init__(config)
        self.bert = SRUBertModel(config, add_pooling_layer=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        skip_logits: bool | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """The loss of the tokens that have labels (not -100), and logits [B, T, V].

        Args:
            skip_logits: no logits but only the loss, from the masked tokens alone. By default when training with
                labels.
            num_items_in_batch: what the sum of the losses is divided by, the number of labels by default.
        """
        if skip_logits is None:
            skip_logits = self.training and labels is not None
        elif skip_logits and labels is None:
            raise ValueError("`skip_logits` must be False without `labels`, there would be no output, got True.")
        outputs = self.bert(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **{**kwargs, "return_dict": True},
        )
        hidden, logits, loss = outputs.last_hidden_state, None, None
        if labels is not None:
            if not isinstance(labels, torch.Tensor) or labels.shape != hidden.shape[:2]:
                given = list(labels.shape) if isinstance(labels, torch.Tensor) else type(labels).__name__
                raise ValueError(f"`labels` must be {list(hidden.shape[:2])} as the inputs, got {given}.")
            check_ids("labels", labels, "vocab_size", self.config.vocab_size, ignored=True)
            labels = labels.to(hidden.device)
        if not skip_logits:
            logits = self.cls(hidden)
        if labels is not None:
            targets = labels[labels != -100] if skip_logits else labels
            scores = self.cls(hidden[labels != -100][None]) if skip_logits else logits
            loss = sum_of_losses(scores, targets.view(scores.shape[:2]))
            loss = loss / number_of_items(labels, num_items_in_batch).to(loss.device)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class SRUBertForSequenceClassification(SRUBertPreTrainedModel, BertForSequenceClassification):
    """SRUBert with BERT's head for texts and pairs of texts."""

    def __init__(self, config: SRUBertConfig) -> None:
        super().__init__(config)
        self.bert = SRUBertModel(config)
        self.post_init()


class SRUBertForTokenClassification(SRUBertPreTrainedModel, BertForTokenClassification):
    """SRUBert with BERT's head for tokens."""

    def __init__(self, config: SRUBertConfig) -> None:
        super().__init__(config)
        self.bert = SRUBertModel(config, add_pooling_layer=False)
        self.post_init()


class SRUBertForQuestionAnswering(SRUBertPreTrainedModel, BertForQuestionAnswering):
    """SRUBert with BERT's head for spans of an answer."""

    def __init__(self, config: SRUBertConfig) -> None:
        super().__init__(config)
        self.bert = SRUBertModel(config, add_pooling_layer=False)
        self.post_init()


__all__ = [
    "SRUBertForMaskedLM",
    "SRUBertForQuestionAnswering",
    "SRUBertForSequenceClassification",
    "SRUBertForTokenClassification",
    "SRUBertModel",
    "SRUBertPreTrainedModel",
]
