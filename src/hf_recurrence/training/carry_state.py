# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""The state of each lane, carried from one training step to the next, into checkpoints and out of them.

Axes: B batch, which is the lanes of one process.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from safetensors import safe_open
from torch import nn
from torch.utils.data import IterableDataset, SequentialSampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..cache_recurrent import BlockRecurrentCache, RecurrentCache, RowCache
from ..data.lanes import Lanes, carrying


logger = logging.get_logger(__name__)

CACHES: dict[str, type[RowCache]] = {cache.model_type: cache for cache in (RecurrentCache, BlockRecurrentCache)}
STATE_FILE = re.compile(r"(?:carry_state|whole)_(\d+)_of_(\d+)(?:\.safetensors)?")
CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def state_path(args: Any, step: int) -> Path:
    """The file that holds the state of this process in the checkpoint of one step."""
    name = f"carry_state_{args.process_index}_of_{args.world_size}.safetensors"
    return Path(args.output_dir, f"checkpoint-{step}", name)


def is_whole(checkpoint: Path) -> bool:
    """Whether all of a checkpoint was written: states or marks come last, and all processes' are there."""
    found = [STATE_FILE.fullmatch(path.name) for path in checkpoint.iterdir()]
    states = {(int(match[1]), int(match[2])) for match in found if match}
    return any(all((process, total) in states for process in range(total)) for _, total in states)


def last_whole_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The last checkpoint that was written to its end, to resume from; None if there is none.

    A run that is killed while it saves leaves a part of a checkpoint, which `resume_from_checkpoint=True` would take.

    ```python
    >>> trainer.train(resume_from_checkpoint=last_whole_checkpoint(arguments.output_dir))
    ```"""
    folder = Path(output_dir)
    steps = [CHECKPOINT.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    for step in sorted((int(match[1]) for match in steps if match), reverse=True):
        checkpoint = folder / f"checkpoint-{step}"
        if checkpoint.is_dir() and is_whole(checkpoint):
            return str(checkpoint)
    return None


class CarryState(TrainerCallback):
    """Lets a model go on in each training step where the step before left each row, without gradient between them.

    For models whose forward takes `past_key_values` and `reset`. The data must be in lanes, those of
    `hf_recurrence.data.Lanes` or others: row b of a batch goes on where row b of the batch before ended, or is marked
    in `reset` as the start of a document. An evaluation has states of its own, begins afresh, and leaves those of
    training as they were; batches without `reset` are evaluated without any. Each process writes its states into each
    checkpoint.

    Args:
        resume_from_checkpoint: the folder that training resumes from, where that is not `checkpoint-STEP` in the
            `output_dir`.

    ```python
    >>> trainer = Trainer(model, arguments, train_dataset=lanes, data_collator=collate_lanes, callbacks=[CarryState()])
    >>> trainer.train(resume_from_checkpoint=last_whole_checkpoint(arguments.output_dir))
    ```"""

    def __init__(self, resume_from_checkpoint: str | os.PathLike[str] | None = None) -> None:
        self.resume_from_checkpoint = resume_from_checkpoint
        self.training: Any = None  # the cache after the last training step
        self.evaluation: Any = None
        self.handles: list[Any] = []

    # -- the model ---------------------------------------------------------------------------------------------------
    def attach(self, model: nn.Module) -> None:
        """Lets the model go on from call to call, until `detach`."""
        self.detach()
        self.handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        ]
        carrying.add(self)

    def detach(self) -> None:
        """Leaves the model as it was before `attach`, and forgets all states."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.training, self.evaluation = [], None, None
        carrying.discard(self)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Carries states while inside, for an evaluation outside of training.

        ```python
        >>> with CarryState().attached(trainer.model):
        ...     trainer.evaluate()
        ```"""
        self.attach(model)
        try:
            yield
        finally:
            self.detach()

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        reset = kwargs.get("reset")
        if reset is None:
            if module.training:
                raise ValueError(
                    "`reset` must be in every batch while CarryState is in use: it says which rows begin a document. "
                    "Use hf_recurrence.data.Lanes with collate_lanes, or leave CarryState out."
                )
            return None  # not in lanes: generation, or an evaluation of rows that have nothing to do with each other
        if kwargs.get("past_key_values") is not None:
            raise ValueError("`past_key_values` must be left out of the batch, CarryState gives it.")
        if module.training:
            self.evaluation = None
        state = self.training if module.training else self.evaluation
        if bool(reset.all()):
            state = None
        elif state is None:
            rows = (~reset).nonzero()[:, 0].tolist()
            raise ValueError(f"`reset` must be True in all rows of the first batch, got False in rows {rows}.")
        elif state.num_rows != len(reset):
            raise ValueError(
                f"A batch must have as many rows as the one before ({state.num_rows}), each going on with its own "
                f"document, got {len(reset)}. Use hf_recurrence.data.Lanes, or `dataloader_drop_last`."
            )
        return args, {**kwargs, "past_key_values": state, "use_cache": True}

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs.get("reset") is None:
            return
        if module.training:
            self.training = output.past_key_values
        else:
            self.evaluation = output.past_key_values

    # -- the Trainer -------------------------------------------------------------------------------------------------
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.n_gpu > 1:
            raise ValueError(
                f"CarryState needs one process a device, got one for {args.n_gpu}. Start with accelerate launch."
            )
        check_lanes(kwargs["train_dataloader"], args, args.train_batch_size, "train")
        if args.save_total_limit == 1:
            logger.warning(
                "`save_total_limit` is 1: the last checkpoint is deleted before the new one is whole, and a run that "
                "is killed in between has to start again. Set it to 2 or more."
            )
        self.attach(kwargs["model"])
        if state.global_step:
            self.training = self._load(args, state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # What a killed run left in the folder that may be written next must not make it look whole.
        state_path(args, state.global_step).unlink(missing_ok=True)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        path = state_path(args, state.global_step)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.training.save(path)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.evaluation is not None:
            check_lanes(kwargs["eval_dataloader"], args, args.eval_batch_size, "eval")

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.evaluation = None

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> None:
        self.evaluation = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.detach()

    def _load(self, args: TrainingArguments, state: TrainerState) -> Any:
        """The state of this process in the checkpoint that training resumes from."""
        path = state_path(args, state.global_step)
        if self.resume_from_checkpoint is not None:
            path = Path(self.resume_from_checkpoint, path.name)
        if not path.is_file():
            others = sorted(file.name for file in path.parent.glob("carry_state_*")) or "none"
            raise ValueError(
                f"The checkpoint must hold {path.name}, the state of process {args.process_index} of "
                f"{args.world_size}, got {others} in {str(path.parent)!r}. Resume from "
                "last_whole_checkpoint(output_dir), with as many processes as before; "
                "CarryState(resume_from_checkpoint=...) names a folder elsewhere."
            )
        # Trainer does not tell which folder it resumes from.
        history = json.loads((path.parent / "trainer_state.json").read_text())["log_history"]
        if history != state.log_history:
            raise ValueError(
                f"`resume_from_checkpoint` of CarryState must be the folder that training resumes from, got "
                f"{str(path.parent)!r}, which holds another run."
            )
        with safe_open(path, framework="pt") as file:
            model_type = json.loads(file.metadata()["cache"])["signature"]["model_type"]
        # the CPU of a process of several has a number, which safetensors does not know
        return CACHES[model_type].load(path, "cpu" if args.device.type == "cpu" else args.device)


class MarkWhole(TrainerCallback):
    """Lets `last_whole_checkpoint` find the checkpoints of runs that carry no state."""

    def path(self, args: Any, step: int) -> Path:
        return Path(args.output_dir, f"checkpoint-{step}", f"whole_{args.process_index}_of_{args.world_size}")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # What a killed run left in the folder that may be written next must not make it look whole.
        self.path(args, state.global_step).unlink(missing_ok=True)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        path = self.path(args, state.global_step)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def check_lanes(loader: Any, args: Any, batch_size: int, name: str) -> None:
    """Raises a `ValueError` if the rows of the loader's batches do not go on from batch to batch."""
    dataset = loader.dataset
    while isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    if isinstance(dataset, Lanes):
        total = batch_size * (1 if args.accelerator_config.split_batches else args.world_size)
        if dataset.num_lanes != total:
            raise ValueError(
                f"`num_lanes` must be `per_device_{name}_batch_size` times the number of processes ({total}), got "
                f"{dataset.num_lanes}."
            )
    elif not isinstance(dataset, IterableDataset):
        batches = loader.batch_sampler
        sampler = (batches.batch_sampler if isinstance(batches, BatchSamplerShard) else batches).sampler
        if not isinstance(sampler, SequentialSampler):
            raise ValueError(
                f"The rows of the {name} data must come in lanes, each going on where it ended in the batch before, "
                f"got a data set that is read in the order of a {type(sampler).__name__}. Use "
                "hf_recurrence.data.Lanes."
            )


__all__ = ["CarryState", "MarkWhole", "last_whole_checkpoint"]
