# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Plain GPT-2, RoBERTa and BERT checkpoints made recurrent, and recurrent ones made plain again."""

import os
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PretrainedConfig,
    RobertaConfig,
    RobertaForQuestionAnswering,
)

from .. import (
    RecurrentGPT2LMHeadModel,
    RecurrentRobertaForQuestionAnswering,
    SRUBertForMaskedLM,
    SRUBertForQuestionAnswering,
    SRUBertForSequenceClassification,
    SRUBertForTokenClassification,
)


# a plain type -> our models by the ending of a plain class's name; the first for a checkpoint without such a head
RECURRENT: dict[str, dict[str, Any]] = {
    "gpt2": {"LMHeadModel": RecurrentGPT2LMHeadModel},
    "roberta": {"ForQuestionAnswering": RecurrentRobertaForQuestionAnswering},
    "bert": {
        "ForMaskedLM": SRUBertForMaskedLM,
        "ForQuestionAnswering": SRUBertForQuestionAnswering,
        "ForSequenceClassification": SRUBertForSequenceClassification,
        "ForTokenClassification": SRUBertForTokenClassification,
    },
}
# our type -> our model, its plain counterpart
PLAIN: dict[str, tuple[Any, Any, Any]] = {
    "recurrent_gpt2": (RecurrentGPT2LMHeadModel, GPT2Config, GPT2LMHeadModel),
    "recurrent_roberta": (RecurrentRobertaForQuestionAnswering, RobertaConfig, RobertaForQuestionAnswering),
}
NOT_PLAIN = {
    "sru_bert": "its recurrence stands in the place of BERT's feed-forward networks, which it no longer has",
    "block_recurrent": "it did not come from a plain model",
}


def convert(
    source: str | os.PathLike[str], out: str | os.PathLike[str], strip: bool = False, seed: int = 0, **settings: Any
) -> dict[str, Any]:
    """What was saved to `out`: a plain checkpoint made recurrent, with its tokenizer, ready to train or to publish.

    Args:
        source: a folder or an id on the Hub, of GPT-2, RoBERTa or BERT; with `strip` of a recurrent GPT-2 or RoBERTa.
        out: a new or empty folder.
        strip: the way back: the recurrence is left out, and the plain model loads without this package.
        seed: of the new parameters.
        settings: fields of the recurrent configuration, such as `window_size`.

    ```python
    >>> convert("gpt2", "recurrent-gpt2", window_size=300, overlap=10)
    >>> convert("recurrent-gpt2", "plain-gpt2", strip=True)
    ```"""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"`out` must be a new or an empty folder, got {str(out)!r}.")
    config = source_config(source)
    facts = stripped(source, out, config, settings) if strip else made_recurrent(source, out, config, seed, settings)
    return {"source": str(source), "out": str(out), **facts, "tokenizer": copy_tokenizer(source, out)}


def source_config(source: str | os.PathLike[str]) -> dict[str, Any]:
    """The stored configuration of a folder or of an id on the Hub."""
    try:
        config = PretrainedConfig.get_config_dict(source)[0]
    except OSError as error:
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"`source` must be a folder with a saved model or an id on the Hub, got {str(source)!r} ({reason})."
        ) from error
    if not config:
        raise ValueError(f"`source` must hold a saved model, there is no config.json in {str(source)!r}.")
    return config


def made_recurrent(
    source: Any, out: Path, config: dict[str, Any], seed: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Saves the recurrent model of a plain checkpoint; what is new in it comes back."""
    if config.get("model_type") not in RECURRENT:
        raise ValueError(
            f"`source` must be a checkpoint of type {', '.join(RECURRENT)}, got {config.get('model_type')!r}."
        )
    classes = RECURRENT[config["model_type"]]
    head = (config.get("architectures") or [""])[0]
    default = next(iter(classes.values()))
    model_class = next((cls for ending, cls in classes.items() if head.endswith(ending)), default)
    known = model_class.config_class().to_dict().keys() - PretrainedConfig().to_dict().keys()
    for name in settings:
        if name not in known:
            raise ValueError(f"`{name}` must be a field of {model_class.config_class.__name__}, which has none of it.")
    torch.manual_seed(seed)
    model, report = model_class.from_pretrained(source, output_loading_info=True, **settings)
    model.save_pretrained(out)
    recipe = {**({} if os.path.isdir(source) else {"base_model": str(source)}), "convert_seed": seed, **settings}
    (out / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return {
        "model_type": model.config.model_type,
        "model": model_class.__name__,
        "new": sorted(report["missing_keys"]),
        "left_out": sorted(report["unexpected_keys"]),
    }


def stripped(source: Any, out: Path, config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Saves the plain model of a recurrent checkpoint; what is left out comes back."""
    if settings:
        raise ValueError(f"`strip` must be False where fields are set, got {', '.join(settings)}.")
    model_type = config.get("model_type")
    if model_type in NOT_PLAIN:
        raise ValueError(f"`strip` must be False for a model of type {model_type!r}: {NOT_PLAIN[model_type]}.")
    if model_type not in PLAIN:
        raise ValueError(f"`source` must be a checkpoint of type {', '.join(PLAIN)} to strip, got {model_type!r}.")
    recurrent_class, config_class, plain_class = PLAIN[model_type]
    model = recurrent_class.from_pretrained(source)
    known = config_class().to_dict().keys() - {"architectures", "auto_map", "model_type", "transformers_version"}
    fields = {name: value for name, value in model.config.to_dict().items() if name in known}
    plain = plain_class(config_class(**fields)).to(model.dtype)
    report = plain.load_state_dict(model.state_dict(), strict=False)
    if report.missing_keys:
        raise RuntimeError(f"{type(model).__name__} lacks {', '.join(report.missing_keys)} of {plain_class.__name__}")
    if plain.can_generate():
        plain.generation_config = model.generation_config
    plain.save_pretrained(out)
    return {
        "model_type": plain.config.model_type,
        "model": plain_class.__name__,
        "new": [],
        "left_out": report.unexpected_keys,
    }


def copy_tokenizer(source: Any, out: Path) -> bool:
    """Whether the source has a tokenizer; it is then saved too."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError):  # there is none
        return False
    tokenizer.save_pretrained(out)
    return True


__all__ = ["convert"]
