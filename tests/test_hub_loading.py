"""Whatever way a model came to the Hub, it loads from there by its id, where the package is not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import RevisionNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoTokenizer, Trainer, TrainingArguments, pipeline

import hf_recurrence
from hf_recurrence.publishing import convert
from hf_recurrence.publishing.files import checked_files
from hf_recurrence.publishing.publication import stage_files, write_card
from hf_recurrence.publishing.upload import Remote, upload
from tests.checkpoints import make_checkpoint
from tests.common import ALL_MODELS
from tests.hub import Hub
from tests.hub_worker import TEXT, run_text


AUTOS = {
    "recurrent_gpt2": "AutoModelForCausalLM",
    "block_recurrent": "AutoModelForCausalLM",
    "recurrent_roberta": "AutoModelForQuestionAnswering",
    "sru_bert": "AutoModelForMaskedLM",
}
GREEDY = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "recurrent_gpt2": ("text-generation", GREEDY),
    "block_recurrent": ("text-generation", GREEDY),
    "recurrent_roberta": ("feature-extraction", {}),
    "sru_bert": ("fill-mask", {}),
}


def job(
    name: str, kind: str, revision: str = "main", token: Any = False, piped: bool = False, remote: bool = True
) -> dict:
    task, options = TASKS[kind] if piped else ("", {})
    facts = {"name": name, "auto": AUTOS[kind], "revision": revision, "token": token, "remote": remote}
    return {**facts, "task": task, "options": options}


def elsewhere(jobs: list[dict], hub: Hub, folder: Path, offline: bool = False) -> list[dict[str, torch.Tensor]]:
    """What a process without the package, whose cache is that of the folder alone, gives for the jobs."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "elsewhere"), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""} | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    (folder / "plan.json").write_text(json.dumps(jobs))
    worker = str(Path(__file__).parent / "hub_worker.py")
    command = [sys.executable, worker, str(folder / "plan.json"), str(folder / "out.safetensors")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, torch.Tensor]] = [{} for _ in jobs]
    for name, tensor in load_file(folder / "out.safetensors").items():
        number, part = name.split(" ")
        found[int(number)][part] = tensor
    return found


def here(folder: Path, kind: str, piped: bool = False) -> dict[str, torch.Tensor]:
    """The same of the local model."""
    model = getattr(transformers, AUTOS[kind]).from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        outputs, hidden = model(ids), model.base_model(ids).last_hidden_state
    found = {"ids": ids, "hidden": hidden, "scores": outputs["logits" if "logits" in outputs else "start_logits"]}
    if piped:
        task, options = TASKS[kind]
        part = model.base_model if task == "feature-extraction" else model
        result = pipeline(task, model=part, tokenizer=tokenizer)(run_text(task, tokenizer), **options)
        found["piped"] = torch.tensor(list(json.dumps(result).encode()))
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    if "piped" in expected:
        results = [json.loads(bytes(part.pop("piped").tolist())) for part in (found, expected)]
        assert rounded(results[0]) == rounded(results[1])
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return {name: rounded(part) for name, part in value.items()} if isinstance(value, dict) else value


def publish_unverified(folder: Path, stage: Path, repo_id: str, tag: str | None) -> None:
    write_card(folder, repo_id, "ask", None, None)
    stage_files(checked_files(folder), stage, 10**9)
    upload(stage, Remote(repo_id, False, tag))


def scale(folder: Path) -> None:
    """Other weights in the place of those there."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()  # not changed in place: other folders may share the file
    scaled = {name: 1.5 * tensor for name, tensor in tensors.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})


def train_and_push(folder: Path, out: Path) -> None:
    """Trainer's own way to the Hub, by its arguments alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    row = {"input_ids": torch.arange(20), "labels": torch.arange(20)}
    settings = {"max_steps": 1, "save_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(str(out), push_to_hub=True, hub_model_id="ann/trained", **settings)
    trainer = Trainer(model, arguments, train_dataset=[row] * 2, processing_class=tokenizer)
    trainer.train()
    trainer.push_to_hub()


def test_what_was_pushed_loads_elsewhere_by_its_id_at_a_pinned_revision_and_offline_afterwards(hub, tmp_path) -> None:
    folders = {kind: make_checkpoint(tmp_path / kind, kind) for kind in ALL_MODELS}
    jobs, expected = [], []
    for kind, folder in folders.items():
        publish_unverified(folder, tmp_path / f"{kind}-stage", f"ann/{kind}", "v1")
        jobs.append(job(f"ann/{kind}", kind, "v1", piped=True))
        expected.append(here(folder, kind, piped=True))
        scale(folder)
        publish_unverified(folder, tmp_path / f"{kind}-second", f"ann/{kind}", None)
        jobs.append(job(f"ann/{kind}", kind))
        expected.append(here(folder, kind))
        model = getattr(transformers, AUTOS[kind]).from_pretrained(folder)
        model.push_to_hub(f"lab/{kind}", private=True, max_shard_size="20KB")
        AutoTokenizer.from_pretrained(folder).push_to_hub(f"lab/{kind}")
        jobs.append(job(f"lab/{kind}", kind, token="hf_ann"))
        expected.append(expected[-1])
    train_and_push(folders["recurrent_gpt2"], tmp_path / "trained")
    jobs.append(job("ann/trained", "recurrent_gpt2", piped=True))
    expected.append(here(tmp_path / "trained", "recurrent_gpt2", piped=True))
    for kind in ("recurrent_gpt2", "recurrent_roberta"):
        convert(folders[kind], tmp_path / f"plain-{kind}", strip=True)
        jobs.append(job(str(tmp_path / f"plain-{kind}"), kind, remote=False))
        expected.append(here(tmp_path / f"plain-{kind}", kind))

    assert (
        len({file.path for file in HfApi().list_repo_tree("lab/recurrent_gpt2") if file.path.startswith("model-")}) > 1
    )
    results = elsewhere(jobs, hub, tmp_path)
    hub.broken = {".*": 0}
    offline = elsewhere(jobs[0:13:3], hub, tmp_path, offline=True)
    for found, local in zip([*results, *offline], [*expected, *expected[0:13:3]], strict=True):
        same(dict(found), dict(local))
    for first, second in zip(expected[0:12:3], expected[1:12:3], strict=True):
        assert not torch.allclose(first["hidden"], second["hidden"])


def test_a_private_repository_and_a_wrong_revision_are_refused(hub, tmp_path, monkeypatch) -> None:
    folder = make_checkpoint(tmp_path / "model", "recurrent_gpt2")
    model = hf_recurrence.RecurrentGPT2LMHeadModel.from_pretrained(folder)
    model.push_to_hub("ann/secret", private=True)
    assert AutoConfig.from_pretrained("ann/secret").window_size == 8
    with pytest.raises(OSError, match="v7 is not a valid git identifier|Revision Not Found|revision"):
        AutoConfig.from_pretrained("ann/secret", revision="v7")
    with pytest.raises(RevisionNotFoundError):
        HfApi().model_info("ann/secret", revision="v7")
    monkeypatch.delenv("HF_TOKEN")
    for cache in ("a", "b"):
        with pytest.raises(OSError, match="not a local folder and is not a valid model identifier|private|gated"):
            AutoModel.from_pretrained("ann/secret", cache_dir=tmp_path / cache, token=False)


def test_a_corrupted_file_of_weights_is_noticed(hub, tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "model", "recurrent_gpt2")
    hf_recurrence.RecurrentGPT2LMHeadModel.from_pretrained(folder).push_to_hub("ann/model")
    api = HfApi()
    file = next(f for f in api.list_repo_tree("ann/model") if f.path == "model.safetensors")
    stored = hub.object(file.lfs.sha256)
    content = stored.read_bytes()
    stored.write_bytes(content[:-9])
    with pytest.raises(OSError, match="should be of size|Consistency check"):
        AutoModel.from_pretrained("ann/model", cache_dir=tmp_path / "short")
    stored.write_bytes(content[:-9] + bytes(9))
    local = snapshot_download("ann/model", cache_dir=tmp_path / "flipped")
    report = api.verify_repo_checksums("ann/model", cache_dir=tmp_path / "flipped")
    assert [mismatch["path"] for mismatch in report.mismatches] == ["model.safetensors"]
    stored.write_bytes(content)
    assert Path(local, "model.safetensors").read_bytes() != content
