"""A training run of its own process: `accelerate launch ... -m tests.train_worker MODEL OUT LENGTH ROWS`."""

import json
import os
import sys

import torch
from transformers import Trainer, TrainingArguments

from tests.common import ALL_MODELS


def main(kind: str, out: str, length: int, rows_per_process: int) -> None:
    model = ALL_MODELS[kind](torch.float64).train()
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(3, 61, (length,), generator=generator)} for _ in range(16)]
    for row in rows:
        if kind == "recurrent_roberta":
            row |= {"start_positions": 1, "end_positions": length - 1}
        else:
            row["labels"] = row["input_ids"]
    arguments = TrainingArguments(
        f"{out}.folder",
        max_steps=4,
        per_device_train_batch_size=rows_per_process,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        weights = {name: parameter.sum().item() for name, parameter in model.named_parameters()}
        with open(out, "w") as file:
            json.dump({"losses": losses, "weights": weights, "processes": arguments.world_size}, file)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        os._exit(0)  # gloo's threads may wait for the interpreter that waits for them while it cleans up


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
