# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Configuration of RoBERTa with recurrence between windows ("Adding Recurrence to Pretrained Transformers")."""

from typing import Any

from transformers import RobertaConfig

from .configuration_recurrence import RECURRENCE_FIELDS, check_window_recurrence, converted, is_int


# What an answer can be; the last one only where questions may be without an answer.
ANSWER_CLASSES = ("span", "yes", "no", "none")

# The fields that the rules of `check_recurrence` read, and that `from_pretrained` may be asked to change.
CHECKED_FIELDS = (
    *RECURRENCE_FIELDS,
    "num_answer_classes",
    "max_position_embeddings",
    "num_hidden_layers",
    "pad_token_id",
    "is_decoder",
    "add_cross_attention",
)


class RecurrentRobertaConfig(RobertaConfig):
    r"""A RoBERTa configuration with the fields of the window recurrence; RoBERTa's own fields go in by keyword.

    Args:
        window_size (`int`, defaults to 512): tokens that attend together, at most `max_position_embeddings` less the
            positions up to `pad_token_id`, which RoBERTa leaves out.
        overlap (`int`, defaults to 0): tokens that neighbouring windows share, less than `window_size`.
        insertion_layer (`int` or `"all"`, defaults to 1): the layer, counted from 0, whose attention gets the
            embedding of the previous window as a further key and value.
        pooling (`"mean"`, `"max"` or `"attention"`): how the token vectors of a window become one vector.
        pooling_layers (`"last"` or `"weighted"`): which layers make a token vector, the last or all with learned
            weights.
        recurrence_hidden_size (`int`, defaults to 768), recurrence_num_hidden_layers (`int`, defaults to 1),
            recurrence_activation (`str`, defaults to `"gelu"`): the feed-forward network behind the pooling.
        num_recurrent_embeddings (`int`, defaults to 1): embeddings handed from window to window.
        num_answer_classes (`int`, defaults to 3): what an answer can be: a span, yes, no; with 4 also none.

    Example:

    ```python
    >>> from hf_recurrence import RecurrentRobertaConfig, RecurrentRobertaForQuestionAnswering

    >>> config = RecurrentRobertaConfig(num_hidden_layers=2, window_size=128, overlap=16)
    >>> model = RecurrentRobertaForQuestionAnswering(config)
    ```"""

    model_type = "recurrent_roberta"

    def __init__(
        self,
        window_size: int = 512,
        overlap: int = 0,
        insertion_layer: int | str = 1,
        pooling: str = "mean",
        pooling_layers: str = "last",
        recurrence_hidden_size: int = 768,
        recurrence_num_hidden_layers: int = 1,
        recurrence_activation: str = "gelu",
        num_recurrent_embeddings: int = 1,
        num_answer_classes: int = 3,
        max_position_embeddings: int = 514,
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
        self.num_answer_classes = num_answer_classes
        # A save writes only AutoConfig and the saved head; the whole map lets every head load from one repo.
        kwargs.setdefault(
            "auto_map",
            {
                "AutoConfig": "configuration_recurrent_roberta.RecurrentRobertaConfig",
                "AutoModel": "modeling_recurrent_roberta.RecurrentRobertaModel",
                "AutoModelForQuestionAnswering": "modeling_recurrent_roberta.RecurrentRobertaForQuestionAnswering",
            },
        )
        super().__init__(max_position_embeddings=max_position_embeddings, **kwargs)
        self.check_recurrence()

    def check_recurrence(self) -> None:
        """Raises a `ValueError` that names the field, the rule and the value for the first rule that is broken."""
        pad: Any = self.pad_token_id
        if not is_int(pad) or pad < 0:
            raise ValueError(f"`pad_token_id` must be an integer of at least 0, got {pad!r}.")
        most = self.max_position_embeddings - pad - 1
        name = "`max_position_embeddings` - `pad_token_id` - 1"
        check_window_recurrence(self, most, name, "num_hidden_layers")
        if self.is_decoder:
            raise ValueError("`is_decoder` must be False: windows are read in both directions, got True.")
        if self.num_answer_classes not in (3, 4) or not is_int(self.num_answer_classes):
            raise ValueError(
                f"`num_answer_classes` must be 3 (span, yes, no) or 4 (and none), got {self.num_answer_classes!r}."
            )

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The stored fields; those of a plain RoBERTa become ours, any other type of model is refused."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return converted(config_dict, pretrained_model_name_or_path, cls.model_type, "roberta"), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration of these fields; what the caller changes is in place before the rules are checked."""
        changes = {name: kwargs.pop(name) for name in CHECKED_FIELDS if name in kwargs}
        return super().from_dict({**config_dict, **changes}, **kwargs)


__all__ = ["RecurrentRobertaConfig"]
