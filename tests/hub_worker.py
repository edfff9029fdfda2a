"""Loads models by their ids in a process that cannot import the package.

`python hub_worker.py PLAN OUT` reads a list of jobs and writes what each model gives to OUT.
"""

import json
import sys
from typing import Any


if __name__ == "__main__":
    sys.modules["hf_recurrence"] = None  # an import of it fails from here on

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoTokenizer, pipeline


TEXT = "It was the best of times"


def load(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What config, base model, head, tokenizer and pipeline of a repository give."""
    where = {"trust_remote_code": job["remote"], "revision": job["revision"], "token": job["token"]}
    if job["remote"]:
        where["code_revision"] = job["revision"]
    name = job["name"]
    config = AutoConfig.from_pretrained(name, **where)
    base = AutoModel.from_pretrained(name, **where).eval()
    head, report = getattr(transformers, job["auto"]).from_pretrained(name, output_loading_info=True, **where)
    assert not report["missing_keys"], report
    where.pop("code_revision", None)
    tokenizer = AutoTokenizer.from_pretrained(name, **where)
    modules = {type(part).__module__.split(".")[0] for part in (config, base, head)}
    assert modules == {"transformers_modules" if job["remote"] else "transformers"}, modules
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        outputs, hidden = head.eval()(ids), base(ids).last_hidden_state
    found = {"ids": ids, "hidden": hidden, "scores": outputs["logits" if "logits" in outputs else "start_logits"]}
    if job["task"]:
        model = base if job["task"] == "feature-extraction" else head
        result = pipeline(job["task"], model=model, tokenizer=tokenizer)(
            run_text(job["task"], tokenizer), **job["options"]
        )
        found["piped"] = torch.tensor(list(json.dumps(result).encode()))
    return found


def run_text(task: str, tokenizer: Any) -> str:
    return f"It was the {tokenizer.mask_token} of times" if task == "fill-mask" else TEXT


def main(plan: str, out: str) -> None:
    results = {}
    with open(plan) as file:
        for number, job in enumerate(json.load(file)):
            results |= {f"{number} {name}": tensor.contiguous() for name, tensor in load(job).items()}
    save_file(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
