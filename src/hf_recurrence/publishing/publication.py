# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""From a checkpoint folder to a repository on the Hub that anyone can load."""

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers.utils.hub import convert_file_size_to_int

from .card import is_sealed, read_metrics, render_card
from .files import CARD, INDEX, Files, checked_files, kind_of, read_config, without_paths
from .reloading import verify
from .upload import ASK_CARD, Remote, upload


CARDS = ("ask", "overwrite", "keep")


def publish(
    folder: str | os.PathLike[str],
    repo_id: str,
    private: bool = False,
    tag: str | None = None,
    dry_run: bool = False,
    card: str = "ask",
    license: str | None = None,
    base_model: str | None = None,
    max_shard_size: int | str = "5GB",
    token: str | None = None,
) -> dict[str, Any]:
    """What was published: the repository, its commit, the files uploaded or left out, and what was compared before.

    First the folder is checked, loaded as remote code in a process without this package, and compared with the local
    model; the card is written into it as README.md. Then one commit brings everything to the Hub. Done again, it ends
    in the same state.

    Args:
        folder: a saved model, with its tokenizer and metrics.json; files that Trainer keeps for itself are left out.
        repo_id: NAME or OWNER/NAME on the Hub.
        private: the repository can be seen by its owner only.
        tag: a name for the commit, such as "v1"; it is never moved.
        dry_run: all but the Hub; nothing leaves the machine.
        card: what to do with a card that was edited by hand, here or on the Hub: "ask" stops, "overwrite", "keep".
        license: the licence of the weights, by default that of the usual base model.
        base_model: its id on the Hub, by default what the recipe or the training run names.
        max_shard_size: weights in a larger file are split.
        token: of the Hub, by default the one of `hf auth login`.

    ```python
    >>> publish("runs/recurrent-gpt2", "me/recurrent-gpt2", tag="v1")
    ```"""
    folder = Path(folder)
    check_arguments(repo_id, tag, card)
    config = read_config(folder)
    files = checked_files(folder)
    read_metrics(folder)
    remote = None
    if not dry_run:
        remote = Remote(repo_id, private, tag, token)
        remote.check(config["model_type"])
        repo_id = remote.repo_id
    written = write_card(folder, repo_id, card, license, base_model)
    files.kept[CARD] = folder / CARD
    with tempfile.TemporaryDirectory() as scratch:
        stage = Path(scratch, "model")
        stage_files(files, stage, convert_file_size_to_int(max_shard_size))
        checked_files(stage)
        compared = verify(stage)
        facts: dict[str, Any] = {"repo_id": repo_id, "dry_run": dry_run, "card": written, **compared}
        facts |= {"files": sorted(path.name for path in stage.iterdir()), "left_out": files.left_out}
        if remote is not None:
            facts |= upload(stage, remote, card)
    return facts


def check_arguments(repo_id: str, tag: str | None, card: str) -> None:
    """Raises a `ValueError` for a name that the Hub would not take."""
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(f"`repo_id` must be a name on the Hub, NAME or OWNER/NAME, got {repo_id!r}.") from error
    if tag is not None and not re.fullmatch(r"(?!.*\.\.)[A-Za-z0-9_][\w.+-]*(?<!\.lock)(?<!\.)", tag):
        raise ValueError(f"`tag` must be letters, digits, points, dashes and underscores, got {tag!r}.")
    if card not in CARDS:
        raise ValueError(f"`card` must be one of {', '.join(CARDS)}, got {card!r}.")


def write_card(folder: Path, repo_id: str, card: str, license: str | None, base_model: str | None) -> str:
    """ "written", "unchanged" or "kept", after README.md of the folder is the card to publish."""
    path = folder / CARD
    found = path.read_text(encoding="utf-8") if path.exists() else None
    if found is not None and not is_sealed(found):
        if card == "keep":
            return "kept"
        if card == "ask":
            raise ValueError(f"{CARD} of {str(folder)!r} {ASK_CARD}")
    text = render_card(folder, repo_id, license, base_model)
    if text == found:
        return "unchanged"
    path.write_text(text, encoding="utf-8")
    return "written"


def stage_files(files: Files, stage: Path, max_shard_size: int) -> None:
    """Fills a new folder with what is published: large weights split, paths of this machine cut from records."""
    stage.mkdir()
    for name, path in files.kept.items():
        if kind_of(name) in ("metrics", "recipe"):
            (stage / name).write_text(without_paths(path.read_text(encoding="utf-8")), encoding="utf-8")
        elif kind_of(name) == "weights" and name != INDEX:
            link(path, stage / name)
        else:
            shutil.copyfile(path, stage / name)
    weights = [path for path in stage.glob("*.safetensors") if path.stat().st_size > max_shard_size]
    if weights:
        reshard(stage, max_shard_size)


def link(path: Path, new: Path) -> None:
    """The same file under a second name, or a copy where the file system cannot."""
    try:
        os.link(path.resolve(), new)
    except OSError:
        shutil.copyfile(path, new)


def reshard(stage: Path, max_shard_size: int) -> None:
    """Replaces the weights by files of at most this size."""
    config = read_config(stage)
    auto = next(name for name, cls in config["auto_map"].items() if cls.endswith(f".{config['architectures'][0]}"))
    model = getattr(transformers, auto).from_pretrained(stage)
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch, max_shard_size=max_shard_size)
        for old in [*stage.glob("*.safetensors"), stage / INDEX]:
            old.unlink(missing_ok=True)
        for new in Path(scratch).glob("model*"):
            shutil.copyfile(new, stage / new.name)


__all__ = ["publish"]
