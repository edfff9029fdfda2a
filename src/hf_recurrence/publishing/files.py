# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Which files of a checkpoint folder are published, and what they must not hold."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from transformers.dynamic_module_utils import get_relative_import_files

from .. import MODELS


PACKAGE = Path(__file__).parent.parent
CARD = "README.md"
INDEX = "model.safetensors.index.json"
CONFIGS = {config.model_type: config for config in MODELS}

# what a published checkpoint may hold beside its code
KINDS = {
    "config": r"config\.json",
    "weights": r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json",
    "generation config": r"generation_config\.json",
    "tokenizer": r"tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|chat_template\.jinja",
    "metrics": r"metrics\.json",
    "recipe": r"recipe\.(json|yaml)",
    "card": r"README\.md",
}
# what Trainer, CarryState and git keep in such a folder for themselves
LEFT_OUT = re.compile(
    r"(optimizer|scheduler|scaler)\.(pt|bin)|rng_state(_\d+)?\.pth|training_args\.bin|trainer_state\.json"
    r"|((all|train|eval)_)?results\.json|carry_state_.*\.safetensors|checkpoint-\d+|runs|__pycache__|\.git.*|\.cache"
)
PICKLES = (".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth")
TOKENS = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\bapi_org_[A-Za-z0-9]{30,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}"
    r"|\bsk-[A-Za-z0-9_-]{30,}|\bAKIA[A-Z0-9]{16}\b"
)
ABSOLUTE = re.compile(r"(?<![\w.:/~*<-])(?:/[\w.@+-]+(?:/[\w.@+-]+)+|[A-Za-z]:[\\/][\w.\\/ -]+)|file://\S+|~/\S+")
LOCAL = r"/(data|home|mnt|opt|root|srv|tmp|Users|usr|var|work|workspace)/|[A-Za-z]:|file:|~"


class Files(NamedTuple):
    """The files of a folder that are published, by name, and the names of those that stay."""

    kept: dict[str, Path]
    left_out: list[str]


def kind_of(name: str) -> str | None:
    """What a file is in a published checkpoint; None if it does not belong into one."""
    if name in shipped_names():
        return "code"
    return next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name)), None)


@cache
def shipped_files(model_type: str) -> dict[str, Path]:
    """The files of code that travel with a model, by name."""
    paths = set()
    for module in {reference.split(".")[0] for reference in CONFIGS[model_type]().auto_map.values()}:
        path = PACKAGE / f"{module}.py"
        paths |= {str(path), *get_relative_import_files(path)}
    return {Path(path).name: Path(path) for path in sorted(paths)}


@cache
def shipped_names() -> set[str]:
    return {name for model_type in CONFIGS for name in shipped_files(model_type)}


def read_config(folder: Path) -> dict[str, Any]:
    """The stored configuration of one of our models."""
    if not folder.is_dir():
        raise ValueError(f"`folder` must be a folder with a saved model, got {str(folder)!r}.")
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"`folder` must hold a saved model, there is no config.json in {str(folder)!r}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`folder` must hold a saved model, its config.json is not JSON: {error}.") from error
    if config.get("model_type") not in CONFIGS:
        raise ValueError(
            f"`folder` must hold a model of type {', '.join(sorted(CONFIGS))}, got {config.get('model_type')!r}."
        )
    return config


def checked_files(folder: Path) -> Files:
    """The files to publish; a `ValueError` tells of everything in the folder that must not or cannot be."""
    config = read_config(folder)
    shipped = shipped_files(config["model_type"])
    kept, left_out, troubles = {}, [], []
    for path in sorted(folder.iterdir()):
        name = path.name
        if LEFT_OUT.fullmatch(name):
            left_out.append(name)
        elif path.is_dir() or not (name in shipped or kind_of(name) not in (None, "code")):
            pickled = name.endswith(PICKLES)
            reason = "is a pickle, which can run anything when it is loaded" if pickled else "does not belong there"
            troubles.append(f"{name} {reason}")
        else:
            kept[name] = path
    troubles += list(code_troubles(config, kept, shipped))
    troubles += list(weight_troubles(kept))
    for name, path in kept.items():
        if kind_of(name) not in ("code", "weights") or name == INDEX:
            troubles += list(text_troubles(name, path.read_text(encoding="utf-8")))
    if troubles:
        raise ValueError(
            f"`folder` must hold a checkpoint and nothing else, in {str(folder)!r} " + "; ".join(troubles)
        )
    return Files(kept, left_out)


def code_troubles(config: dict[str, Any], kept: dict[str, Path], shipped: dict[str, Path]) -> Iterator[str]:
    """What is wrong with the code: it must be this package's, and what the configuration points to."""
    for name, path in shipped.items():
        if name not in kept:
            yield f"{name} is missing (save the model again with save_pretrained)"
        elif kept[name].read_bytes() != path.read_bytes():
            yield f"{name} is not that of the installed hf_recurrence (save the model again with save_pretrained)"
    expected = CONFIGS[config["model_type"]]().auto_map
    if config.get("auto_map") != expected:
        yield f"`auto_map` of config.json is {config.get('auto_map')} where {expected} belongs"
    if not config.get("architectures"):
        yield "`architectures` of config.json is empty"


def weight_troubles(kept: dict[str, Path]) -> Iterator[str]:
    """What is wrong with the weights: one file, or an index and exactly its shards."""
    stored = {name for name in kept if name.endswith(".safetensors")}
    expected = {"model.safetensors"}
    if INDEX in kept:
        expected = set(json.loads(kept[INDEX].read_text(encoding="utf-8"))["weight_map"].values())
    for name in sorted(expected - stored):
        yield f"{name} is missing"
    for name in sorted(stored - expected):
        yield f"{name} is not part of the weights"


def text_troubles(name: str, text: str) -> Iterator[str]:
    """Tokens anywhere, and absolute paths; those of runs (metrics, recipe) are cut when they are published."""
    for token in TOKENS.findall(text):
        yield f"{name} holds what looks like a token ({token[:6]}...)"
    if kind_of(name) == "tokenizer" and name != "tokenizer_config.json":
        return  # a vocabulary may have words that look like paths
    if kind_of(name) in ("metrics", "recipe"):
        return
    for path in absolute_paths(name, text):
        yield f"{name} holds the absolute path {path!r}"


def absolute_paths(name: str, text: str) -> list[str]:
    """Paths of this machine: values of a JSON file that are one, and in other texts those of the usual folders."""
    if name.endswith(".json"):
        return [value for value in strings(json.loads(text)) if ABSOLUTE.match(value.strip())]
    return [path for path in ABSOLUTE.findall(text) if re.match(LOCAL, path)]


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)


def without_paths(text: str) -> str:
    """The text with every absolute path cut to its last part."""
    return ABSOLUTE.sub(lambda match: re.split(r"[\\/]", match[0].rstrip("\\/"))[-1], text)


__all__ = ["Files", "checked_files", "kind_of", "read_config", "shipped_files", "without_paths"]
