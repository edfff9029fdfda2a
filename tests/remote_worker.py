"""Loads a saved folder as remote code in a process that cannot import the package.

`python remote_worker.py FOLDER OUT` runs under any supported transformers and writes what the model gives to OUT.
"""

import json
import sys
from functools import partial
from typing import Any


sys.modules["hf_recurrence"] = None  # an import of it fails from here on

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
)


def main(folder: str, out: str) -> None:
    inputs = load_file(f"{folder}/inputs.st")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    auto, run = AutoModelForQuestionAnswering, answer
    if "AutoModelForCausalLM" in config.auto_map:
        auto, run = AutoModelForCausalLM, partial(generate, out=out)
    elif "AutoModelForMaskedLM" in config.auto_map:
        auto, run = AutoModelForMaskedLM, fill_masks
    head = auto.from_pretrained(folder, trust_remote_code=True).eval()
    base = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    for part in (config, head, base):
        assert type(part).__module__.startswith("transformers_modules."), type(part).__module__
    results = run(head, base, inputs)
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, out)
    print(json.dumps({"transformers": transformers.__version__, "config": config.to_dict()}, default=str))


def answer(head: Any, base: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a model for question answering gives."""
    ids, mask = inputs.pop("ids"), inputs.pop("mask")
    with torch.no_grad():
        outputs = head(ids, attention_mask=mask, **inputs)
        results = {name: outputs[name] for name in ("loss", "start_logits", "end_logits", "class_logits")}
        results["hidden"] = base(ids, attention_mask=mask).last_hidden_state
        results["cut"] = head(ids[:, None, :5]).start_logits
    head.train()
    head.gradient_checkpointing_enable()
    head(ids, attention_mask=mask, **inputs).loss.backward()
    return results | {"gradient": head.get_input_embeddings().weight.grad}


def fill_masks(head: Any, base: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a masked language model gives."""
    ids, mask = inputs["ids"], inputs["mask"]
    with torch.no_grad():
        outputs = head(ids, attention_mask=mask, output_hidden_states=True)
        assert len(outputs.hidden_states) == head.config.num_hidden_layers + 1
        results = {
            "logits": outputs.logits,
            "hidden": base(ids, attention_mask=mask).last_hidden_state,
            "loss": head(ids, labels=ids).loss,
        }
    head.train()
    head.gradient_checkpointing_enable()
    head(ids, labels=ids, attention_mask=mask).loss.backward()
    return results | {"gradient": head.get_input_embeddings().weight.grad}


def generate(head: Any, base: Any, inputs: dict[str, torch.Tensor], out: str) -> dict[str, torch.Tensor]:
    """What a causal language model gives."""
    greedy = {"max_new_tokens": 17, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids, mask = inputs["ids"], inputs["mask"]
    with torch.no_grad():
        first = head(ids, attention_mask=mask, use_cache=True)
        first.past_key_values.save(f"{out}.cache")
        cache = type(first.past_key_values).load(f"{out}.cache")
        results = {
            "logits": first.logits,
            "continued": head(ids, past_key_values=cache).logits,
            "hidden": base(ids, attention_mask=mask).last_hidden_state,
            "loss": head(ids, labels=ids).loss,
            "greedy": head.generate(ids, attention_mask=mask, **greedy),
            "beams": head.generate(ids, attention_mask=mask, num_beams=3, **greedy),
            "only_new": head.generate(ids[:, :5], past_key_values=cache, **greedy),
            "lookup": head.generate(ids[:1], prompt_lookup_num_tokens=3, **{**greedy, "eos_token_id": 2})[
                :, : ids.shape[1] + 17
            ],
        }
    head.train()
    head.gradient_checkpointing_enable()
    head(ids, labels=ids).loss.backward()
    return results | {"gradient": head.get_input_embeddings().weight.grad}


if __name__ == "__main__":
    main(*sys.argv[1:])
