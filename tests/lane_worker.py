"""A run over lanes in a process of its own: `accelerate launch ... -m tests.lane_worker SETTINGS`, JSON.

`kill` names a moment, "step N" or "save N", at which the process kills itself; "seen" holds what each step read.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer import Trainer

from hf_recurrence.training import CarryState, last_whole_checkpoint
from tests.lanes import lane_trainer, losses


class Recorder(TrainerCallback):
    """Notes, line by line, what the rows of this process read in each step, and kills the process when told to."""

    def __init__(self, file: Path, kill: str) -> None:
        self.file, self.kill, self.step = file, kill, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.step = state.global_step
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step

    def note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows = [
            ids[mask.bool()].tolist() for ids, mask in zip(kwargs["input_ids"], kwargs["attention_mask"], strict=True)
        ]
        with self.file.open("a") as file:
            file.write(json.dumps({"step": self.step, "rows": rows, "reset": kwargs["reset"].tolist()}) + "\n")
        if self.kill == f"step {self.step}":
            os.kill(os.getpid(), signal.SIGKILL)


def main(settings: dict[str, Any]) -> None:
    folder, kill = Path(settings.pop("folder")), settings.pop("kill", "")
    process = int(os.environ.get("RANK", "0"))
    recorder = Recorder(folder.with_name(f"{folder.name}.seen.{process}"), kill)
    run = lane_trainer(folder, callbacks=[CarryState(), recorder], **settings)
    if kill.startswith("save"):
        save = Trainer._save_optimizer_and_scheduler

        def killed(self: Trainer, output_dir: str) -> None:
            if output_dir.endswith(f"checkpoint-{kill.split()[1]}"):
                os.kill(os.getpid(), signal.SIGKILL)
            save(self, output_dir)

        Trainer._save_optimizer_and_scheduler = killed
    run.train(resume_from_checkpoint=last_whole_checkpoint(folder))
    if run.is_world_process_zero():
        weights = {name: parameter.sum().item() for name, parameter in run.model.named_parameters()}
        found = {"losses": losses(run), "weights": weights, "processes": run.args.world_size}
        found["evaluation"] = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
        folder.with_name(f"{folder.name}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        os._exit(0)  # gloo's threads may wait for the interpreter that waits for them while it cleans up


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
