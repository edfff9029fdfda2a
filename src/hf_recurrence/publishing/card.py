# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""The card of a checkpoint, made of its configuration and its metrics file."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .. import MODELS
from .files import read_config, without_paths


TEMPLATE = "template.md.jinja"
SEAL = re.compile(r"<!-- written by hf_recurrence; sha256 of the text above: ([0-9a-f]{64}) -->\n?\Z")
HUB_ID = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForQuestionAnswering": "question-answering",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "Model": "feature-extraction",
}
# licence of the usual base model, and of models from scratch that of the code
LICENSES = {
    "recurrent_gpt2": "mit",
    "recurrent_roberta": "mit",
    "sru_bert": "apache-2.0",
    "block_recurrent": "apache-2.0",
}
COSTS = re.compile(r"flop|memory|bytes|_mb\b|_gb\b|seconds|per_second|runtime|wall_time")
WINDOWS = ("window_size", "overlap")
# what a run went over, not what it found
SIZES = {*WINDOWS, "bytes", "count", "documents", "examples", "first_position", "tokens", "windows", "words"}


class Row(NamedTuple):
    """One number of the metrics file, and what it was measured on."""

    run: str
    metric: str
    value: int | float
    data: str
    split: str | None
    window_size: Any
    overlap: Any
    seeds: str


def render_card(
    folder: str | os.PathLike[str], repo_id: str, license: str | None = None, base_model: str | None = None
) -> str:
    """The text of a checkpoint's card, sealed so that a later change by hand is known.

    All results come from the folder's metrics.json; where there is none the card says so.
    """
    folder = Path(folder)
    config, records = read_config(folder), read_metrics(folder)
    model_type, head = config["model_type"], config["architectures"][0]
    task = next(task for ending, task in TASKS.items() if head.endswith(ending))
    rows = [row for name, record in records.items() for row in rows_of(name, record, config)]
    costs = [row for row in rows if COSTS.search(row.metric)]
    training = [row for row in rows if is_training(row.run) and row not in costs]
    results = [row for row in rows if row not in costs and row not in training]
    base_model = base_model or base_model_of(folder, records)
    name = repo_id.split("/")[-1]
    data = ModelCardData(
        license=license or LICENSES[model_type],
        library_name="transformers",
        pipeline_tag=task,
        base_model=base_model,
        datasets=hub_datasets(records) or None,
        tags=["hf_recurrence", "custom_code", model_type.replace("_", "-")],
        model_name=name if results else None,
        eval_results=[evaluated(row, task) for row in results] or None,
    )
    auto = next(auto for auto, target in config["auto_map"].items() if target.endswith(f".{head}"))
    card = ModelCard.from_template(
        data,
        template_str=(files("hf_recurrence.publishing") / TEMPLATE).read_text(encoding="utf-8"),
        name=name,
        repo_id=repo_id,
        head=head,
        auto=auto,
        task_name=task,
        kind=model_type,
        config=config,
        defaults={config_class.model_type: config_class for config_class in MODELS}[model_type]().to_dict(),
        has_tokenizer=(folder / "tokenizer_config.json").exists(),
        results=results,
        training=training,
        costs=costs,
        sources=[source for name, record in records.items() for source in sources_of(name, record)],
        runs=[(name, without_paths(record["command"]), versions(record)) for name, record in records.items()],
        license_name=license or LICENSES[model_type],
        base=base_model,
    )
    return sealed(str(card))


def sealed(text: str) -> str:
    """The text with a last line that holds its digest."""
    text = text.rstrip("\n") + "\n\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text}<!-- written by hf_recurrence; sha256 of the text above: {digest} -->\n"


def is_sealed(text: str) -> bool:
    """Whether a card is one that was written here, and has not been changed since."""
    seal = SEAL.search(text)
    return seal is not None and hashlib.sha256(text[: seal.start()].encode()).hexdigest() == seal[1]


def read_metrics(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a checkpoint's runs by name; none where nothing was measured."""
    path = folder / "metrics.json"
    if not path.is_file():
        return {}
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`metrics.json` must be JSON: {error}.") from error
    needed = {"command", "data", "results", "seeds", "settings", "versions"}
    for name, record in records.items() if isinstance(records, dict) else [("it", None)]:
        if not isinstance(record, dict) or not needed <= record.keys():
            raise ValueError(
                f"`metrics.json` must hold records by name, each with {sorted(needed)}; {name} is not one."
            )
    return records


def is_training(run: str) -> bool:
    return run.startswith("train")


def rows_of(name: str, record: dict[str, Any], config: dict[str, Any]) -> Iterator[Row]:
    """The numbers of a record, each a row."""
    settings = {**config, **record["settings"]}
    seeds = ", ".join(map(str, record["seeds"])) or "none"
    sources = datasets_of(record)
    data = ", ".join(dict.fromkeys(source["name"] for source in sources)) or "not named"
    split = str(sources[0]["split"]) if len(sources) == 1 and sources[0].get("split") else None
    for metric, value, windows in numbers(record["results"]):
        window, overlap = ({**settings, **windows}.get(key) for key in WINDOWS)
        yield Row(name, metric, value, data, split, window, overlap, seeds)


def numbers(
    results: dict[str, Any], prefix: str = "", windows: dict[str, Any] | None = None
) -> Iterator[tuple[str, int | float, dict[str, Any]]]:
    """The numbers of nested results, with the names that lead to them and the windows that they say they are of.

    Results for several windows are a list. Sizes of the data are not results, and lists of numbers stay in the file.
    """
    windows = {**(windows or {}), **{key: results[key] for key in WINDOWS if key in results}}
    for name, value in results.items():
        path = f"{prefix} {name}".strip()
        if isinstance(value, dict):
            yield from numbers(value, path, windows)
        elif isinstance(value, list):
            for part in value:
                if isinstance(part, dict):
                    yield from numbers(part, path, windows)
        elif isinstance(value, int | float) and not isinstance(value, bool) and name not in SIZES:
            yield path, value, windows


def datasets_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a record: one with its name, or several by theirs."""
    data = record["data"]
    if "name" in data:
        return [{**data, "name": without_paths(str(data["name"]))}]
    several = [{"name": name, "split": name, **value} for name, value in data.items() if isinstance(value, dict)]
    return [{**source, "name": without_paths(str(source["name"]))} for source in several]


def sources_of(name: str, record: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The run, the data with their split, and their digest or digests."""
    for source in datasets_of(record):
        split = f", {source['split']}" if source.get("split") else ""
        digest = source.get("sha256", "not recorded")
        if isinstance(digest, dict):
            digest = ", ".join(f"{part} {value}" for part, value in digest.items())
        yield name, f"{source['name']}{split}", str(digest)


def versions(record: dict[str, Any]) -> str:
    parts = [f"{package} {version}" for package, version in record["versions"].items()]
    return ", ".join(parts + [f"commit {record['commit'][:12]}"] * bool(record.get("commit")))


def hub_datasets(records: dict[str, dict[str, Any]]) -> list[str]:
    """Data sets that are named as the Hub names them, OWNER/NAME."""
    names = {source["name"] for record in records.values() for source in datasets_of(record)}
    return sorted(name for name in names if "/" in name and HUB_ID.fullmatch(name))


def base_model_of(folder: Path, records: dict[str, dict[str, Any]]) -> str | None:
    """The Hub id of the model that training began with, from the recipe or a run's settings; None if there is none."""
    recipe: dict[str, Any] = {}
    for path in (folder / "recipe.yaml", folder / "recipe.json"):
        if path.is_file():
            recipe = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    settings = [record["settings"] for name, record in records.items() if is_training(name)]
    for source in (recipe, *settings, *(kept.get("recipe", {}) for kept in settings)):
        for key in ("base_model", "model_name_or_path", "model"):
            value = source.get(key)
            known = isinstance(value, str) and HUB_ID.fullmatch(value) and not value.endswith((".json", ".yaml"))
            if known and not Path(value).exists():
                return value
    return None


def evaluated(row: Row, task: str) -> EvalResult:
    """A row as the Hub keeps it."""
    arguments = {"run": row.run, "window_size": row.window_size, "overlap": row.overlap, "seeds": row.seeds}
    return EvalResult(
        task_type=task,
        dataset_type=row.data,
        dataset_name=row.data,
        dataset_split=row.split,
        metric_type=row.metric.split(" ")[-1],
        metric_name=row.metric,
        metric_value=row.value,
        metric_args={name: value for name, value in arguments.items() if value is not None},
    )


__all__ = ["is_sealed", "read_metrics", "render_card", "sealed"]
