# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Texts of data sets, one whole document after the other, in an order that is always the same."""

import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets


# A WikiText article begins with " = Title = "; sections have more signs, with spaces between them.
WIKITEXT_TITLE = re.compile(r" ?= [^=\s](?:.*[^=\s])? = ?\n?")
# the customary parts of enwik8, in bytes
ENWIK8_PARTS = {"train": (0, 90_000_000), "validation": (90_000_000, 95_000_000), "test": (95_000_000, 100_000_000)}
# names of the same part of a data set
SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}


def documents(source: Any, split: str = "train", column: str = "text") -> Iterator[str]:
    """The documents of a source, read one by one.

    Args:
        source: a `datasets` data set, streaming or not; or a path to
            a folder of .txt files, each a document (PG-19 as distributed: a folder of them for each split),
            a folder with WikiText's files (wiki.train.tokens, wiki.train.raw, ...), an article a document,
            a folder with the file enwik8, each split one document,
            .jsonl and .parquet files (or a folder of them), a row a document,
            a folder that `save_to_disk` of `datasets` wrote;
            or else the name of a data set on the Hub, which is streamed.
        split: "train", "validation" or "test". Of the files of a folder those in the folder of that name, or with that
            name in theirs, are read; or all, where none has any split's name.
        column: which column or key of rows has the text.

    ```python
    >>> store = TokenStore.build("store", documents("pg19", "train"), tokenizer)
    ```"""
    if split not in SPLITS:
        raise ValueError(f"`split` must be one of {', '.join(SPLITS)}, got {split!r}.")
    if isinstance(source, (datasets.Dataset, datasets.IterableDataset)):
        return from_rows(source, column)
    if isinstance(source, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        return from_rows(source[split], column)
    path = Path(source)
    if path.is_file():
        return from_file(path, split, column)
    if not path.is_dir():
        if isinstance(source, os.PathLike) or path.is_absolute() or str(source).count("/") > 1:
            raise ValueError(f"`source` must be a file, a folder, a data set or its name on the Hub, got {source!r}.")
        return from_rows(datasets.load_dataset(str(source), split=split, streaming=True), column)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return documents(datasets.load_from_disk(str(path)), split, column)
    files = split_files(path, split)
    return (text for file in files for text in from_file(file, split, column))


def split_files(folder: Path, split: str) -> list[Path]:
    """The files of a folder that belong to a split, sorted by name."""
    kinds = (".txt", ".tokens", ".raw", ".jsonl", ".jsonl.gz", ".parquet")
    files = [path for path in sorted(folder.rglob("*")) if path.name.endswith(kinds) or path.name == "enwik8"]

    named = {key: [path for path in files if key in split_names(path, folder)] for key in SPLITS}
    found = named[split] if any(named.values()) else files
    if not found:
        raise ValueError(f"`source` must have {', '.join(kinds)} or enwik8 files for {split!r}, got {str(folder)!r}.")
    return found


def split_names(path: Path, folder: Path) -> set[str]:
    """The splits that the name of a file, or a folder that it is in, speaks of."""
    parts = path.relative_to(folder).parts
    words = {*parts[:-1], *re.split(r"[^a-z0-9]+", parts[-1].lower())}
    return {split for split, names in SPLITS.items() if words & {*names}}


def from_file(path: Path, split: str, column: str) -> Iterator[str]:
    """The documents of one file, by what its name says that it is."""
    if path.name == "enwik8":
        first, last = ENWIK8_PARTS[split]
        with path.open("rb") as file:
            file.seek(first)
            yield file.read(last - first).decode("utf-8", errors="replace")
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield text_of(json.loads(line), column, f"line {number} of {path.name}")
    elif path.suffix == ".parquet":
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        yield from from_rows(rows, column)
    elif path.suffix in (".tokens", ".raw") or is_wikitext(path):
        yield from articles(path)
    else:
        yield path.read_text(encoding="utf-8")


def from_rows(rows: Iterable[Any], column: str) -> Iterator[str]:
    """The documents of a `datasets` data set."""
    for number, row in enumerate(rows):
        yield text_of(row, column, f"row {number}")


def text_of(row: Any, column: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"`column` must name a text of every row, got {column!r} for {where}, which has {found}.")
    text: str = row[column]
    return text


def is_wikitext(path: Path) -> bool:
    """Whether the first line that is not empty is the title of a WikiText article."""
    with path.open(encoding="utf-8") as file:
        return any(WIKITEXT_TITLE.fullmatch(line) for line in [next((line for line in file if line.strip()), "")])


def articles(path: Path) -> Iterator[str]:
    """The articles of a WikiText file, each with its title; what stands before the first belongs to it."""
    lines: list[str] = []
    titled, blank = False, True
    with path.open(encoding="utf-8") as file:
        for line in file:
            # A title stands between empty lines; a formula in the text may look like one.
            if blank and WIKITEXT_TITLE.fullmatch(line):
                if titled:
                    yield "".join(lines)
                    lines = []
                titled = True
            lines.append(line)
            blank = not line.strip()
    if "".join(lines).strip():
        yield "".join(lines)


__all__ = ["documents"]
