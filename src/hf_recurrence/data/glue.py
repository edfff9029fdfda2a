# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""GLUE's tasks, read from their files as distributed: one folder a task with train.tsv and dev.tsv."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets


# parts of a data set, and the names of GLUE's files of them; those of test have no labels
SPLITS = {"train": "train", "validation": "dev"}


class GLUETask(NamedTuple):
    """Where a task's files have its texts and label; `labels` are None for a score. Columns are counted from 0."""

    folder: str
    texts: dict[str, int]  # name of a text -> its column
    label: int
    labels: tuple[str, ...] | None
    metric: str  # what the task is ranked by
    header: bool = True

    @property
    def num_labels(self) -> int:
        """Outputs of the model's head: 1 for a score."""
        return 1 if self.labels is None else len(self.labels)


PAIR = {"sentence1": 1, "sentence2": 2}
ENTAILMENT = ("entailment", "not_entailment")
GLUE_TASKS = {
    "cola": GLUETask("CoLA", {"sentence": 3}, 1, ("0", "1"), "matthews_correlation", header=False),
    "sst2": GLUETask("SST-2", {"sentence": 0}, 1, ("0", "1"), "accuracy"),
    "mrpc": GLUETask("MRPC", {"sentence1": 3, "sentence2": 4}, 0, ("0", "1"), "f1"),
    "stsb": GLUETask("STS-B", {"sentence1": 7, "sentence2": 8}, 9, None, "spearman"),
    "rte": GLUETask("RTE", PAIR, 3, ENTAILMENT, "accuracy"),
    "qnli": GLUETask("QNLI", {"question": 1, "sentence": 2}, 3, ENTAILMENT, "accuracy"),
    "wnli": GLUETask("WNLI", PAIR, 3, ("0", "1"), "accuracy"),
}


def glue_task(name: str) -> GLUETask:
    """The task of that name, in any of the usual spellings: `sst2`, `SST-2`, `sts_b`."""
    key = name.lower().replace("-", "").replace("_", "")
    if key not in GLUE_TASKS:
        raise ValueError(f"`task` must be one of {', '.join(GLUE_TASKS)}, got {name!r}.")
    return GLUE_TASKS[key]


def read_glue(folder: str | os.PathLike[str], task: str, split: str = "train") -> datasets.Dataset:
    """The rows of a task with its texts and `label`, a class or a score.

    Args:
        folder: GLUE's folder, which has one for each task (CoLA, SST-2, ...), or that of the task.
        task: cola, sst2, mrpc, stsb, rte, qnli or wnli.
        split: "train" or "validation". The test files as distributed have no labels and are refused.

    ```python
    >>> read_glue("glue", "mrpc", "validation")[0]
    {'sentence1': 'He said the foodservice pie business ...', 'sentence2': '...', 'label': 1}
    ```"""
    found = glue_task(task)
    if split not in SPLITS:
        raise ValueError(f"`split` must be train or validation, since only these have labels, got {split!r}.")
    root = Path(folder)
    places = [place / f"{SPLITS[split]}.tsv" for place in (root / found.folder, root)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ValueError(f"`folder` must hold {found.folder}/{SPLITS[split]}.tsv of GLUE, got {str(folder)!r}.")
    rows: dict[str, list[Any]] = {name: [] for name in (*found.texts, "label")}
    for number, cells in read_lines(path, found):
        try:
            label = float(cells[found.label]) if found.labels is None else found.labels.index(cells[found.label])
            texts = {name: cells[column] for name, column in found.texts.items()}
        except (IndexError, ValueError):
            rule = f"`folder` must hold the files of {found.folder} as distributed"
            raise ValueError(f"{rule}, got line {number} of {path.name} with {cells}.") from None
        for name, value in (texts | {"label": label}).items():
            rows[name].append(value)
    kind = datasets.Value("float32") if found.labels is None else datasets.ClassLabel(names=list(found.labels))
    features = datasets.Features({**dict.fromkeys(found.texts, datasets.Value("string")), "label": kind})
    return datasets.Dataset.from_dict(rows, features=features)


def read_lines(path: Path, task: GLUETask) -> Iterator[tuple[int, list[str]]]:
    """The cells of every line that is not empty, with its number; quotes are characters as others."""
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if line.strip() and (number > 1 or not task.header):
                yield number, line.rstrip("\r\n").split("\t")


__all__ = ["GLUE_TASKS", "GLUETask", "glue_task", "read_glue"]
