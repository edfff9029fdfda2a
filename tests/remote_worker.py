"""Loads a saved folder as remote code in a process that cannot import the package.

`python remote_worker.py FOLDER OUT` runs under any supported transformers and writes what the model gives to OUT.
"""

import json
import sys


sys.modules["hf_recurrence"] = None  # an import of it fails from here on

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM


def main(folder: str, out: str) -> None:
    inputs = load_file(f"{folder}/inputs.st")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    causal = "AutoModelForCausalLM" in config.auto_map
    auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    head = auto.from_pretrained(folder, trust_remote_code=True).eval()
    base = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    for part in (config, head, base):
        assert type(part).__module__.startswith("transformers_modules."), type(part).__module__
    ids, mask = inputs["ids"], inputs["mask"]
    results = run_causal(head, base, ids, mask, out) if causal else run_masked(head, base, ids, mask)
    head.train()
    head.gradient_checkpointing_enable()
    head(ids, labels=ids, **({} if causal else {"attention_mask": mask})).loss.backward()
    results["gradient"] = head.get_input_embeddings().weight.grad
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, out)
    print(json.dumps({"transformers": transformers.__version__, "config": config.to_dict()}, default=str))


@torch.no_grad()
def run_masked(head, base, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    outputs = head(ids, attention_mask=mask, output_hidden_states=True)
    assert len(outputs.hidden_states) == head.config.num_hidden_layers + 1
    return {
        "logits": outputs.logits,
        "hidden": base(ids, attention_mask=mask).last_hidden_state,
        "loss": head(ids, labels=ids).loss,
    }


def run_causal(head, base, ids: torch.Tensor, mask: torch.Tensor, out: str) -> dict[str, torch.Tensor]:
    greedy = {"max_new_tokens": 17, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
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
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
