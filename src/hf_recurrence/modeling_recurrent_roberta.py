# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""RoBERTa run over windows, each of which attends to an embedding of the one before.

"Adding Recurrence to Pretrained Transformers", section 5.4: the last layer's token vectors of a window are pooled, a
feed-forward network makes an embedding of them, and one layer of the next window gets it as one more key and value.

Axes: B batch, T tokens, N windows, W window, S state vectors, D width.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput, QuestionAnsweringModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.roberta.modeling_roberta import (
    RobertaIntermediate,
    RobertaOutput,
    RobertaPreTrainedModel,
    RobertaSelfOutput,
)
from transformers.utils import can_return_tuple

from .answering import best_span, question_windows
from .configuration_recurrent_roberta import ANSWER_CLASSES, RecurrentRobertaConfig
from .losses import TwoPassWindows
from .recurrence import WindowRecurrence, init_recurrence, pool_max
from .segment import check_finite, check_ids, merge_layers, real_columns
from .windowing import Windows


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
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = F.dropout(scores.softmax(-1), dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


class RecurrentRobertaEmbeddings(nn.Module):
    """RoBERTa's embeddings with its parameter names; positions are counted over the tokens of a window."""

    def __init__(self, config: RecurrentRobertaConfig) -> None:
        super().__init__()
        width, self.padding_idx = config.hidden_size, config.pad_token_id
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=self.padding_idx)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width, padding_idx=self.padding_idx)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, tokens: torch.Tensor, token_type_ids: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Ids [B, W], or word embeddings, of which `mask` marks those that count. [B, W, D]"""
        words = tokens if tokens.is_floating_point() else self.word_embeddings(tokens)
        if token_type_ids is None:
            token_type_ids = torch.zeros(words.shape[:2], dtype=torch.long, device=words.device)
        positions = torch.arange(1, words.shape[1] + 1, device=words.device)[None]
        if mask is not None:  # pads get the position of none, as in RoBERTa
            positions = mask.long().cumsum(1) * mask
        embeddings = words + self.token_type_embeddings(token_type_ids)
        embeddings = embeddings + self.position_embeddings(positions + self.padding_idx)
        return self.dropout(self.LayerNorm(embeddings))


class RecurrentRobertaSelfAttention(nn.Module):
    """RoBERTa's attention with its parameter names, to the window and to the state in front of it."""

    is_causal = False

    def __init__(self, config: RecurrentRobertaConfig) -> None:
        super().__init__()
        width, self.num_heads, self.config = config.hidden_size, config.num_attention_heads, config
        if width % self.num_heads:
            raise ValueError(
                f"`hidden_size` must be a multiple of `num_attention_heads` ({self.num_heads}), got {width}."
            )
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.scaling = (width // self.num_heads) ** -0.5

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        output_attentions: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        sources = hidden_states
        if state is not None:
            sources = torch.cat([state.to(hidden_states.dtype), hidden_states], 1)
        projected = (self.query(hidden_states), self.key(sources), self.value(sources))
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in projected)
        eager = output_attentions or self.config._attn_implementation == "eager"
        attend = eager_attention if eager else ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        dropout = self.dropout.p if self.training else 0.0
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout)
        return output.flatten(-2), weights


class RecurrentRobertaAttention(nn.Module):
    """RoBERTa's attention with what follows it up to the norm."""

    def __init__(self, config: RecurrentRobertaConfig) -> None:
        super().__init__()
        self.self = RecurrentRobertaSelfAttention(config)
        self.output = RobertaSelfOutput(config)

    def forward(self, hidden_states: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, weights = self.self(hidden_states, *args)
        return self.output(output, hidden_states), weights


class RecurrentRobertaLayer(nn.Module):
    """RoBERTa's layer, whose attention may get the state of the window before: inputs of the layer, but no queries."""

    def __init__(self, config: RecurrentRobertaConfig) -> None:
        super().__init__()
        self.attention = RecurrentRobertaAttention(config)
        self.intermediate = RobertaIntermediate(config)
        self.output = RobertaOutput(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden_states, weights = self.attention(hidden_states, state, attention_mask, output_attentions)
        return self.output(self.intermediate(hidden_states), hidden_states), weights


class RecurrentRobertaEncoder(nn.Module):
    """RoBERTa's layers; one of them, or all, get the state of the window before."""

    def __init__(self, config: RecurrentRobertaConfig) -> None:
        super().__init__()
        self.insertion_layer = config.insertion_layer
        self.layer = nn.ModuleList([RecurrentRobertaLayer(config) for _ in range(config.num_hidden_layers)])

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: torch.Tensor | None,
        mask: torch.Tensor | None,
        has_state: torch.Tensor | None,
        output_attentions: bool,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The inputs and the outputs of all layers, and their attention to the state (where it is given) and window.

        `mask` [B, W] and `has_state` [B] say what may be seen of the window and of the state; None is all.
        """
        seen = seen_with_state = None
        if mask is not None:
            seen = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
        if mask is not None and state is not None:
            first = torch.ones_like(mask[:, 0]) if has_state is None else has_state
            first = first[:, None, None, None].expand(-1, 1, mask.shape[1], state.shape[1])
            seen_with_state = torch.cat([first, seen], -1)
        layers, attentions = [hidden_states], []
        for number, layer in enumerate(self.layer):
            inserted = state is not None and self.insertion_layer in ("all", number)
            visible = seen_with_state if inserted else seen
            hidden_states, weights = layer(hidden_states, state if inserted else None, visible, output_attentions)
            layers.append(hidden_states)
            if output_attentions:
                attentions.append(weights)
        return layers, attentions


@dataclass
class WindowOutput:
    """What running one window gives."""

    tokens: torch.Tensor  # hidden states, or what the head makes of them, [B, W, D]
    first: torch.Tensor  # the hidden state of the first token, [B, D]
    layers: list[torch.Tensor]
    attentions: list[torch.Tensor]


@dataclass
class RecurrentRobertaModelOutput(BaseModelOutput):
    """RoBERTa's outputs; with a head, its outputs at the tokens and the embedding of each row's windows instead.

    `head_outputs` [B, T, ...] or [B, N, W, ...]; `window_embeddings` [B, N, D], of the windows' first tokens, and
    `windows` [B, N], which of them the row has (None: all).
    """

    head_outputs: torch.Tensor | None = None
    window_embeddings: torch.Tensor | None = None
    windows: torch.Tensor | None = None


@dataclass
class RecurrentRobertaQuestionAnsweringOutput(QuestionAnsweringModelOutput):
    """Start and end scores of the tokens, [B, T] or [B, N, W], and scores of the classes, [B, classes]."""

    class_logits: torch.Tensor | None = None


class RecurrentRobertaPreTrainedModel(RobertaPreTrainedModel):
    config: RecurrentRobertaConfig
    config_class = RecurrentRobertaConfig
    base_model_prefix = "roberta"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RecurrentRobertaEmbeddings", "RecurrentRobertaLayer"]
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = False
    _can_record_outputs: dict[str, Any] = {}
    # parts of plain RoBERTa checkpoints that have no use here
    _keys_to_ignore_on_load_unexpected = [r"position_ids$", r"(^|\.)pooler\.", r"^lm_head\."]

    def __init__(self, config: RecurrentRobertaConfig) -> None:
        if getattr(config, "model_type", None) != RecurrentRobertaConfig.model_type:
            raise ValueError(
                f"`config` must be a RecurrentRobertaConfig, got {type(config).__name__}. For a plain RoBERTa "
                "checkpoint leave `config` out: from_pretrained(folder, window_size=...) makes it from the "
                "folder's own."
            )
        config.check_recurrence()
        super().__init__(config)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """The model of a checkpoint, ours or a plain RoBERTa's; one with values that are not finite is refused."""
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
        if not init_recurrence(module):
            super()._init_weights(module)


def check_encoder_inputs(
    config: RecurrentRobertaConfig,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    others: dict[str, torch.Tensor | None],
    unused: dict[str, Any],
) -> None:
    """Raises a `ValueError` for the first argument that the model cannot work with."""
    for name, value in {"input_ids": input_ids, "inputs_embeds": inputs_embeds, **others}.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise ValueError(f"`{name}` must be a tensor, got {type(value).__name__}.")
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Exactly one of `input_ids` and `inputs_embeds` must be given.")
    name, tokens = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
    shape = tokens.shape if inputs_embeds is None else tokens.shape[:-1]
    if len(shape) not in (2, 3) or 0 in shape:
        width = "" if inputs_embeds is None else ", hidden_size"
        raise ValueError(
            f"`{name}` must be [batch, tokens{width}] or [batch, windows, tokens{width}] with at least one of each, "
            f"got {list(tokens.shape)}."
        )
    if inputs_embeds is not None and not inputs_embeds.is_floating_point():
        raise ValueError(f"`inputs_embeds` must be floating point, got {inputs_embeds.dtype}.")
    if inputs_embeds is not None and inputs_embeds.shape[-1] != config.hidden_size:
        raise ValueError(
            f"`inputs_embeds` must have `hidden_size` ({config.hidden_size}) features, got {inputs_embeds.shape[-1]}."
        )
    if len(shape) == 3 and shape[2] > config.window_size:
        raise ValueError(
            f"`{name}` must have windows of at most `window_size` ({config.window_size}) tokens, got {shape[2]}."
        )
    for key, value in others.items():
        if value is not None and value.shape != shape:
            raise ValueError(f"`{key}` must be {list(shape)} as `{name}`, got {list(value.shape)}.")
    for key in ("position_ids", "encoder_hidden_states", "past_key_values"):
        if unused.get(key) is not None:
            raise ValueError(f"`{key}` must be left out: every window counts its own positions, after the one before.")
    if input_ids is not None:
        check_ids("input_ids", input_ids, config.vocab_size)


def token_mask(
    config: RecurrentRobertaConfig, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Where there are tokens, by default at ids that are no pads, as booleans; None if known to be everywhere."""
    if attention_mask is None and input_ids is not None:
        attention_mask = input_ids != config.pad_token_id
    return None if attention_mask is None else real_columns(attention_mask, attention_mask.shape[1])


class RecurrentRobertaModel(RecurrentRobertaPreTrainedModel):
    """RoBERTa without a head, over documents of any length.

    ```python
    >>> model = RecurrentRobertaModel.from_pretrained("roberta-base", window_size=512)
    >>> model(input_ids).last_hidden_state  # [B, T, D] for any T
    ```"""

    def __init__(self, config: RecurrentRobertaConfig) -> None:
        super().__init__(config)
        self.embeddings = RecurrentRobertaEmbeddings(config)
        self.encoder = RecurrentRobertaEncoder(config)
        self.recurrence = WindowRecurrence(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, new_embeddings: nn.Module) -> None:
        self.embeddings.word_embeddings = new_embeddings

    def run_window(
        self,
        tokens: torch.Tensor,
        token_type_ids: torch.Tensor | None,
        mask: torch.Tensor | None,
        state: torch.Tensor | None,
        has_state: torch.Tensor | None,
        output_attentions: bool,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The embeddings and the outputs of all layers, each [B, W, D], and their attention, [B, heads, W, keys]."""
        hidden = self.embeddings(tokens, token_type_ids, mask)
        visible = None if mask is None else mask | ~mask.any(1, keepdim=True)  # a row without tokens is not used
        return self.encoder(hidden, state, visible, has_state, output_attentions)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        head: nn.Module | None = None,
        **kwargs: Any,
    ) -> RecurrentRobertaModelOutput:
        r"""
        Runs a document window by window.

        Args:
            input_ids, inputs_embeds: the tokens, [B, T] of any length, which are cut into windows as they stand; or
                windows already cut, [B, N, W], each with its own special tokens. (Embeddings: and a last axis D.)
            attention_mask: 0 at pads, anywhere in a row; by default at `pad_token_id`. A row gives what it gives
                without its pads, and without windows that are all pads; outputs at pads are zero.
            head: given this, its outputs at the tokens are returned, and no hidden states.
        """
        config = self.config
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        others = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        check_encoder_inputs(config, input_ids, inputs_embeds, others, kwargs)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        shape = tokens.shape if inputs_embeds is None else tokens.shape[:-1]
        mask = token_mask(config, input_ids, attention_mask)
        windows = Windows(config.window_size, config.overlap, shape, tokens.device, mask)
        training = self.training and torch.is_grad_enabled()
        checkpointing = self.gradient_checkpointing and training
        two_pass = checkpointing and not (output_hidden_states or output_attentions)
        if torch.is_grad_enabled() and not two_pass and inputs_embeds is None:
            # all at once: the gradient of the embeddings is as large as their matrix, however few the tokens
            tokens = self.embeddings.word_embeddings(tokens)
        tokens = windows.align(tokens)
        types = None if token_type_ids is None else windows.align(token_type_ids)

        def step(number: int, state: torch.Tensor | None) -> tuple[torch.Tensor | None, WindowOutput]:
            mask, has_state = windows.tokens(number), None
            if windows.existing is not None and number:
                has_state = windows.existing[:, :number].any(1)
            of_window = windows.pick(tokens, number), None if types is None else windows.pick(types, number)
            layers, attentions = self.run_window(*of_window, mask, state, has_state, output_attentions)
            hidden = layers[-1]
            last = number + 1 == windows.count
            rows, place = torch.arange(len(hidden), device=hidden.device), 0 if mask is None else mask.long().argmax(1)
            first = hidden[rows, place]  # a copy: a view would keep the whole window
            if not last or (training and number == 0):
                visible = None if mask is None else mask | ~mask.any(1, keepdim=True)
                after = self.recurrence(self.recurrence.token_vectors(layers[1:]), visible)
                if last:
                    # No later window uses the recurrence; data-parallel training wants its parameters in the graph.
                    hidden, after = hidden + (0 * after).sum(), None
                elif windows.existing is not None and state is not None:  # a row goes on after the windows it has
                    after = torch.where(windows.existing[:, number, None, None], after, state.to(after.dtype))
                state = after
            outputs = hidden if head is None else head(hidden)
            return state, WindowOutput(outputs, first, layers if output_hidden_states else [], attentions)

        if two_pass:
            outputs = self._two_pass(step, windows.count, tokens, head)
        else:
            outputs, state = [], None
            run = partial(self._gradient_checkpointing_func, step) if checkpointing else step
            for number in range(windows.count):
                state, output = run(number, state)
                outputs.append(output)
        merged = windows.merge([output.tokens for output in outputs])
        layers = merge_layers(windows.merge, [o.layers for o in outputs]) if output_hidden_states else None
        maps = merge_layers(windows.merge_attentions, [o.attentions for o in outputs]) if output_attentions else None
        if head is None:
            return RecurrentRobertaModelOutput(last_hidden_state=merged, hidden_states=layers, attentions=maps)
        return RecurrentRobertaModelOutput(
            head_outputs=merged,
            window_embeddings=torch.stack([output.first for output in outputs], 1),
            windows=windows.existing,
            hidden_states=layers,
            attentions=maps,
        )

    @torch.compiler.disable
    def _two_pass(
        self, step: Any, num_windows: int, tokens: torch.Tensor, head: nn.Module | None
    ) -> list[WindowOutput]:
        """The outputs of the windows with the activations of one window at a time."""
        modules = [self] if head is None else [self, head]
        inputs = {id(parameter): parameter for module in modules for parameter in module.parameters()}
        inputs[id(tokens)] = tokens

        def run(number: int, state: torch.Tensor | None) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
            words = self.embeddings.word_embeddings
            sparse, words.sparse = getattr(words, "sparse", False), True  # a window has few of the embeddings
            try:
                state, output = step(number, state)
            finally:
                words.sparse = sparse
            return (output.tokens, output.first), state

        inputs = [tensor for tensor in inputs.values() if tensor.requires_grad]
        outputs = TwoPassWindows.apply(run, num_windows, tokens.device, *inputs)
        return [WindowOutput(*pair, [], []) for pair in zip(outputs[::2], outputs[1::2], strict=True)]


def flat_positions(name: str, positions: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The positions as numbers over all tokens of a row, from these or from pairs of a window and a slot in it. [B]"""
    if not isinstance(positions, torch.Tensor):
        raise ValueError(f"`{name}` must be a tensor, got {type(positions).__name__}.")
    if positions.dim() == 2 and positions.shape[1] == 1:
        positions = positions.squeeze(1)
    pairs = len(shape) == 3 and positions.shape == (shape[0], 2)
    if not pairs and positions.shape != (shape[0],):
        also = f" or {[shape[0], 2]}, window and token," if len(shape) == 3 else ""
        raise ValueError(f"`{name}` must be {[shape[0]]}{also} as the inputs, got {list(positions.shape)}.")
    if not pairs:
        return positions
    window, token = positions.unbind(1)
    inside = (window >= 0) & (token >= 0) & (window < shape[1]) & (token < shape[2])
    return torch.where(inside, window * shape[2] + token, -100)


def answer_loss(
    start_logits: torch.Tensor,
    end_logits: torch.Tensor,
    class_logits: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    classes: torch.Tensor,
    allowed: torch.Tensor,
) -> torch.Tensor:
    """The mean over rows of the loss of the class plus, for spans, those of start and end, in one softmax a row.

    From logits [B, T] and [B, classes]. A class of -100 is left out, and so are positions that are not `allowed`.
    """
    known = classes == ANSWER_CLASSES.index("span")
    for positions in (starts, ends):
        inside = (positions >= 0) & (positions < allowed.shape[1])
        known = known & inside & allowed.gather(1, torch.where(inside, positions, 0)[:, None]).squeeze(1)
    targets = (torch.where(known, starts, -100), torch.where(known, ends, -100), classes)
    losses = [
        F.cross_entropy(
            logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits, target, reduction="sum"
        )
        for logits, target in zip((start_logits, end_logits, class_logits), targets, strict=True)
    ]
    return sum(losses) / starts.shape[0]


class RecurrentRobertaForQuestionAnswering(RecurrentRobertaPreTrainedModel):
    """RoBERTa that answers questions over documents of any length by a span of them, or by yes or no.

    ```python
    >>> model = RecurrentRobertaForQuestionAnswering.from_pretrained("roberta-base", window_size=512)
    >>> model.answer(tokenizer, "Who wrote it?", document)
    {'answer': 'Ada', 'answer_class': 'span', 'score': 0.83, 'start': 104, 'end': 107}
    ```"""

    def __init__(self, config: RecurrentRobertaConfig) -> None:
        super().__init__(config)
        self.roberta = RecurrentRobertaModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.class_outputs = nn.Linear(config.hidden_size, config.num_answer_classes)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        answer_classes: torch.LongTensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> RecurrentRobertaQuestionAnsweringOutput:
        r"""
        Scores of every token as the start and as the end of the answer, and of the kinds of answer.

        Args:
            input_ids, attention_mask, inputs_embeds: see `RecurrentRobertaModel.forward`. The kind of answer is told
                from the first token of each window, `<s>` where the windows were cut by `question_windows`.
            context_mask: 1 at the tokens that an answer may have, of the shape of the inputs; by default all.
            start_positions, end_positions: where the answer is, [B]; or [B, 2], window and slot, for [B, N, W]. The
                loss leaves out those that are negative, or where no answer may be.
            answer_classes: what the answer is, [B]: 0 a span (the default), 1 yes, 2 no, 3 none; -100 leaves it out.
        """
        # what the answers are is checked before the document is read
        shape = self.check_answers(
            input_ids, inputs_embeds, context_mask, start_positions, end_positions, answer_classes
        )
        outputs = self.roberta(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            head=self.qa_outputs,
            return_dict=True,
            **kwargs,
        )
        windows = outputs.windows
        windows = windows if windows is None else windows | ~windows.any(1, keepdim=True)
        class_logits = self.class_outputs(pool_max(outputs.window_embeddings, windows))
        logits, allowed = outputs.head_outputs, token_mask(self.config, input_ids, attention_mask)
        if context_mask is not None:
            allowed = context_mask.bool() if allowed is None else allowed & context_mask.bool()
        if allowed is not None:
            logits = logits.masked_fill(~allowed.to(logits.device).unsqueeze(-1), torch.finfo(logits.dtype).min)
        start_logits, end_logits = (part.squeeze(-1).contiguous() for part in logits.split(1, dim=-1))
        loss = None
        if start_positions is not None or answer_classes is not None:
            device = logits.device
            none = torch.full((shape[0],), -100, device=device)
            starts = none if start_positions is None else flat_positions("start_positions", start_positions, shape)
            ends = none if end_positions is None else flat_positions("end_positions", end_positions, shape)
            classes = torch.zeros_like(none) if answer_classes is None else answer_classes.view(-1)
            allowed = torch.ones(shape, dtype=torch.bool, device=device) if allowed is None else allowed
            labels = (part.to(device) for part in (starts, ends, classes, allowed.flatten(1)))
            loss = answer_loss(start_logits.flatten(1), end_logits.flatten(1), class_logits.to(device), *labels)
        return RecurrentRobertaQuestionAnsweringOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            class_logits=class_logits,
        )

    def check_answers(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        context_mask: torch.Tensor | None,
        start_positions: torch.Tensor | None,
        end_positions: torch.Tensor | None,
        answer_classes: torch.Tensor | None,
    ) -> torch.Size:
        """The shape of the inputs; raises a `ValueError` for the first argument that does not fit it."""
        check_encoder_inputs(self.config, input_ids, inputs_embeds, {"context_mask": context_mask}, {})
        shape = input_ids.shape if inputs_embeds is None else inputs_embeds.shape[:-1]
        if (start_positions is None) != (end_positions is None):
            raise ValueError("`start_positions` and `end_positions` must be given together.")
        if start_positions is not None:
            flat_positions("start_positions", start_positions, shape)
            flat_positions("end_positions", end_positions, shape)
        if answer_classes is None:
            return shape
        if not isinstance(answer_classes, torch.Tensor) or answer_classes.numel() != shape[0]:
            raise ValueError(
                f"`answer_classes` must be a tensor of one class a row, {[shape[0]]}, got {answer_classes!r}."
            )
        most = self.config.num_answer_classes
        if not torch.compiler.is_compiling():
            wrong = answer_classes[(answer_classes != -100) & ((answer_classes < 0) | (answer_classes >= most))]
            if len(wrong):
                raise ValueError(
                    f"`answer_classes` must be from 0 to `num_answer_classes` - 1 ({most - 1}), or -100, got "
                    f"{int(wrong[0])}."
                )
        return shape

    @torch.no_grad()
    def answer(
        self, tokenizer: Any, question: str, document: str, max_answer_length: int = 30
    ) -> dict[str, str | float | int | None]:
        """The answer that a document gives, a literal piece of it or yes or no, in memory that it does not add to.

        With it come the class of the answer, its probability (of its class, and of start and end where it is a span),
        and for a span its first character and the one behind its last.

        Args:
            tokenizer: the model's, a fast one.
            max_answer_length: the most tokens of a span.
        """
        windows = question_windows(tokenizer, question, document, self.config.window_size, self.config.overlap)
        width = max(map(len, windows.input_ids))
        pad = self.config.pad_token_id
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in windows.input_ids], device=self.device)
        mask = torch.tensor(
            [[1] * len(row) + [0] * (width - len(row)) for row in windows.input_ids], device=self.device
        )
        training = self.training
        self.eval()
        try:
            outputs = self(ids[None], attention_mask=mask[None], return_dict=True)
        finally:
            self.train(training)
        places = torch.tensor(windows.places, device=self.device).unbind(1)
        starts = outputs.start_logits[0][places].double().log_softmax(0)
        ends = outputs.end_logits[0][places].double().log_softmax(0)
        chance, kind = outputs.class_logits[0].double().log_softmax(0).max(0)
        found = {"answer": ANSWER_CLASSES[int(kind)], "answer_class": ANSWER_CLASSES[int(kind)]}
        if found["answer_class"] != "span":
            answer = "" if found["answer_class"] == "none" else found["answer"]
            return found | {"answer": answer, "score": chance.exp().item(), "start": None, "end": None}
        first, last = best_span(starts, ends, max_answer_length)
        start, end = windows.offsets[first][0], windows.offsets[last][1]
        score = (chance + starts[first] + ends[last]).exp().item()
        return found | {"answer": document[start:end], "score": score, "start": start, "end": end}


__all__ = ["RecurrentRobertaForQuestionAnswering", "RecurrentRobertaModel", "RecurrentRobertaPreTrainedModel"]
