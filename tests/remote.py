"""Saving a model, loading it as remote code elsewhere, and comparing the two."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.common import MODELS, block_model, random_ids, roberta_model, sru_model, tiny_model


GREEDY = {"max_new_tokens": 17, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def save_with_inputs(folder: Path, kind: str = "recurrent_gpt2") -> dict[str, torch.Tensor]:
    """Saves a small model and inputs for it; what it gives here comes back."""
    if kind == "recurrent_roberta":
        return save_encoder(folder)
    model = block_model(torch.float32)
    if kind == "sru_bert":
        model = sru_model(torch.float32, recurrence_direction="alternate", recurrence_steps=2)
    if kind == "recurrent_gpt2":
        model = tiny_model(torch.float32, overlap=2, pooling="attention")
    torch.manual_seed(2)
    ids, mask = random_ids(2, 13), torch.ones(2, 13, dtype=torch.long)
    mask[1, :4] = 0
    model.save_pretrained(folder)
    save_file({"ids": ids, "mask": mask}, folder / "inputs.st")
    if kind not in MODELS:
        with torch.no_grad():
            expected = {
                "logits": model(ids, attention_mask=mask).logits,
                "hidden": model.base_model(ids, attention_mask=mask).last_hidden_state,
                "loss": model(ids, labels=ids).loss,
            }
        model.train()(ids, attention_mask=mask, labels=ids).loss.backward()
        return expected | {"gradient": model.get_input_embeddings().weight.grad}
    with torch.no_grad():
        first = model(ids, attention_mask=mask, use_cache=True)
        expected = {
            "logits": first.logits,
            "continued": model(ids, past_key_values=first.past_key_values).logits,
            "hidden": model.base_model(ids, attention_mask=mask).last_hidden_state,
            "loss": model(ids, labels=ids).loss,
            "greedy": model.generate(ids, attention_mask=mask, **GREEDY),
            "beams": model.generate(ids, attention_mask=mask, num_beams=3, **GREEDY),
            "only_new": model.generate(ids[:, :5], past_key_values=first.past_key_values, **GREEDY),
            "lookup": model.generate(ids[:1], **{**GREEDY, "eos_token_id": 2}),
        }
    model.train()(ids, labels=ids).loss.backward()
    return expected | {"gradient": model.get_input_embeddings().weight.grad}


def save_encoder(folder: Path) -> dict[str, torch.Tensor]:
    """The same for question answering."""
    model = roberta_model(torch.float32, overlap=2, pooling="attention")
    torch.manual_seed(2)
    ids, mask = random_ids(2, 13), torch.ones(2, 13, dtype=torch.long)
    mask[1, :4] = 0
    answer = {"start_positions": torch.tensor([5, 6]), "end_positions": torch.tensor([7, 11])}
    model.save_pretrained(folder)
    save_file({"ids": ids, "mask": mask, **answer}, folder / "inputs.st")
    with torch.no_grad():
        outputs = model(ids, attention_mask=mask, **answer)
        expected = {name: outputs[name] for name in ("loss", "start_logits", "end_logits", "class_logits")}
        expected["hidden"] = model.base_model(ids, attention_mask=mask).last_hidden_state
        expected["cut"] = model(ids[:, None, :5]).start_logits
    model.train()(ids, attention_mask=mask, **answer).loss.backward()
    return expected | {"gradient": model.get_input_embeddings().weight.grad}


def load_elsewhere(
    folder: Path, out: Path, packages: Path | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a process without the package gives for a saved folder, under the transformers in `packages` if given."""
    environment = {**os.environ, "HF_HOME": str(out.parent / "hf_home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = "" if packages is None else str(packages)
    worker = Path(__file__).parent / "remote_worker.py"
    command = [sys.executable, str(worker), str(folder), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr[-5000:])
    return json.loads(done.stdout.splitlines()[-1]), load_file(out)


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Tokens must be the same; float32 sums may differ in their last bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda text, name=name: f"{name}: {text}")
