"""Documents in memory, and training runs over lanes of them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainingArguments

from hf_recurrence.data import Lanes, collate_lanes
from hf_recurrence.training import CarryState
from tests.common import MODELS


class ListTokens:
    """Documents as lists of token ids."""

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents = [np.array(ids, np.int32) for ids in documents]
        self.lengths = np.array([len(ids) for ids in documents], np.int64)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self.documents[document][start:stop]


def random_documents(lengths: list[int], seed: int = 0) -> ListTokens:
    generator = torch.Generator().manual_seed(seed)
    return ListTokens([torch.randint(3, 61, (length,), generator=generator).tolist() for length in lengths])


LENGTHS = [23, 7, 12, 41, 5, 18, 1, 30, 9]


def lane_trainer(
    folder: Path,
    kind: str = "recurrent_gpt2",
    num_lanes: int = 2,
    segment_length: int = 6,
    callbacks: list[Any] | None = None,
    model_changes: dict[str, Any] | None = None,
    **changes: Any,
) -> Trainer:
    """A run in float64, with SGD and no clipping, so that weights tell gradients."""
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
    }
    return Trainer(
        MODELS[kind](torch.float64, **(model_changes or {})).train(),
        TrainingArguments(folder, **{**settings, **changes}),
        train_dataset=Lanes(random_documents(LENGTHS), num_lanes, segment_length),
        eval_dataset=Lanes(random_documents([20, 9, 14], seed=1), num_lanes, segment_length, shuffle=False),
        data_collator=collate_lanes,
        callbacks=[CarryState()] if callbacks is None else callbacks,
    )


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def launch(folder: Path, processes: int = 1, check: bool = True, **settings: Any) -> dict[str, Any] | None:
    """What a run of `tests.lane_worker` found, in one or two processes of their own; None if it was killed."""
    root, out = Path(__file__).parent.parent, folder.with_name(f"{folder.name}.json")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-m"]
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        file = root / "configs" / "accelerate" / "cpu_2_processes.yaml"
        command += ["accelerate.commands.launch", f"--config_file={file}", f"--main_process_port={port}", "-m"]
    command += ["tests.lane_worker", json.dumps({**settings, "folder": str(folder)})]
    done = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, timeout=300)
    if not check:
        assert done.returncode != 0
        return None
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())
