"""From a recipe to a checkpoint: `hf-recurrence train`, what it refuses, how it ends and goes on."""

import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, GPT2LMHeadModel

import hf_recurrence
from hf_recurrence import cli
from hf_recurrence.data import Lanes, TokenStore
from hf_recurrence.metrics import read_records
from hf_recurrence.training import parse_recipe, train
from hf_recurrence.training.prepare import CollateWindows, FixedMasks, byte_tokenizer, prepare
from hf_recurrence.training.recipe import KNOWN, read_keys
from tests.lanes import random_documents
from tests.test_question_answering import HOTPOT


ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
RECIPES = sorted(path.name for path in CONFIGS.glob("*.yaml"))
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. "
SMALL = {
    "recurrent_gpt2": "{n_layer: 2, n_embd: 16, n_head: 2, n_positions: 16}",
    "block_recurrent": "{hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, head_dim: 8, num_states: 4}",
    "sru_bert": "{hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 24}",
    "recurrent_roberta": "{hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 24}",
}


ELSEWHERE = """
import sys
sys.modules["hf_recurrence"] = None
from transformers import AutoModelFor{head}, AutoTokenizer
model = AutoModelFor{head}.from_pretrained({folder!r}, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained({folder!r}, trust_remote_code=True)
print(model.config.model_type, len(tokenizer) == model.config.vocab_size)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Texts, questions and a task of GLUE."""
    folder = tmp_path_factory.mktemp("data")
    for split, sizes in {"train": (900, 700, 300, 40), "valid": (300, 200)}.items():
        (folder / "texts" / split).mkdir(parents=True)
        for number, size in enumerate(sizes):
            (folder / "texts" / split / f"{number}.txt").write_text((str(number) + TEXT * 20)[:size])
    rows = [{**HOTPOT, "_id": str(number)} for number in range(6)]
    (folder / "questions").mkdir()
    (folder / "questions" / "hotpot_train_v1.1.json").write_text(json.dumps(rows))
    (folder / "questions" / "hotpot_dev.json.gz").write_bytes(gzip.compress(json.dumps(rows[:3]).encode()))
    (folder / "glue" / "RTE").mkdir(parents=True)
    lines = ["index\tsentence1\tsentence2\tlabel"]
    lines += [f"{n}\tIt was {n}.\tIt is {n}.\t{'not_' * (n % 2)}entailment" for n in range(10)]
    for name in ("train", "dev"):
        (folder / "glue" / "RTE" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def overrides(kind: str, data: Path, out: Path, /, **changes: Any) -> list[str]:
    """What makes a small CPU recipe a matter of seconds."""
    keys: dict[str, Any] = {
        "model": CONFIGS / f"{kind}_tiny.json",
        "model_settings": SMALL[kind],
        "data": data / ("questions" if kind == "recurrent_roberta" else "texts"),
        "data_cache": data / "cache",
        "output_dir": out,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "warmup_steps": 1,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    if kind != "recurrent_roberta":
        keys |= {"eval_steps": 2, "save_steps": 2}
    if kind != "block_recurrent":
        keys["tokenizer_vocab_size"] = 300
    if kind in ("recurrent_gpt2", "block_recurrent"):
        keys |= {"window_size": 8, "windows_per_sequence": 3}
    return [f"{key}={value}" for key, value in {**keys, **changes}.items()]


def run(kind: str, data: Path, out: Path, /, **changes: Any) -> dict[str, Any]:
    return train(CONFIGS / f"{kind}_cpu.yaml", overrides(kind, data, out, **changes))


def losses(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


# -- recipes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_known_keys_of_the_right_types(name: str, tmp_path) -> None:
    recipe = parse_recipe(CONFIGS / name, [f"output_dir={tmp_path}", "use_cpu=true", "bf16=false"])
    assert recipe.arguments.learning_rate < 0.1
    assert isinstance(recipe.keys["learning_rate"], float)
    if recipe.model.model.endswith(".json"):
        assert (ROOT / recipe.model.model).is_file()
    if recipe.arguments.load_best_model_at_end:
        assert recipe.arguments.save_total_limit == 2  # a killed run keeps a whole checkpoint


def test_the_papers_settings_are_in_the_recipes(tmp_path) -> None:
    for name in ("pg19", "wikitext103"):
        keys = read_keys(CONFIGS / f"recurrent_gpt2_{name}.yaml")
        assert (keys["window_size"], keys["windows_per_sequence"]) == (300, 20)
        assert (keys["warmup_steps"], keys["num_train_epochs"], keys["eval_every_tokens"]) == (100, 2, 2_000_000)
    for name, base in (("pg19", 1.0), ("arxiv", 0.5), ("github", 0.25)):
        recipe = parse_recipe(CONFIGS / f"block_recurrent_{name}.yaml", [f"output_dir={tmp_path}", "use_cpu=true"])
        assert recipe.arguments.warmup_steps == 1000
        assert recipe.model.settings["dropout"] == 0.05
        assert recipe.arguments.learning_rate * 1000**0.5 == pytest.approx(base, rel=1e-5)
    keys = read_keys(CONFIGS / "recurrent_roberta_hotpotqa.yaml")
    assert (float(keys["learning_rate"]), keys["num_train_epochs"]) == (2e-5, 4)


def test_overrides_take_the_type_of_their_key_and_null_takes_one_out(tmp_path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("model: gpt2\ntask: causal_lm\ndata: books\noutput_dir: out\noverlap: 3\nreport_to: none\n")
    recipe = parse_recipe(
        file, ["learning_rate=2e-5", "overlap=null", "model_settings={pooling: max}", "use_cpu=True", "max_steps=-1"]
    )
    assert recipe.arguments.learning_rate == recipe.keys["learning_rate"] == 2e-5
    assert (recipe.model.overlap, recipe.model.settings, recipe.arguments.max_steps) == (None, {"pooling": "max"}, -1)
    assert "overlap" not in recipe.keys


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learnig_rate=1", "`learnig_rate` is no key of a recipe; the nearest is `learning_rate`."),
        ("learning_rate=fast", "`learning_rate`: invalid float value: 'fast'."),
        ("task=translation", "`task` must be one of causal_lm, .*, got 'translation'."),
        ("overlap", "An override must be `key=value`, got 'overlap'."),
        ("model_settings=[1]", "`model_settings` must be fields of the config"),
        ("data=null", "`data` must be in the recipe"),
    ],
)
def test_a_wrong_key_or_value_is_refused(override: str, message: str, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        parse_recipe(CONFIGS / "recurrent_gpt2_cpu.yaml", [f"output_dir={tmp_path}", override])


def test_there_is_a_key_for_all_that_trainer_takes() -> None:
    assert {"learning_rate", "optim_args", "lr_scheduler_kwargs", "fsdp", "deepspeed", "windows_per_sequence"} <= set(
        KNOWN
    )


# -- runs ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", SMALL)
def test_a_recipe_ends_with_a_folder_that_loads_anywhere(kind: str, data: Path, tmp_path) -> None:
    out = tmp_path / "out"
    result = run(kind, data, out)
    assert result["status"] == "done"
    assert result["results"]["eval_loss"] > 0
    found = {path.name for path in out.iterdir()}
    assert {"model.safetensors", "config.json", f"modeling_{kind}.py", "tokenizer.json", "recipe.yaml"} <= found
    assert {"metrics.json", "trainer_state.json"} <= found
    record = read_records(out)["train"]
    assert record["versions"]["hf_recurrence"] == hf_recurrence.__version__
    assert record["data"]["train"]["documents"] == (6 if kind == "recurrent_roberta" else 4)
    assert len(record["data"]["train"]["sha256"]) == 64
    assert record["results"] == json.loads(json.dumps(result["results"]))
    assert parse_recipe(out / "recipe.yaml").keys == record["settings"]["recipe"]
    head = {"recurrent_roberta": "QuestionAnswering", "sru_bert": "MaskedLM"}.get(kind, "CausalLM")
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE.format(folder=str(out), head=head)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [kind, "True"], done.stderr


def test_plain_models_train_on_the_same_tokens_by_an_override(data: Path, tmp_path) -> None:
    run("recurrent_gpt2", data, tmp_path / "gpt2", model_type="gpt2")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
    assert type(model.config).model_type == "gpt2"
    records = [read_records(tmp_path / "gpt2")["train"]]
    run("recurrent_gpt2", data, tmp_path / "recurrent")
    records.append(read_records(tmp_path / "recurrent")["train"])
    assert records[0]["data"] == records[1]["data"]
    assert records[0]["settings"]["tokens_a_step"] == records[1]["settings"]["tokens_a_step"] == 48
    run("sru_bert", data, tmp_path / "bert", model_type="bert")
    assert type(BertForMaskedLM.from_pretrained(tmp_path / "bert").config) is BertConfig


def test_windows_of_plain_models_have_the_targets_of_the_lanes() -> None:
    lanes = Lanes(random_documents([23, 7, 12]), 2, 6, shuffle=False)
    segments = [segment for segment, _ in zip(lanes, range(4), strict=False)]
    batch = CollateWindows(3)(segments)
    assert batch["input_ids"].shape == (8, 3)
    for key, name in (("input_ids", "input_ids"), ("shift_labels", "targets")):
        expected = torch.cat([torch.as_tensor(getattr(segment, name)) for segment in segments])
        assert torch.equal(batch[key].flatten(), expected)
    empty = CollateWindows(3)([segments[0]._replace(targets=segments[0].targets * 0 - 100)])
    assert (empty["labels"] != -100).sum() == 1  # Trainer does not divide by 0
    assert (empty["shift_labels"] == -100).all()


def test_a_checkpoint_is_fine_tuned_on_a_task_of_glue(data: Path, tmp_path) -> None:
    run("sru_bert", data, tmp_path / "base")
    keys = {"model": tmp_path / "base", "data": data / "glue", "glue_task": "rte", "output_dir": tmp_path / "rte"}
    keys |= {"num_train_epochs": 1, "per_device_train_batch_size": 5, "use_cpu": True, "report_to": "none"}
    result = train(CONFIGS / "sru_bert_glue.yaml", [f"{key}={value}" for key, value in keys.items()])
    assert 0 <= result["results"]["eval_accuracy"] <= 1
    model = hf_recurrence.SRUBertForSequenceClassification.from_pretrained(tmp_path / "rte")
    assert model.config.num_labels == 2


def test_a_plain_checkpoint_is_made_recurrent(data: Path, tmp_path) -> None:
    run("recurrent_gpt2", data, tmp_path / "plain", model_type="gpt2")
    keys = {"model": tmp_path / "plain", "model_type": "recurrent_gpt2", "tokenizer_vocab_size": "null"}
    run("recurrent_gpt2", data, tmp_path / "made", model_settings="{pooling: max}", overlap=2, **keys)
    config = hf_recurrence.RecurrentGPT2Config.from_pretrained(tmp_path / "made")
    assert (config.pooling, config.overlap, config.window_size) == ("max", 2, 8)


def test_what_it_will_do_is_told_and_a_dry_run_writes_nothing(data: Path, tmp_path, capsys) -> None:
    words = ["train", str(CONFIGS / "recurrent_gpt2_cpu.yaml"), *overrides("recurrent_gpt2", data, tmp_path / "out")]
    assert cli.main([*words, "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)
    assert (plan["status"], plan["steps"], plan["tokens_a_step"]) == ("dry run", 4, 48)
    assert plan["parameters"] == plan["memory_bytes"]["weights"] // 4
    for text in ("4 documents", "words", "tokens", "parameters", "4 steps", "memory of a process", "checkpoints"):
        assert text in err
    assert list((tmp_path / "out").iterdir()) == []
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert "eval_loss" in out
    assert "{'loss'" not in out  # logs go to stderr


def test_the_best_is_kept_and_training_stops_early(data: Path, tmp_path) -> None:
    changes = {"learning_rate": 30.0, "lr_scheduler_type": "constant", "max_steps": 40, "early_stopping_patience": 2}
    result = run("recurrent_gpt2", data, tmp_path / "out", **changes)["results"]
    assert result["steps"] < 40
    assert result["best_step"] < result["steps"]
    assert result["eval_loss"] == pytest.approx(result["best_metric"], rel=1e-6)


def test_evaluations_come_by_tokens(data: Path, tmp_path) -> None:
    run("recurrent_gpt2", data, tmp_path / "out", eval_every_tokens=100, max_steps=5)
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "eval_loss" in entry][:2] == [2, 4]  # of 48 tokens each


def test_tensorboard_gets_the_losses(data: Path, tmp_path, monkeypatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("block_recurrent", data, tmp_path / "out", report_to="tensorboard")
    folder = next((tmp_path / "out").rglob("events.out.tfevents*")).parent
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]


def test_adafactor_scales_its_steps_by_the_parameters(data: Path, tmp_path) -> None:
    from hf_recurrence.training.train import StopWhenTold, make_trainer

    for changes, scaled in (({}, True), ({"optim_args": "null"}, False)):
        recipe = parse_recipe(
            CONFIGS / "block_recurrent_cpu.yaml", overrides("block_recurrent", data, tmp_path / "out", **changes)
        )
        trainer = make_trainer(recipe, prepare(recipe), StopWhenTold())
        trainer.create_optimizer_and_scheduler(2000)
        groups = trainer.optimizer.param_groups
        assert all(group["scale_parameter"] is scaled for group in groups)
        assert all(group["relative_step"] is False for group in groups)
    rates = []
    recipe.arguments.warmup_steps = 1000
    trainer = make_trainer(recipe, prepare(recipe), StopWhenTold())
    trainer.create_optimizer_and_scheduler(500_000)
    for step in (500, 1000, 4000):
        rates.append(trainer.lr_scheduler.lr_lambdas[0](step) * 1.0 / 1000**0.5)
    # lr * min(step / 1000, 1) * max(step, 1000)^-0.5 with lr = 1.0
    assert rates == pytest.approx([0.5 / 1000**0.5, 1000**-0.5, 4000**-0.5])


def test_masks_of_evaluations_stay_and_those_of_training_change(data: Path, tmp_path) -> None:
    recipe = parse_recipe(CONFIGS / "sru_bert_cpu.yaml", overrides("sru_bert", data, tmp_path / "out"))
    ready = prepare(recipe)
    assert isinstance(ready.evaluation, FixedMasks)
    state = torch.get_rng_state()
    first, second = (ready.collator([ready.evaluation[0], ready.evaluation[1]]) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    for name in ("input_ids", "labels", "attention_mask"):
        assert torch.equal(first[name], second[name])
    rows = [ready.train[number] for number in range(4)]
    masks = [ready.collator(batch)["labels"] != -100 for batch in (rows, rows, rows[::-1])]
    assert torch.equal(masks[0], masks[1])  # after a resume too
    assert not torch.equal(masks[0], masks[2].flip(0))  # but not in another batch


def test_the_tokens_of_bytes_are_the_bytes(tmp_path) -> None:
    text = "Ünï ≠ \x00\n\t\x7f " + "".join(map(chr, range(300)))
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert one(text)["input_ids"] == list(text.encode())
        assert one.decode(one(text)["input_ids"]) == text


# -- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("recurrent_gpt2", {"data": "/no/such/folder"}, "`source` must be a file, a folder"),
        ("recurrent_gpt2", {"data": "EMPTY"}, "`source` must have .txt"),
        ("recurrent_gpt2", {"data": "BLANK"}, "`data` must have texts for 'train'"),
        ("recurrent_gpt2", {"data": "UNSPLIT"}, "`data` must have other documents for validation"),
        ("recurrent_gpt2", {"per_device_train_batch_size": 64}, "`num_lanes` must be at most .* got 64"),
        ("recurrent_gpt2", {"task": "masked_lm"}, "`task` must be one that recurrent_gpt2 is for"),
        ("recurrent_gpt2", {"model_type": "gpt2", "overlap": 2}, "`overlap` must be 0 for gpt2"),
        ("recurrent_gpt2", {"label_smoothing_factor": 0.1}, "`label_smoothing_factor` must be 0"),
        ("recurrent_gpt2", {"segment_length": 24}, "give one of them"),
        ("recurrent_gpt2", {"model": "nothing.json"}, "`model` must be a config's file"),
        ("recurrent_gpt2", {"model_settings": "{n_layers: 2}"}, "got 'n_layers', nearest 'n_layer'"),
        ("recurrent_gpt2", {"tokenizer_vocab_size": "null"}, "`tokenizer` must be a folder"),
        ("recurrent_gpt2", {"load_best_model_at_end": False}, "`early_stopping_patience` needs"),
        (
            "block_recurrent",
            {"model_settings": "{vocab_size: 100}"},
            "`tokenizer` must have no more tokens .* got 256",
        ),
        ("block_recurrent", {"optim_args": "beta3=1"}, "`optim_args` of adafactor"),
        ("sru_bert", {"segment_length": 4000}, "`segment_length` must be at most the model's positions"),
        ("sru_bert", {"task": "sequence_classification"}, "`glue_task` must be one of GLUE's"),
        ("recurrent_roberta", {"data": "EMPTY"}, "`data` must have a train file"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_any_work(kind: str, changes: dict, message: str, data: Path, tmp_path) -> None:
    for name in ("EMPTY", "BLANK", "UNSPLIT"):
        (tmp_path / name).mkdir()
    for split in ("train", "valid"):
        (tmp_path / "BLANK" / f"{split}.txt").write_text("")
    for number in range(4):
        (tmp_path / "UNSPLIT" / f"{number}.txt").write_text(TEXT * number)
    if changes.get("data") in ("EMPTY", "BLANK", "UNSPLIT"):
        changes = {**changes, "data": tmp_path / changes["data"]}
    with pytest.raises(ValueError, match=message):
        run(kind, data, tmp_path / "out", **changes)
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_what_accelerate_would_leave_out_silently_is_refused(data: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP needs GPUs"):
        run("block_recurrent", data, tmp_path / "out")


def test_a_folder_with_another_run_or_without_room_is_refused(data: Path, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    run("block_recurrent", data, out)
    with pytest.raises(ValueError, match="`output_dir` must be a folder without a run.*--resume"):
        run("block_recurrent", data, out)
    recipe = CONFIGS / "block_recurrent_cpu.yaml"
    with pytest.raises(ValueError, match="`window_size` must be that of the run to go on with \\(8\\), got 16"):
        train(recipe, overrides("block_recurrent", data, out, window_size=16), resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="`output_dir` must be a folder, got the file"):
        run("block_recurrent", data, tmp_path / "file")
    with pytest.raises(ValueError, match="`output_dir` must be a folder that can be written to"):
        run("block_recurrent", data, tmp_path / "file" / "inside")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match="`output_dir` must have room for checkpoints of .*, got 1 kB free"):
        run("block_recurrent", data, tmp_path / "full")
    assert not list((tmp_path / "full").iterdir())


# -- interruptions ---------------------------------------------------------------------------------------------------
def start(words: list[str], processes: int = 1, **environment: str) -> Any:
    """The verb in processes of their own."""
    command = [sys.executable, "-W", "ignore", "-m"]
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        file = CONFIGS / "accelerate" / "cpu_2_processes.yaml"
        command += ["accelerate.commands.launch", f"--config_file={file}", f"--main_process_port={port}", "-m"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, "hf_recurrence", "train", *words], env=variables, **pipes)


def recipe_words(kind: str, data: Path, out: Path, /, **changes: Any) -> list[str]:
    return [str(CONFIGS / f"{kind}_cpu.yaml"), *overrides(kind, data, out, **changes)]


def whole(process: Any) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=400)
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_says_how_to_go_on_and_loses_nothing(number, data: Path, tmp_path) -> None:
    changes = {"max_steps": 300, "eval_strategy": "no", "save_steps": 1000, "load_best_model_at_end": False}
    changes |= {"early_stopping_patience": "null", "lr_scheduler_type": "constant"}
    words = recipe_words("recurrent_gpt2", data, tmp_path / "out", **changes)
    process = start(words)
    lines = [process.stderr.readline()]
    while "'loss'" not in lines[-1]:
        assert lines[-1], "".join(lines)
        lines.append(process.stderr.readline())
    process.send_signal(number)
    code, out, err = whole(process)
    assert code == 1
    assert out == ""
    assert f"hf-recurrence train {words[0]}" in err
    assert err.rstrip().endswith("--resume")
    saved = max(int(path.name.split("-")[1]) for path in (tmp_path / "out").glob("checkpoint-*"))
    assert saved < 300
    steps = saved + 3
    ended = [f"max_steps={steps}"]
    train(words[0], [*words[1:], *ended], resume=True)
    run("recurrent_gpt2", data, tmp_path / "never", **{**changes, "max_steps": steps})
    assert losses(tmp_path / "out") == losses(tmp_path / "never")
    models = [
        hf_recurrence.RecurrentGPT2LMHeadModel.from_pretrained(tmp_path / name).state_dict()
        for name in ("out", "never")
    ]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.parametrize("kind", ["sru_bert", "recurrent_roberta"])
def test_runs_without_lanes_go_on_too(kind: str, data: Path, tmp_path) -> None:
    common = {"lr_scheduler_type": "constant", "max_steps": 6, "eval_strategy": "no", "save_strategy": "steps"}
    common |= {"save_steps": 3, "load_best_model_at_end": False, "num_train_epochs": 9}
    if kind == "sru_bert":
        common["early_stopping_patience"] = "null"
    run(kind, data, tmp_path / "whole", **common)
    run(kind, data, tmp_path / "parts", **{**common, "max_steps": 3})
    shutil.copytree(tmp_path / "parts" / "checkpoint-3", tmp_path / "parts" / "checkpoint-5")
    (tmp_path / "parts" / "checkpoint-5" / "whole_0_of_1").unlink()  # killed while it was written
    train(CONFIGS / f"{kind}_cpu.yaml", overrides(kind, data, tmp_path / "parts", **common), resume=True)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


# -- several processes -----------------------------------------------------------------------------------------------
def test_two_processes_have_the_losses_of_one_with_twice_the_batch(data: Path, tmp_path) -> None:
    # float32: the order of sums differs; without dropout, whose random numbers are each process's own
    shape = SMALL["recurrent_gpt2"].replace("}", ", resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}")
    common = {
        "model_settings": shape,
        "optim": "sgd",
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "save_strategy": "no",
    }
    common["early_stopping_patience"] = "null"
    words = recipe_words("recurrent_gpt2", data, tmp_path / "two", per_device_train_batch_size=1, **common)
    code, out, err = whole(start([*words, "--json"], 2))
    assert code == 0, err[-3000:]
    result = json.loads(out)  # of one process alone
    run("recurrent_gpt2", data, tmp_path / "one", **common)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    record = read_records(tmp_path / "two")["train"]
    assert record["settings"]["processes"] == 2
    assert result["results"]["steps"] == 4
    models = [
        hf_recurrence.RecurrentGPT2LMHeadModel.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two")
    ]
    for name in models[0]:
        torch.testing.assert_close(models[0][name], models[1][name], rtol=1e-4, atol=1e-5)


KILLER = """
import os, signal, sys
from transformers import Trainer
moment, at = os.environ["KILL"].split()
name = {"step": "training_step", "save": "_save_optimizer_and_scheduler"}[moment]
usual, count = getattr(Trainer, name), [0]
def killed(self, *args, **kwargs):
    count[0] += 1
    if count[0] == int(at) and os.environ.get("RANK", "0") == os.environ.get("KILL_RANK", "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    return usual(self, *args, **kwargs)
setattr(Trainer, name, killed)
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("moment", ["step 4", "save 2"])
@pytest.mark.parametrize("kind", ["recurrent_gpt2", "sru_bert"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    kind: str, moment: str, processes: int, data: Path, tmp_path
) -> None:
    common = {"lr_scheduler_type": "constant", "max_steps": 6, "eval_strategy": "no", "save_steps": 2}
    common |= {"load_best_model_at_end": False, "early_stopping_patience": "null"}
    if kind == "recurrent_gpt2":
        common["per_device_train_batch_size"] = 2 // processes
    (tmp_path / "sitecustomize.py").write_text(KILLER)
    expected = start(recipe_words(kind, data, tmp_path / "never", **common), processes)
    assert whole(expected)[0] == 0
    words = recipe_words(kind, data, tmp_path / "out", **common)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    killed = start(
        words, processes, KILL=moment, KILL_RANK=str(processes - 1) if "step" in moment else "0", PYTHONPATH=paths
    )
    assert whole(killed)[0] != 0
    assert not (tmp_path / "out" / "metrics.json").exists()
    code, _, err = whole(start([*words, "--resume"], processes))
    assert code == 0, err[-3000:]
    assert "Resuming from" in err
    assert "checkpoint-2" in err
    assert losses(tmp_path / "out") == losses(tmp_path / "never")


BUILD = """
import sys, time
from hf_recurrence.data import TokenStore, documents
texts = (time.sleep(0.02 * len(sys.argv[3:])) or text for text in documents(sys.argv[1]))
TokenStore.build(sys.argv[2], texts, shard_characters=4000)
"""


def test_tokenising_that_was_killed_goes_on_to_the_same_tokens(tmp_path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(60):
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(f"{number} " + TEXT * (10 + number))
    command = [sys.executable, "-W", "ignore", "-c", BUILD, str(tmp_path / "texts")]
    process = subprocess.Popen([*command, str(tmp_path / "killed"), "slowly"])
    while len(list((tmp_path / "killed").glob("*.json"))) < 6:
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "store.json").exists()
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("0*.arrow")}
    for name in ("killed", "whole"):
        assert subprocess.run([*command, str(tmp_path / name)]).returncode == 0
    stores = [TokenStore(tmp_path / name) for name in ("killed", "whole")]
    assert stores[0].manifest == stores[1].manifest
    for number in range(len(stores[0])):
        assert (stores[0].read(number, 0, 10**9) == stores[1].read(number, 0, 10**9)).all()
    kept = {name for name, at in times.items() if (tmp_path / "killed" / name).stat().st_mtime_ns == at}
    assert len(kept) >= 5  # only the rest was tokenised again
