"""The standard Trainer, unmodified, with all that it is usually asked to do; adapters; several processes."""

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.copy_distance import NUM_KEYS, copy_task, remember_task
from benchmarks.recurrent_roberta import NUM_KEYS as NUM_CHOICES
from benchmarks.recurrent_roberta import fact_task
from transformers import Trainer, TrainingArguments

from hf_recurrence import RecurrentGPT2LMHeadModel
from tests.common import (
    ALL_MODELS,
    MODELS,
    block_model,
    random_ids,
    read_in_pieces,
    roberta_model,
    sru_model,
    tiny_model,
)


def rows(count: int = 8, length: int = 17) -> list[dict]:
    torch.manual_seed(4)
    return [
        {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)} for ids in random_ids(count, length)
    ]


def trainer(folder: Path, steps: int, kind: str = "recurrent_gpt2", **changes) -> Trainer:
    settings = {
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "report_to": [],
        "save_steps": 2,
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
    }
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "overlap": 1}
    if kind == "block_recurrent":
        dropout = {"dropout": 0.1, "attention_dropout": 0.1}
    elif kind == "sru_bert":
        dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = ALL_MODELS[kind](torch.float32, **dropout).train()
    return Trainer(
        model, TrainingArguments(folder, **{**settings, **changes}), train_dataset=rows(), eval_dataset=rows()
    )


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"bf16": True, "gradient_checkpointing": True},
        {"gradient_accumulation_steps": 2},
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5.0, "gradient_checkpointing": True},
        {"kind": "block_recurrent"},
        {"kind": "block_recurrent", "gradient_checkpointing": True, "bf16": True, "gradient_accumulation_steps": 2},
        {"kind": "sru_bert"},
        {"kind": "sru_bert", "gradient_checkpointing": True, "bf16": True, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_it_trains_evaluates_and_resumes_as_if_never_interrupted(changes: dict, tmp_path) -> None:
    before = trainer(tmp_path / "new", 4, changes.get("kind", "recurrent_gpt2")).evaluate()["eval_loss"]
    whole = trainer(tmp_path / "whole", 4, **changes)
    whole.train()
    metrics = whole.evaluate()
    assert metrics["eval_loss"] < before
    first = trainer(tmp_path / "parts", 2, **changes)
    first.train()
    second = trainer(tmp_path / "parts", 4, **changes)
    second.train(resume_from_checkpoint=True)
    assert losses(whole) == losses(second)
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, second.model.get_parameter(name)), name
    assert whole.predict(rows(5)).predictions.shape == (5, 17, 61)


@pytest.mark.parametrize("kind", MODELS)
def test_label_smoothing_is_of_the_next_token(kind: str, tmp_path) -> None:
    """Trainer shifts the labels there itself, for models that it knows to be causal."""
    run = trainer(tmp_path, 1, kind, label_smoothing_factor=0.1)
    batch = {name: torch.stack([row[name] for row in rows(3)]) for name in ("input_ids", "labels")}
    found = run.compute_loss(run.model.eval(), dict(batch))
    logits = run.model(batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    nll = -logits.gather(2, batch["labels"][:, 1:, None]).mean()
    torch.testing.assert_close(found, 0.9 * nll - 0.1 * logits.mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["recurrent_gpt2", "sru_bert"])
def test_accumulated_batches_equal_one_large_batch(kind: str, tmp_path) -> None:
    """Also where the batches have different numbers of targets: the loss is divided by all of them."""
    found = []
    for settings in ({"per_device_train_batch_size": 4}, {"gradient_accumulation_steps": 4}):
        torch.manual_seed(0)
        data = rows(4)
        for number, row in enumerate(data):
            row["labels"] = row["labels"].clone()
            row["labels"][: 4 * number] = -100
        changes = {"per_device_train_batch_size": 1, "train_sampling_strategy": "sequential", **settings}
        run = trainer(tmp_path, 1, kind, save_strategy="no", max_grad_norm=0.0, optim="sgd", **changes)
        for module in run.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        run.train_dataset = data
        run.train()
        found.append({name: p.detach().clone() for name, p in run.model.named_parameters()})
    for name, parameter in found[0].items():
        torch.testing.assert_close(parameter, found[1][name], msg=lambda text, name=name: f"{name}: {text}")


def launch(kind: str, folder: Path, processes: int, length: int, rows_per_process: int) -> dict:
    out = folder / f"{processes}.json"
    root = Path(__file__).parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "PYTHONWARNINGS": "default"}
    worker = ["-m", "tests.train_worker", kind, str(out), str(length), str(rows_per_process)]
    command = [sys.executable, *worker]
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        file = root / "configs" / "accelerate" / "cpu_2_processes.yaml"
        launcher = ["accelerate.commands.launch", f"--config_file={file}", f"--main_process_port={port}"]
        command = [sys.executable, "-m", *launcher, *worker]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("kind", "length"),  # a batch of one window leaves the recurrence between windows out of the loss
    [*itertools.product([*MODELS, "recurrent_roberta"], [4, 17]), ("sru_bert", 17)],
)
def test_two_processes_train_as_one_with_twice_the_batch(kind: str, length: int, tmp_path) -> None:
    two, one = launch(kind, tmp_path, 2, length, 2), launch(kind, tmp_path, 1, length, 4)
    assert (two["processes"], one["processes"]) == (2, 1)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6)
    for name, value in one["weights"].items():
        assert two["weights"][name] == pytest.approx(value, rel=1e-6, abs=1e-8), name


def test_lora_trains_and_merges(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model(torch.float32, overlap=1).train()
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=["c_attn", "c_proj"],
        modules_to_save=["recurrence"],
        fan_in_fan_out=True,
        init_lora_weights=False,
    )
    adapted = peft.get_peft_model(model, settings)
    arguments = TrainingArguments(
        tmp_path,
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        gradient_checkpointing=True,
    )
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    run = Trainer(adapted, arguments, train_dataset=rows())
    run.train()
    changed = {name for name, p in adapted.named_parameters() if not torch.equal(p, before[name])}
    assert all("lora_" in name or "modules_to_save" in name for name in changed)
    assert any("lora_" in name for name in changed)
    assert any("recurrence.modules_to_save.default.layers.0" in name for name in changed)
    ids = random_ids(2, 17)
    expected = adapted.eval()(input_ids=ids).logits
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, expected)
    merged.save_pretrained(tmp_path / "merged")
    loaded = RecurrentGPT2LMHeadModel.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(loaded(ids).logits, expected)
    torch.testing.assert_close(read_in_pieces(loaded, ids, [3, 1, 1])[0], expected)


def test_lora_trains_and_merges_in_a_block_recurrent_model(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["qkv_proj", "o_proj"], init_lora_weights=False
    )
    adapted = peft.get_peft_model(block_model(torch.float32).train(), settings)
    ids = random_ids(2, 17)
    adapted(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_" in name)
    expected = adapted.eval()(input_ids=ids).logits
    torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, expected)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_trains_and_merges_in_an_encoder(checkpointing: bool) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(
        task_type="QUESTION_ANS",
        r=4,
        target_modules=["query", "value"],
        modules_to_save=["recurrence", "class_outputs"],
        init_lora_weights=False,
    )
    adapted = peft.get_peft_model(roberta_model(torch.float32).train(), settings)
    if checkpointing:
        adapted.gradient_checkpointing_enable()
    ids, position = random_ids(2, 17), torch.tensor([3, 9])
    adapted(input_ids=ids, start_positions=position, end_positions=position).loss.backward()
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert all(p.grad is not None for p in trained.values())
    assert any("recurrence.modules_to_save" in name for name in trained)
    expected = adapted.eval()(input_ids=ids).start_logits
    torch.testing.assert_close(adapted.merge_and_unload()(ids).start_logits, expected)


@pytest.mark.parametrize("cell", ["swish", "sru"])
def test_lora_trains_and_merges_in_the_recurrence_of_sru_bert(cell: str) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["query", "in_proj", "out_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(sru_model(torch.float32, recurrence_cell=cell).train(), settings)
    ids = random_ids(2, 17)
    adapted(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_" in name)
    expected = adapted.eval()(input_ids=ids).logits
    torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gate", ["fixed", "lstm"])
def test_a_key_is_remembered_for_more_blocks_than_attention_reaches(gate: str) -> None:
    """Two layers of windows of 8 reach 16 tokens back; the key stands 24 before the question."""
    right = remember_task(steps=300, recurrent=True, gate_type=gate)
    assert sum(right[-50:]) / 50 > 0.95
    without = remember_task(steps=200, recurrent=False, gate_type=gate)
    assert sum(without[-50:]) / 50 < 2 / NUM_KEYS


def test_a_token_is_copied_from_the_window_before() -> None:
    right = copy_task(distance=1, steps=500)
    assert sum(right[-50:]) / 50 > 0.95
    without = copy_task(distance=1, steps=150, recurrent=False)
    assert sum(without[-50:]) / 50 < 2 / NUM_KEYS  # chance is half of that


@pytest.mark.slow
def test_an_encoder_answers_by_a_fact_of_the_window_before() -> None:
    right = fact_task(distance=1, steps=800)
    assert sum(right[-50:]) / 50 > 0.95
    without = fact_task(distance=1, steps=150, recurrent=False)
    assert sum(without[-50:]) / 50 < 2 / NUM_CHOICES  # chance is half of that
