# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""What a run measured, with all that is needed to run it again, in `metrics.json` beside the weights."""

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock

from . import __version__


METRICS = "metrics.json"


def run_record(
    data: dict[str, Any],
    settings: dict[str, Any],
    results: dict[str, Any],
    seeds: Iterable[int] = (),
    command: str | None = None,
) -> dict[str, Any]:
    """The record of a run: its results, and the command, commit, versions, seeds, data and settings behind them.

    Args:
        data: the data by name: what it is, its size, and its sha256 (`files_digest`, `TokenStore.digest`).
        settings: what was chosen; anything that JSON takes.
        results: what was measured.
        seeds: all that was random.
        command: how to run it again; by default the command of this process.

    ```python
    >>> record = run_record({"name": "books", "sha256": files_digest(files)}, {"overlap": 10}, {"perplexity": 21.3})
    >>> add_record("checkpoint", "evaluate-books", record)
    ```"""
    record = {
        "command": command or this_command(),
        "commit": commit(),
        "versions": versions(),
        "seeds": list(seeds),
        "data": data,
        "settings": settings,
        "results": results,
    }
    return json.loads(json.dumps(record, default=str))


def add_record(folder: str | os.PathLike[str], name: str, record: dict[str, Any]) -> Path:
    """The file of a folder's records, after this one was put in under its name, in place of one of the same name."""
    path = Path(folder, METRICS)
    with FileLock(f"{path}.lock"):
        records = read_records(folder) | {name: record}
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)
    Path(f"{path}.lock").unlink(missing_ok=True)
    return path


def read_records(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The records of a folder by name; none if nothing was measured yet."""
    path = Path(folder, METRICS)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def this_command() -> str:
    """The command of this process, as one would type it."""
    program, *arguments = sys.argv
    name = Path(program).name
    if name == "__main__.py":  # python -m PACKAGE
        program = f"python -m {Path(program).parent.name}"
    elif name.endswith(".py"):
        program = f"python {program}"
    else:
        program = name
    return " ".join([program, *map(shlex.quote, arguments)])


def commit() -> str | None:
    """The commit of the checkout that this package is part of, with "-dirty" where it has changes; None elsewhere."""
    folder = Path(__file__).parent
    for arguments in (
        ["ls-files", "--error-unmatch", "__init__.py"],
        ["describe", "--always", "--dirty", "--abbrev=40"],
    ):
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
        except OSError:  # no git
            return None
        if done.returncode:
            return None
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """What the run ran with."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_recurrence": __version__,
    }


def files_digest(paths: Iterable[str | os.PathLike[str]]) -> str:
    """The sha256 over the contents of files, in this order; their names do not count."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


__all__ = ["add_record", "commit", "files_digest", "read_records", "run_record", "versions"]
