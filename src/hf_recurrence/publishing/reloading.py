# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Reloads a folder as remote code, in a process without the package, and compares it with the local model."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from . import elsewhere


# float32 sums may come in another order; a wrong weight or another version of the code is far beyond this
RTOL, ATOL = 1e-4, 1e-5


def verify(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What was compared between the local model and the folder's own code; a `ValueError` says what differs."""
    folder = str(folder)
    local, local_facts = elsewhere.outcome(folder)
    remote, remote_facts = outcome_elsewhere(folder)
    troubles = list(differences(local, local_facts, remote, remote_facts))
    if troubles:
        raise ValueError(
            "`folder` must load as remote code and give what the local model gives: " + "; ".join(troubles)
        )
    compared = sorted({*remote, *remote_facts} - {"input_ids", "module", "largest_id", "vocab_size"})
    return {"head": remote_facts["head"], "compared": [name for name in compared if not name.endswith("_keys")]}


def outcome_elsewhere(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """`outcome` of a process that cannot import the package, has no network and an empty cache."""
    with tempfile.TemporaryDirectory() as scratch:
        quiet = {"HF_HOME": scratch, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        cache = {"HF_MODULES_CACHE": str(Path(scratch, "modules"))}
        out = str(Path(scratch, "outcome"))
        command = [sys.executable, str(Path(elsewhere.__file__).resolve()), str(Path(folder).resolve()), out]
        done = subprocess.run(
            command, cwd=scratch, env={**os.environ, **quiet, **cache}, capture_output=True, text=True
        )
        if done.returncode:
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ValueError(
                f"`folder` must load as remote code in a process without the package, there it fails: {said}"
            )
        return load_file(f"{out}.safetensors"), json.loads(Path(f"{out}.json").read_text(encoding="utf-8"))


def differences(
    local: dict[str, torch.Tensor], local_facts: dict[str, Any], remote: dict[str, torch.Tensor], remote_facts: Any
) -> Iterator[str]:
    """Each thing that differs between the local model and the remote one, or that neither should have."""
    for name in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := local_facts[name] or remote_facts[name]:
            yield f"the weights have {name.replace('_', ' ')}: {', '.join(keys[:5])}"
    if not remote_facts["module"].startswith("transformers_modules."):
        yield f"the code came from {remote_facts['module']}, not from the folder"
    if local_facts.get("largest_id", 0) >= local_facts.get("vocab_size", 1):
        yield (
            f"the tokenizer has ids up to {local_facts['largest_id']}, more than the model's `vocab_size` "
            f"({local_facts['vocab_size']})"
        )
    if local.keys() != remote.keys():
        yield f"the local model gives {sorted(local)}, the remote one {sorted(remote)}"
    for name in sorted(local.keys() & remote.keys()):
        here, there = local[name], remote[name]
        if here.shape != there.shape or here.dtype != there.dtype:
            yield f"{name} is {list(here.shape)} {here.dtype} here and {list(there.shape)} {there.dtype} there"
        elif here.is_floating_point() and not torch.isfinite(here).all():
            yield f"{name} is not finite"
        elif here.is_floating_point() and not torch.allclose(here.double(), there.double(), RTOL, ATOL):
            gap = (here.double() - there.double()).abs().max().item()
            yield f"{name} differs by up to {gap:.3g}"
        elif not here.is_floating_point() and not torch.equal(here, there):
            yield f"{name} differs: {here.flatten().tolist()[:20]} here, {there.flatten().tolist()[:20]} there"
    here_told, there_told = (
        {name: value for name, value in json.loads(json.dumps(facts)).items() if name != "module"}
        for facts in (local_facts, remote_facts)
    )
    for name in sorted(here_told.keys() | there_told.keys()):
        if not alike(here_told.get(name), there_told.get(name)):
            yield f"{name} differs: {here_told.get(name)!r} here, {there_told.get(name)!r} there"


def alike(one: Any, other: Any) -> bool:
    """Equal, but for the last bits of numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= ATOL + RTOL * abs(other)
    return bool(one == other)


__all__ = ["differences", "outcome_elsewhere", "verify"]
