# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""The rules that configurations of models with recurrence between windows share."""

from typing import Any

from transformers.activations import ACT2FN


POOLINGS = ("mean", "max", "attention")
POOLING_LAYERS = ("weighted", "last")
RECURRENCE_FIELDS = (
    "window_size",
    "overlap",
    "insertion_layer",
    "pooling",
    "pooling_layers",
    "recurrence_hidden_size",
    "recurrence_num_hidden_layers",
    "recurrence_activation",
    "num_recurrent_embeddings",
)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_window_recurrence(config: Any, most: int, most_name: str, layers_name: str) -> None:
    """Raises a `ValueError` that names the field, the rule and the value for the first rule that is broken.

    `most` is the largest window, `most_name` what it comes from, `layers_name` the field with the number of layers.
    """
    for name, least in (
        ("window_size", 1),
        ("overlap", 0),
        ("recurrence_hidden_size", 1),
        ("recurrence_num_hidden_layers", 0),
        ("num_recurrent_embeddings", 1),
    ):
        value = getattr(config, name)
        if not is_int(value) or value < least:
            raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}.")
    if config.window_size > most:
        raise ValueError(
            f"`window_size` must be at most {most_name} ({most}), the positions that the model knows, got "
            f"{config.window_size}."
        )
    if config.overlap >= config.window_size:
        raise ValueError(f"`overlap` must be smaller than `window_size` ({config.window_size}), got {config.overlap}.")
    layer, num_layers = config.insertion_layer, config.num_hidden_layers
    if layer != "all" and not (is_int(layer) and 0 <= layer < num_layers):
        raise ValueError(
            f"`insertion_layer` must be 'all' or a layer counted from 0, at most {num_layers - 1} "
            f"(`{layers_name}` is {num_layers}), got {layer!r}."
        )
    for name, choices in (
        ("pooling", POOLINGS),
        ("pooling_layers", POOLING_LAYERS),
        ("recurrence_activation", tuple(ACT2FN)),
    ):
        if getattr(config, name) not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {getattr(config, name)!r}.")
    if config.add_cross_attention:
        raise ValueError("`add_cross_attention` must be False: windows have no encoder to attend to, got True.")


def converted(config_dict: dict[str, Any], source: Any, model_type: str, plain_type: str) -> dict[str, Any]:
    """The stored fields; those of a plain model become ours, any other type of model is refused."""
    found = config_dict.get("model_type")
    if found == plain_type:
        return {**config_dict, "model_type": model_type, "architectures": None}
    if found != model_type:
        raise ValueError(
            f"`pretrained_model_name_or_path` must be a checkpoint of type '{model_type}' or '{plain_type}', got "
            f"{str(source)!r} of type {found!r}."
        )
    return config_dict
