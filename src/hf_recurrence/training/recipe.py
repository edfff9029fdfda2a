# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""A recipe: one flat YAML file with the keys of the model, of the data and of TrainingArguments."""

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml
from transformers import HfArgumentParser, TrainingArguments


TASKS = ("causal_lm", "masked_lm", "sequence_classification", "question_answering")


@dataclasses.dataclass
class ModelRecipe:
    """What is trained."""

    model: str = dataclasses.field(
        metadata={"help": "a folder or Hub name of a checkpoint; or a config's .json, to begin from scratch"}
    )
    task: str = dataclasses.field(metadata={"help": f"one of {', '.join(TASKS)}"})
    model_type: str | None = dataclasses.field(
        default=None,
        metadata={"help": "makes recurrent what is plain, or plain what is recurrent: recurrent_gpt2, gpt2, ..."},
    )
    window_size: int | None = dataclasses.field(default=None, metadata={"help": "in place of the config's"})
    overlap: int | None = dataclasses.field(default=None, metadata={"help": "in place of the config's"})
    model_settings: dict | str | None = dataclasses.field(
        default=None, metadata={"help": "further fields of the config, in braces"}
    )
    tokenizer: str | None = dataclasses.field(
        default=None, metadata={"help": 'a folder or Hub name; "bytes"; by default the model\'s'}
    )
    tokenizer_vocab_size: int | None = dataclasses.field(
        default=None, metadata={"help": "trains a tokenizer of this size on the training documents"}
    )

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"`task` must be one of {', '.join(TASKS)}, got {self.task!r}.")
        if isinstance(self.model_settings, str):
            self.model_settings = yaml.safe_load(self.model_settings)
        if not isinstance(self.model_settings, dict | None):
            raise ValueError(f"`model_settings` must be fields of the config, got {self.model_settings!r}.")
        if self.tokenizer is not None and self.tokenizer_vocab_size is not None:
            raise ValueError("`tokenizer_vocab_size` trains a tokenizer: leave it out where `tokenizer` is given.")

    @property
    def settings(self) -> dict[str, Any]:
        """All that is to differ from the config of the model."""
        own = {"window_size": self.window_size, "overlap": self.overlap}
        given: dict[str, Any] = self.model_settings if isinstance(self.model_settings, dict) else {}
        return {name: value for name, value in own.items() if value is not None} | given


@dataclasses.dataclass
class DataRecipe:
    """What it is trained on, and how long a row is."""

    data: str = dataclasses.field(
        metadata={"help": "what hf_recurrence.data.documents takes; a folder of HotpotQA's or GLUE's files"}
    )
    validation_data: str | None = dataclasses.field(
        default=None, metadata={"help": "by default the validation split of `data`"}
    )
    data_column: str = dataclasses.field(default="text", metadata={"help": "which column of rows has the text"})
    data_cache: str | None = dataclasses.field(
        default=None, metadata={"help": "where tokens are kept, by default in the cache folder of Hugging Face"}
    )
    max_train_documents: int | None = dataclasses.field(default=None, metadata={"help": "the first ones only"})
    max_validation_documents: int | None = dataclasses.field(default=None, metadata={"help": "the first ones only"})
    max_validation_tokens: int | None = dataclasses.field(
        default=None, metadata={"help": "the first ones of each document only"}
    )
    windows_per_sequence: int | None = dataclasses.field(
        default=None, metadata={"help": "windows of a row in one step, which the gradient passes through"}
    )
    segment_length: int | None = dataclasses.field(
        default=None, metadata={"help": "tokens of a row in one step, instead of windows_per_sequence"}
    )
    max_segments: int | None = dataclasses.field(
        default=None, metadata={"help": "longer documents are read as several"}
    )
    mlm_probability: float = dataclasses.field(default=0.15, metadata={"help": "the share of tokens to predict"})
    whole_words: bool = dataclasses.field(default=False, metadata={"help": "masks whole words"})
    glue_task: str | None = dataclasses.field(default=None, metadata={"help": "CoLA, MRPC, ..."})
    max_answer_length: int = dataclasses.field(default=30, metadata={"help": "the most tokens of an answer"})


@dataclasses.dataclass
class RunRecipe:
    """How it is run, beyond TrainingArguments."""

    early_stopping_patience: int | None = dataclasses.field(
        default=None, metadata={"help": "ends training after so many evaluations without a better one"}
    )
    eval_every_tokens: int | None = dataclasses.field(
        default=None, metadata={"help": "evaluates and saves whenever about so many tokens were read"}
    )


class Recipe(NamedTuple):
    """A recipe as it is run."""

    keys: dict[str, Any]  # as given, overrides included
    model: ModelRecipe
    data: DataRecipe
    run: RunRecipe
    arguments: TrainingArguments

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        return Path(str(self.arguments.output_dir))


PARTS: tuple[Any, ...] = (ModelRecipe, DataRecipe, RunRecipe, TrainingArguments)
KNOWN = sorted(field.name for part in PARTS for field in dataclasses.fields(part) if field.init)


class Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        # "argument --a_key/--a-key: invalid ..." -> "`a_key`: invalid ..."
        raise ValueError(re.sub(r"^argument --([^\s/:]+)[^:]*", r"`\1`", message).removesuffix(".") + ".")


def read_keys(recipe: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The keys of a recipe's file, with `key=value` pairs over them; a value of `null` takes a key out."""
    path = Path(recipe)
    if not path.is_file():
        raise ValueError(f"`recipe` must be a YAML file, got {str(recipe)!r}.")
    try:
        keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"`recipe` must be a YAML file, got {str(recipe)!r}: {error}") from error
    if not isinstance(keys, dict):
        raise ValueError(f"`recipe` must have a key and a value a line, got {str(recipe)!r}.")
    for pair in overrides:
        key, sign, value = pair.partition("=")
        if not sign:
            raise ValueError(f"An override must be `key=value`, got {pair!r}.")
        keys[key] = yaml.safe_load(value)
    for key in keys:
        if key not in KNOWN:
            near = difflib.get_close_matches(str(key), KNOWN, 1)
            raise ValueError(
                f"`{key}` is no key of a recipe" + (f"; the nearest is `{near[0]}`." if near else ", nor is any near.")
            )
    # YAML takes a plain no for false
    keys = {key: "no" if value is False and key.endswith("_strategy") else value for key, value in keys.items()}
    return {key: value for key, value in keys.items() if value is not None}


def parse_recipe(recipe: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """A recipe read from its file, each value with the type of its key.

    ```python
    >>> recipe = parse_recipe("configs/recurrent_gpt2_pg19.yaml", ["overlap=10", "output_dir=out"])
    ```"""
    keys = read_keys(recipe, overrides)
    for key in ("model", "task", "data", "output_dir"):
        if key not in keys:
            raise ValueError(f"`{key}` must be in the recipe, got only {', '.join(keys) or 'an empty one'}.")
    words = []
    for key, value in keys.items():
        if isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        else:
            words.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
    model, data, run, arguments = Parser(PARTS, allow_abbrev=False).parse_args_into_dataclasses(
        words, look_for_args_file=False
    )
    parts = [vars(part) for part in (model, data, run, arguments)]
    values = {name: value for part in parts for name, value in part.items()}
    # YAML takes 2e-5 for a text
    keys = {key: values[key] if isinstance(values[key], float) else value for key, value in keys.items()}
    return Recipe(keys, model, data, run, arguments)


__all__ = ["DataRecipe", "ModelRecipe", "Recipe", "RunRecipe", "parse_recipe", "read_keys"]
