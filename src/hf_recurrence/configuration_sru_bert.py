# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Configuration of BERT with recurrence for feed-forward ("Simple Recurrence Improves Masked Language Models")."""

from typing import Any

from transformers import BertConfig


CELLS = ("swish", "sru")
DIRECTIONS = ("forward", "alternate", "bidirectional")

# The fields that the rules of `check_recurrence` read, and that `from_pretrained` may be asked to change.
CHECKED_FIELDS = (
    "recurrence_cell",
    "recurrence_size",
    "recurrence_steps",
    "recurrence_direction",
    "trainable_swish",
    "intermediate_size",
    "is_decoder",
    "add_cross_attention",
)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class SRUBertConfig(BertConfig):
    r"""A BERT configuration with the fields of the recurrence; BERT's own fields go in by keyword.

    Args:
        recurrence_cell (`"swish"` or `"sru"`): the recurrence that takes the place of the feed-forward network.
        recurrence_size (`int`, *optional*): its width. `None` makes the parameters as many as those of a feed-forward
            network of `intermediate_size`: 2/3 of it for swish, 1/2 for sru.
        recurrence_steps (`int`, defaults to 1): a token reads the state of the token so many before it, so that this
            many are computed at once.
        recurrence_direction (`"forward"`, `"alternate"` or `"bidirectional"`): all layers read from left to right;
            every second one from right to left; or half of the features of every layer.
        trainable_swish (`bool`, defaults to `False`): whether slope and offset of each feature's swish are learned.

    Example:

    ```python
    >>> from hf_recurrence import SRUBertConfig, SRUBertForMaskedLM

    >>> config = SRUBertConfig(num_hidden_layers=2, recurrence_direction="alternate")
    >>> model = SRUBertForMaskedLM(config)
    ```"""

    model_type = "sru_bert"

    def __init__(
        self,
        recurrence_cell: str = "swish",
        recurrence_size: int | None = None,
        recurrence_steps: int = 1,
        recurrence_direction: str = "forward",
        trainable_swish: bool = False,
        **kwargs: Any,
    ) -> None:
        self.recurrence_cell = recurrence_cell
        self.recurrence_size = recurrence_size
        self.recurrence_steps = recurrence_steps
        self.recurrence_direction = recurrence_direction
        self.trainable_swish = trainable_swish
        # A save writes only AutoConfig and the saved head; the whole map lets every head load from one repo.
        kwargs.setdefault(
            "auto_map",
            {
                "AutoConfig": "configuration_sru_bert.SRUBertConfig",
                "AutoModel": "modeling_sru_bert.SRUBertModel",
                "AutoModelForMaskedLM": "modeling_sru_bert.SRUBertForMaskedLM",
                "AutoModelForSequenceClassification": "modeling_sru_bert.SRUBertForSequenceClassification",
                "AutoModelForTokenClassification": "modeling_sru_bert.SRUBertForTokenClassification",
                "AutoModelForQuestionAnswering": "modeling_sru_bert.SRUBertForQuestionAnswering",
            },
        )
        super().__init__(**kwargs)
        self.check_recurrence()

    @property
    def recurrence_width(self) -> int:
        """The width of the recurrence: `recurrence_size`, or that of equal parameters (even if it has two halves)."""
        if self.recurrence_size is not None:
            return self.recurrence_size
        width = self.intermediate_size * 2 // 3 if self.recurrence_cell == "swish" else self.intermediate_size // 2
        return width - width % 2 if self.recurrence_direction == "bidirectional" else width

    def check_recurrence(self) -> None:
        """Raises a `ValueError` that names the field, the rule and the value for the first rule that is broken."""
        for name, choices in (("recurrence_cell", CELLS), ("recurrence_direction", DIRECTIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {getattr(self, name)!r}.")
        for name in ("recurrence_size", "recurrence_steps"):
            value = getattr(self, name)
            if not (_is_int(value) and value >= 1) and not (name == "recurrence_size" and value is None):
                raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")
        if self.recurrence_width < 1:
            raise ValueError(f"`intermediate_size` must leave room for the recurrence, got {self.intermediate_size}.")
        if self.recurrence_direction == "bidirectional" and self.recurrence_width % 2:
            raise ValueError(
                f"`recurrence_size` must be even, half of it for each direction, got {self.recurrence_size}."
            )
        if not isinstance(self.trainable_swish, bool):
            raise ValueError(f"`trainable_swish` must be True or False, got {self.trainable_swish!r}.")
        if self.trainable_swish and self.recurrence_cell != "swish":
            raise ValueError("`trainable_swish` must be False where `recurrence_cell` is 'sru', got True.")
        for name in ("is_decoder", "add_cross_attention"):
            if getattr(self, name, False):
                raise ValueError(f"`{name}` must be False: the model is an encoder, got True.")
        positions = getattr(self, "position_embedding_type", "absolute")  # a field of older BERT configurations
        if positions != "absolute":
            raise ValueError(f"`position_embedding_type` must be 'absolute', got {positions!r}.")

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The stored fields; those of a plain BERT become ours, any other type of model is refused."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        found = config_dict.get("model_type")
        if found == "bert":
            config_dict = {**config_dict, "model_type": cls.model_type, "architectures": None}
        elif found != cls.model_type:
            raise ValueError(
                f"`pretrained_model_name_or_path` must be a checkpoint of type '{cls.model_type}' or 'bert', got "
                f"{str(pretrained_model_name_or_path)!r} of type {found!r}."
            )
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration of these fields; what the caller changes is in place before the rules are checked."""
        changes = {name: kwargs.pop(name) for name in CHECKED_FIELDS if name in kwargs}
        return super().from_dict({**config_dict, **changes}, **kwargs)


__all__ = ["SRUBertConfig"]
