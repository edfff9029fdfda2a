# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Configuration of GPT-2 with recurrence between windows ("Adding Recurrence to Pretrained Transformers")."""

from typing import Any

from transformers import GPT2Config

from .configuration_recurrence import RECURRENCE_FIELDS, check_window_recurrence, converted


# The fields that the rules of `check_recurrence` read, and that `from_pretrained` may be asked to change.
CHECKED_FIELDS = (*RECURRENCE_FIELDS, "n_positions", "n_layer", "add_cross_attention")


class RecurrentGPT2Config(GPT2Config):
    r"""A GPT-2 configuration with the fields of the window recurrence; GPT-2's own fields go in by keyword.

    Args:
        window_size (`int`, defaults to 300): tokens that attend together, at most `n_positions`.
        overlap (`int`, defaults to 0): tokens that neighbouring windows share, less than `window_size`.
        insertion_layer (`int` or `"all"`, defaults to 1): the layer, counted from 0, whose attention gets the
            embedding of the previous window as a further key and value.
        pooling (`"mean"`, `"max"` or `"attention"`): how the token vectors of a window become one vector.
        pooling_layers (`"weighted"` or `"last"`): which layers make a token vector, all with learned weights or the
            last.
        recurrence_hidden_size (`int`, defaults to 200), recurrence_num_hidden_layers (`int`, defaults to 3),
            recurrence_activation (`str`, defaults to `"gelu_new"`): the feed-forward network behind the pooling.
        num_recurrent_embeddings (`int`, defaults to 1): embeddings handed from window to window.

    Example:

    ```python
    >>> from hf_recurrence import RecurrentGPT2Config, RecurrentGPT2LMHeadModel

    >>> config = RecurrentGPT2Config(n_layer=2, window_size=64, overlap=8)
    >>> model = RecurrentGPT2LMHeadModel(config)
    ```"""

    model_type = "recurrent_gpt2"
    keys_to_ignore_at_inference = ["past_key_values"]
    # GPT-2 also maps `max_position_embeddings`; generate() would stop there, and windows have no such end.
    attribute_map = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}

    def __init__(
        self,
        window_size: int = 300,
        overlap: int = 0,
        insertion_layer: int | str = 1,
        pooling: str = "mean",
        pooling_layers: str = "weighted",
        recurrence_hidden_size: int = 200,
        recurrence_num_hidden_layers: int = 3,
        recurrence_activation: str = "gelu_new",
        num_recurrent_embeddings: int = 1,
        **kwargs: Any,
    ) -> None:
        self.window_size = window_size
        self.overlap = overlap
        self.insertion_layer = insertion_layer
        self.pooling = pooling
        self.pooling_layers = pooling_layers
        self.recurrence_hidden_size = recurrence_hidden_size
        self.recurrence_num_hidden_layers = recurrence_num_hidden_layers
        self.recurrence_activation = recurrence_activation
        self.num_recurrent_embeddings = num_recurrent_embeddings
        if "max_position_embeddings" in kwargs:
            kwargs["n_positions"] = kwargs.pop("max_position_embeddings")
        # A save writes only AutoConfig and the saved head; the whole map lets every head load from one repo.
        kwargs.setdefault(
            "auto_map",
            {
                "AutoConfig": "configuration_recurrent_gpt2.RecurrentGPT2Config",
                "AutoModel": "modeling_recurrent_gpt2.RecurrentGPT2Model",
                "AutoModelForCausalLM": "modeling_recurrent_gpt2.RecurrentGPT2LMHeadModel",
            },
        )
        super().__init__(**kwargs)
        self.check_recurrence()

    def check_recurrence(self) -> None:
        """Raises a `ValueError` that names the field, the rule and the value for the first rule that is broken."""
        check_window_recurrence(self, self.n_positions, "`n_positions`", "n_layer")

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The stored fields; those of a plain GPT-2 become ours, any other type of model is refused."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return converted(config_dict, pretrained_model_name_or_path, cls.model_type, "gpt2"), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration of these fields; what the caller changes is in place before the rules are checked."""
        changes = {name: kwargs.pop(name) for name in CHECKED_FIELDS if name in kwargs}
        return super().from_dict({**config_dict, **changes}, **kwargs)


__all__ = ["RecurrentGPT2Config"]
