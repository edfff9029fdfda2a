# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Configuration of the block-recurrent transformer ("Block-Recurrent Transformers", arXiv 2203.07852)."""

from typing import Any

from transformers import PretrainedConfig
from transformers.activations import ACT2FN


CHOICES = {
    "gate_type": ("fixed", "lstm"),
    "gate_config": ("skip", "dual", "single"),
    "norm_type": ("rms", "layer"),
    "empty_cache": ("zeros", "mask"),
    "gate_z_tanh": ("lstm", "single"),
}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class BlockRecurrentConfig(PretrainedConfig):
    r"""The configuration of a block-recurrent transformer; the defaults are the paper's base model, Rec:fixed:skip.

    Args:
        hidden_size, num_hidden_layers, num_attention_heads, head_dim, intermediate_size, hidden_act: the stack. Heads
            times `head_dim` need not be `hidden_size`.
        window_size (`int`, defaults to 512): tokens of a block, and how far back a token attends.
        segment_length (`int`, defaults to 8 blocks): tokens of a training segment, a multiple of `window_size`.
        recurrent_layers (`list[int]`, defaults to `[9]`): layers, counted from 0, that hand a state from block to
            block; none makes the baselines Slide (`segment_length` of several blocks) and XL (of one).
        num_states (`int`, defaults to 512): state vectors of a recurrent layer.
        gate_type (`"fixed"` or `"lstm"`), gate_config (`"skip"`, `"dual"` or `"single"`): how a state is updated.
        feedback (`bool`): whether all layers read the state of the highest recurrent layer.
        dropout, attention_dropout (`float`, default to 0.05).
        norm_type (`"rms"` or `"layer"`), norm_eps (`float`).
        rel_pos_buckets, rel_pos_max_distance (`int`): T5's relative position bias, a table a layer.
        qk_norm (`bool`), qk_scale_init (`float`): unit-length queries and keys with a learned scale a head.
        attend_to_self (`bool`, defaults to `False`): whether a token sees itself, or only the `window_size` before it.
        empty_cache (`"zeros"` or `"mask"`): what stands before a document, zero keys that can be seen, or nothing.
        gate_z_bias (`bool`), gate_z_tanh (`"lstm"` or `"single"`): details of the gates, as in the paper by default.
        logit_scale (`float`, defaults to `hidden_size ** -0.5`): factor of the logits.

    Example:

    ```python
    >>> from hf_recurrence import BlockRecurrentConfig, BlockRecurrentForCausalLM

    >>> config = BlockRecurrentConfig(hidden_size=256, num_hidden_layers=6, recurrent_layers=[4], num_states=128)
    >>> model = BlockRecurrentForCausalLM(config)
    ```"""

    model_type = "block_recurrent"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 32128,
        hidden_size: int = 1024,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 8,
        head_dim: int = 128,
        intermediate_size: int = 4096,
        hidden_act: str = "relu",
        window_size: int = 512,
        segment_length: int | None = None,
        recurrent_layers: list[int] | tuple[int, ...] = (9,),
        num_states: int = 512,
        gate_type: str = "fixed",
        gate_config: str = "skip",
        feedback: bool = False,
        dropout: float = 0.05,
        attention_dropout: float = 0.05,
        norm_type: str = "rms",
        norm_eps: float = 1e-6,
        rel_pos_buckets: int = 32,
        rel_pos_max_distance: int = 128,
        qk_norm: bool = True,
        qk_scale_init: float = 1.0,
        attend_to_self: bool = False,
        empty_cache: str = "zeros",
        gate_z_bias: bool = True,
        gate_z_tanh: str = "lstm",
        logit_scale: float | None = None,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.head_dim = head_dim
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.window_size = window_size
        self.segment_length = 8 * window_size if segment_length is None else segment_length
        if not isinstance(recurrent_layers, (list, tuple)):
            raise ValueError(f"`recurrent_layers` must be a list of layers, got {recurrent_layers!r}.")
        self.recurrent_layers = list(recurrent_layers)
        self.num_states = num_states
        self.gate_type = gate_type
        self.gate_config = gate_config
        self.feedback = feedback
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.norm_type = norm_type
        self.norm_eps = norm_eps
        self.rel_pos_buckets = rel_pos_buckets
        self.rel_pos_max_distance = rel_pos_max_distance
        self.qk_norm = qk_norm
        self.qk_scale_init = qk_scale_init
        self.attend_to_self = attend_to_self
        self.empty_cache = empty_cache
        self.gate_z_bias = gate_z_bias
        self.gate_z_tanh = gate_z_tanh
        self.logit_scale = hidden_size**-0.5 if logit_scale is None else logit_scale
        self.use_cache = use_cache
        # A save writes only AutoConfig and the saved head; the whole map lets every head load from one repo.
        kwargs.setdefault(
            "auto_map",
            {
                "AutoConfig": "configuration_block_recurrent.BlockRecurrentConfig",
                "AutoModel": "modeling_block_recurrent.BlockRecurrentModel",
                "AutoModelForCausalLM": "modeling_block_recurrent.BlockRecurrentForCausalLM",
            },
        )
        kwargs |= {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        super().__init__(**kwargs, tie_word_embeddings=tie_word_embeddings)  # type: ignore[call-arg]
        self.check_recurrence()

    def check_recurrence(self) -> None:
        """Raises a `ValueError` that names the field, the rule and the value for the first rule that is broken."""
        sizes = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"]
        sizes += ["intermediate_size", "window_size", "segment_length", "num_states", "rel_pos_max_distance"]
        for name in sizes:
            if not _is_int(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be an integer of at least 1, got {getattr(self, name)!r}.")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {getattr(self, name)!r}.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be one of {', '.join(ACT2FN)}, got {self.hidden_act!r}.")
        if self.segment_length % self.window_size:
            raise ValueError(
                f"`segment_length` must be a multiple of `window_size` ({self.window_size}), got "
                f"{self.segment_length}."
            )
        if not _is_int(self.rel_pos_buckets) or self.rel_pos_buckets < 2 or self.rel_pos_buckets % 2:
            raise ValueError(f"`rel_pos_buckets` must be an even integer, got {self.rel_pos_buckets!r}.")
        if self.rel_pos_max_distance <= self.rel_pos_buckets // 2:
            raise ValueError(
                f"`rel_pos_max_distance` must be larger than half of `rel_pos_buckets` ({self.rel_pos_buckets // 2}), "
                f"got {self.rel_pos_max_distance}."
            )
        layers = self.recurrent_layers
        right = all(_is_int(layer) and 0 <= layer < self.num_hidden_layers for layer in layers)
        if not right or sorted(set(layers)) != layers:
            raise ValueError(
                f"`recurrent_layers` must be layers counted from 0 in rising order, at most "
                f"{self.num_hidden_layers - 1} (`num_hidden_layers` is {self.num_hidden_layers}), got {layers}."
            )
        if self.feedback and not layers:
            raise ValueError("`feedback` must be False where `recurrent_layers` are none, got True.")


__all__ = ["BlockRecurrentConfig"]
