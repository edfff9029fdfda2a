# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""A recipe, trained: from its file to a checkpoint folder with weights, code, tokenizer, recipe and metrics."""

import atexit
import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import (
    Adafactor,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..metrics import METRICS, add_record, run_record
from .carry_state import CarryState, last_whole_checkpoint
from .prepare import Prepared, prepare
from .recipe import DataRecipe, ModelRecipe, Recipe, parse_recipe


RECIPE = "recipe.yaml"
# what a run may not change when it goes on: other data, another model, or rows that are not those of the states
FIXED = {*ModelRecipe.__dataclass_fields__, *DataRecipe.__dataclass_fields__} - {"data_cache"}
FIXED |= {"seed", "data_seed", "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "optim_args"}


class Interrupted(RuntimeError):
    """A run that was told to stop, after it saved where it was."""


def train(
    recipe: str | os.PathLike[str], overrides: Sequence[str] = (), resume: bool = False, dry_run: bool = False
) -> dict[str, Any]:
    """Trains a recipe, and returns what it came to: folder, steps, results; the plan alone for `dry_run`.

    The folder `output_dir` holds weights, config, code, tokenizer, recipe and metrics at the end. SIGINT and SIGTERM
    save a checkpoint and raise `Interrupted`. A dry run tokenises the data, which are kept for the run, and trains
    nothing.

    Args:
        recipe: a YAML file, as in `configs/`.
        overrides: `key=value` pairs in place of the file's.
        resume: goes on from the last whole checkpoint of `output_dir`.
        dry_run: only checks, and tells what would be done.

    ```python
    >>> train("configs/recurrent_gpt2_cpu.yaml", ["data=books", "output_dir=out"])["results"]["eval_loss"]
    ```"""
    parsed = parse_recipe(recipe, overrides)
    arguments = parsed.arguments
    main = arguments.process_index == 0
    check_arguments(parsed)
    if main:
        check_folder(parsed, resume)
    ready = prepare(parsed)
    plan = make_plan(parsed, ready)
    if main:
        print(show_plan(plan), file=sys.stderr)
        check_disk(plan)
    if dry_run:
        return {"status": "dry run", **plan}
    if main:
        write_recipe(parsed)
    checkpoint = last_whole_checkpoint(parsed.folder) if resume else None
    if main and resume:
        found = f"Resuming from {checkpoint}" if checkpoint else "No whole checkpoint yet: starting at the beginning"
        print(found, file=sys.stderr)
    again = resume_command(recipe, overrides, arguments.world_size)
    stop = StopWhenTold()
    with contextlib.redirect_stdout(sys.stderr):  # Trainer writes its logs there
        trainer = make_trainer(parsed, ready, stop)
        start = time.time()
        with stop.listening():
            trainer.train(resume_from_checkpoint=checkpoint)
        if stop.told:
            leave_later(arguments, 1)
            where = last_whole_checkpoint(parsed.folder)
            raise Interrupted(f"interrupted at step {trainer.state.global_step}, saved {where}; to go on: {again}")
        results = finish(parsed, ready, trainer, plan, time.time() - start)
    leave_later(arguments, 0)
    return {"status": "done", "output_dir": str(parsed.folder), "results": results}


# -- before the first step -------------------------------------------------------------------------------------------
def check_arguments(recipe: Recipe) -> None:
    """Raises a `ValueError` for keys that do not go together."""
    arguments, run = recipe.arguments, recipe.run
    if arguments.n_gpu > 1:
        raise ValueError(f"One process must have one device, got {arguments.n_gpu}. Start with accelerate launch.")
    if arguments.device.type == "cpu" and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise ValueError(
            "FSDP needs GPUs: on CPUs accelerate leaves all weights in every process and does not say so."
        )
    if run.early_stopping_patience is not None and not arguments.load_best_model_at_end:
        raise ValueError("`early_stopping_patience` needs `load_best_model_at_end: true`, got false.")
    if run.eval_every_tokens is not None:
        if run.eval_every_tokens < 1:
            raise ValueError(f"`eval_every_tokens` must be at least 1, got {run.eval_every_tokens}.")
        if arguments.eval_strategy != "steps":
            raise ValueError(f"`eval_every_tokens` needs `eval_strategy: steps`, got {arguments.eval_strategy}.")
    adafactor_settings(arguments)


def check_folder(recipe: Recipe, resume: bool) -> None:
    """Raises an error if the output folder holds another run, or nothing can be written there."""
    folder = recipe.folder
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`output_dir` must be a folder, got the file {str(folder)!r}.")
    held = [name for name in (RECIPE, METRICS, "config.json") if (folder / name).exists()]
    held += [path.name for path in folder.glob("checkpoint-*")]
    if held and not resume:
        raise ValueError(
            f"`output_dir` must be a folder without a run, got {str(folder)!r} with {held[0]}. Go on with that run by "
            "--resume, or take another folder."
        )
    if resume and held and not (folder / RECIPE).is_file():
        raise ValueError(f"`output_dir` must hold the run to go on with, got {str(folder)!r} without {RECIPE}.")
    if resume and held:
        before = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))
        for key in sorted(FIXED & {*before, *recipe.keys}):
            old, new = before.get(key), recipe.keys.get(key)
            if old != new:
                raise ValueError(f"`{key}` must be that of the run to go on with ({old!r}), got {new!r}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"0" * 4096)
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"`output_dir` must be a folder that can be written to, got {str(folder)!r}: {error}"
        ) from error


def make_plan(recipe: Recipe, ready: Prepared) -> dict[str, Any]:
    """What will be done; steps of evaluation that were given in tokens are set in the arguments."""
    arguments, config = recipe.arguments, ready.model.config
    parameters = ready.model.num_parameters()
    rows = arguments.train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps
    tokens = rows * ready.row_tokens
    if recipe.run.eval_every_tokens is not None:
        arguments.eval_steps = arguments.save_steps = max(1, round(recipe.run.eval_every_tokens / tokens))
    an_epoch = -(-ready.steps_an_epoch // arguments.gradient_accumulation_steps)
    steps = arguments.max_steps if arguments.max_steps > 0 else int(an_epoch * arguments.num_train_epochs)
    weights = 4 * parameters
    momentum = 4 if "beta1" in (arguments.optim_args or "") else 0
    optimizer = (momentum if arguments.optim == "adafactor" else 0 if arguments.optim == "sgd" else 8) * parameters
    kept = ready.window_tokens if arguments.gradient_checkpointing else ready.row_tokens
    # 17 numbers a feature of each layer, as many as a layer of attention and feed-forward keeps; logits of a window
    numbers = kept * 17 * config.hidden_size * config.num_hidden_layers
    numbers += 2 * min(kept, ready.window_tokens) * getattr(config, "vocab_size", 0)
    activations = 4 * numbers * arguments.train_batch_size
    return {
        "task": recipe.model.task,
        "model": config.model_type,
        "parameters": parameters,
        "data": ready.data,
        "tokens_a_step": tokens,
        "steps_an_epoch": an_epoch,
        "steps": steps,
        "evaluation_every": arguments.eval_steps if arguments.eval_strategy == "steps" else None,
        "processes": arguments.world_size,
        "memory_bytes": {
            "weights": weights,
            "gradients": weights,
            "optimizer": optimizer,
            "activations": int(activations),
        },
        "checkpoint_bytes": weights + optimizer,
        "checkpoints": checkpoints(arguments, steps, an_epoch),
        "output_dir": str(recipe.folder),
    }


def checkpoints(arguments: TrainingArguments, steps: int, an_epoch: int) -> int:
    """How many checkpoints there are at most at one time."""
    if arguments.save_strategy == "no":
        return 0
    every = an_epoch if arguments.save_strategy == "epoch" else arguments.save_steps
    every = max(1, int(every * steps) if every < 1 else int(every))
    written = -(-steps // every)
    # the oldest is deleted after the newest is written, and the best is kept besides
    return min(written, arguments.save_total_limit + 2) if arguments.save_total_limit else written


def size(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def show_plan(plan: dict[str, Any]) -> str:
    """The plan for people to read."""
    lines = [f"{plan['model']} for {plan['task']}: {plan['parameters']:,} parameters"]
    for split, facts in plan["data"].items():
        counts = [f"{facts[name]:,} {name}" for name in ("documents", "words", "tokens") if name in facts]
        lines.append(f"{split}: {facts['name']}, {', '.join(counts)}")
    processes = f" in {plan['processes']} processes" if plan["processes"] > 1 else ""
    lines.append(
        f"{plan['steps']:,} steps of up to {plan['tokens_a_step']:,} tokens{processes}, "
        f"{plan['steps_an_epoch']:,} an epoch"
    )
    memory = plan["memory_bytes"]
    parts = ", ".join(f"{name} {size(value)}" for name, value in memory.items())
    lines.append(f"memory of a process: about {size(sum(memory.values()))} ({parts})")
    disk = plan["checkpoints"] * plan["checkpoint_bytes"] + memory["weights"]
    lines.append(
        f"folder: {plan['output_dir']}, up to {size(disk)} in {plan['checkpoints']} checkpoints and the result"
    )
    return "\n".join(lines)


def check_disk(plan: dict[str, Any]) -> None:
    """Raises a `ValueError` if the checkpoints will not fit on the disk."""
    needed = plan["checkpoints"] * plan["checkpoint_bytes"] + plan["memory_bytes"]["weights"]
    held = sum(path.stat().st_size for path in Path(plan["output_dir"]).rglob("*") if path.is_file())
    free = shutil.disk_usage(plan["output_dir"]).free
    if needed > free + held:
        raise ValueError(
            f"`output_dir` must have room for checkpoints of {size(needed)}, got {size(free)} free on the disk of "
            f"{plan['output_dir']!r}. `save_total_limit` keeps fewer."
        )


def write_recipe(recipe: Recipe) -> None:
    """Writes the keys as they are run into the output folder."""
    path = recipe.folder / RECIPE
    path.write_text(yaml.safe_dump(recipe.keys, sort_keys=False, allow_unicode=True), encoding="utf-8")


def resume_command(recipe: str | os.PathLike[str], overrides: Sequence[str], processes: int) -> str:
    start = "hf-recurrence" if processes == 1 else "accelerate launch ... -m hf_recurrence"
    return " ".join([start, "train", *(shlex.quote(str(word)) for word in (recipe, *overrides)), "--resume"])


# -- the run ---------------------------------------------------------------------------------------------------------
class StopWhenTold(TrainerCallback):
    """Ends training with a checkpoint after the step in which SIGINT or SIGTERM came, in all processes at once."""

    def __init__(self) -> None:
        self.told = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals while inside; a second one is taken as ever."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in signals}

        def note(number: int, frame: Any) -> None:
            self.told = True
            print("Told to stop: saving after this step; once more to stop at once.", file=sys.stderr, flush=True)
            signal.signal(number, before[signal.Signals(number)])

        try:
            for number in signals:
                signal.signal(number, note)
        except ValueError:  # not in the main thread, which alone gets signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.world_size > 1:  # the signal may have come to some of them only, or in another step
            told = torch.tensor(int(self.told), device=args.device)
            torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
            self.told = bool(told)
        if self.told:
            control.should_save = control.should_training_stop = True


def adafactor_settings(arguments: TrainingArguments) -> tuple[Any, dict[str, Any]] | None:
    """Adafactor and its settings, which Trainer would leave out; None without `optim_args` for it."""
    if arguments.optim != "adafactor" or not arguments.optim_args:
        return None
    known = {"scale_parameter": bool, "beta1": float, "decay_rate": float, "clip_threshold": float}
    settings: dict[str, Any] = {"lr": arguments.learning_rate, "relative_step": False, "scale_parameter": False}
    for pair in arguments.optim_args.replace(" ", "").split(","):
        name, _, value = pair.partition("=")
        if name not in known or not value:
            raise ValueError(
                f"`optim_args` of adafactor must be of {', '.join(known)}, each with a value, got {pair!r}."
            )
        settings[name] = value.lower() == "true" if known[name] is bool else known[name](value)
    return Adafactor, settings


def make_trainer(recipe: Recipe, ready: Prepared, stop: StopWhenTold) -> Trainer:
    """The standard Trainer for what was prepared."""
    callbacks = [*ready.callbacks, stop]
    if recipe.run.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(recipe.run.early_stopping_patience))
    return Trainer(
        ready.model,
        recipe.arguments,
        train_dataset=ready.train,
        eval_dataset=ready.evaluation,
        data_collator=ready.collator,
        processing_class=ready.tokenizer,
        compute_metrics=ready.compute_metrics,
        callbacks=callbacks,
        optimizer_cls_and_kwargs=adafactor_settings(recipe.arguments),
    )


def finish(recipe: Recipe, ready: Prepared, trainer: Trainer, plan: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Evaluates, and writes the folder that the run ends with; returns the results."""
    arguments, state = recipe.arguments, trainer.state
    results: dict[str, Any] = {"steps": state.global_step, "epochs": state.epoch, "seconds": seconds}
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    results["train_loss"] = losses[-1] if losses else None
    if state.best_metric is not None:
        results |= {"best_step": state.best_global_step, "best_metric": state.best_metric}
    if ready.evaluation is not None:
        carries = any(isinstance(callback, CarryState) for callback in ready.callbacks)
        with CarryState().attached(ready.model) if carries else contextlib.nullcontext():
            found = trainer.evaluate()
        timing = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch")
        results |= {name: value for name, value in found.items() if name not in timing}
    trainer.save_model(arguments.output_dir)
    if arguments.process_index == 0:
        trainer.save_state()
        facts = {name: plan[name] for name in ("parameters", "tokens_a_step", "steps", "processes")}
        record = run_record(
            plan["data"], {"recipe": recipe.keys, **facts}, results, seeds=[arguments.seed], command=None
        )
        add_record(recipe.folder, "train", record)
    return results


def leave_later(arguments: TrainingArguments, code: int) -> None:
    """Lets a process of several end at once when python is done: gloo's threads may wait for the interpreter that
    waits for them."""

    def leave() -> None:
        torch.distributed.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    if arguments.world_size > 1:
        atexit.register(leave)


__all__ = ["Interrupted", "train"]
