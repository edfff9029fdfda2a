"""What the measurements share: the record that a run writes, timing of two things in turn, peaks of memory."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_recurrence


RESULTS = Path(__file__).parent / "results"


def write_results(name: str, settings: dict[str, Any], results: Any, targets: dict[str, Any]) -> None:
    """Writes `results/NAME.json` with all that is needed to run it again, and prints it."""
    root = Path(__file__).parent.parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True).stdout
    record = {
        "command": f"python -m benchmarks.{name}",
        "settings": settings,
        "results": results,
        "targets": targets,
        "versions": {
            "hf_recurrence": hf_recurrence.__version__,
            "commit": commit.strip(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
        },
    }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(record, indent=2) + "\n"
    (RESULTS / f"{name}.json").write_text(text)
    print(text)


def interleaved_ratios(runs: dict[str, Callable[[], Any]], base: str, rounds: int) -> dict[str, dict[str, float]]:
    """The median, over `rounds` turns in which each run is timed once, of its seconds and of its ratio to `base`."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
        print(f"turn {turn} of {rounds}", file=sys.stderr)
    return {
        name: {
            "seconds": statistics.median(values),
            "ratio": statistics.median(a / b for a, b in zip(values, seconds[base], strict=True)),
        }
        for name, values in seconds.items()
    }


def memory_mb(field: str) -> float:
    """A field of this process's memory, VmRSS (now) or VmHWM (the peak), in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"`field` must be a line of /proc/self/status, got {field!r}.")


# The allocator gives large blocks back at once: its default would show growth of memory that is not in use.
BLOCKS_GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def in_process(module: str, *arguments: Any, variables: dict[str, str] = BLOCKS_GIVEN_BACK) -> dict[str, Any]:
    """What `python -m MODULE ARGUMENTS` prints as its last line, JSON, from a process of its own.

    Of the allocator's settings it has those of `variables` alone.
    """
    others = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, env={**others, **variables}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
