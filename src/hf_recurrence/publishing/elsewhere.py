# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""What a saved model gives for fixed inputs. Run as a script it is that of a process which cannot import the package.

`python elsewhere.py FOLDER OUT` writes OUT.safetensors and OUT.json. It imports torch and transformers alone.
"""

import json
import os
import sys
from typing import Any


if __name__ == "__main__":
    sys.modules["hf_recurrence"] = None  # type: ignore[assignment]  # an import of it fails from here on
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [path for path in sys.path if os.path.abspath(path or ".") != here]

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer


TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom."
QUESTION = "What was it?"
NUM_NEW = 16


def outcome(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors (logits, hidden states, generated tokens) and facts (texts, answers, keys that were missing)."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    head = config.architectures[0]
    auto = next(name for name, target in config.auto_map.items() if target.endswith(f".{head}"))
    model, report = getattr(transformers, auto).from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    model.eval()
    keys = {name: sorted(map(str, report[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    facts: dict[str, Any] = {"head": type(model).__name__, "module": type(model).__module__, **keys}
    tensors = forward(model)
    if model.can_generate():
        tensors["generated"] = generated(model, tensors["input_ids"][:1])
    if os.path.exists(os.path.join(folder, "tokenizer_config.json")):
        facts |= of_text(model, AutoTokenizer.from_pretrained(folder, trust_remote_code=True))
    return tensors, facts


def forward(model: Any) -> dict[str, torch.Tensor]:
    """All tensors that come out for two rows, one of them padded, of more than two windows."""
    config = model.config
    length = (
        2 * config.window_size + 3 if "window_size" in config.to_dict() else min(64, config.max_position_embeddings)
    )
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (2, length), generator=numbers)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    with torch.no_grad():
        outputs = model(ids, attention_mask=mask)
    found = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    return {"input_ids": ids, **found}


def generated(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The tokens that greedy decoding adds."""
    settings = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, ids.shape[1] :]


def of_text(model: Any, tokenizer: Any) -> dict[str, Any]:
    """What the tokenizer makes of a text, and what the model then says: more of it, an answer, or masked words."""
    most = max(tokenizer.get_vocab().values())
    facts: dict[str, Any] = {"largest_id": most, "vocab_size": model.config.vocab_size}
    ids = tokenizer(TEXT)["input_ids"]
    facts["text_ids"] = ids
    if most >= model.config.vocab_size or not ids:
        return facts
    if model.can_generate():
        facts["generated_text"] = tokenizer.decode(generated(model, torch.tensor([ids]))[0])
    elif callable(getattr(type(model), "answer", None)):
        facts["answer"] = model.answer(tokenizer, QUESTION, TEXT)
    elif tokenizer.mask_token_id is not None:
        middle = len(ids) // 2
        masked = torch.tensor([[*ids[:middle], tokenizer.mask_token_id, *ids[middle + 1 :]]])
        with torch.no_grad():
            outputs = model(masked)
        if type(model).__name__.endswith("ForMaskedLM"):
            facts["masked_word"] = tokenizer.decode(outputs.logits[0, middle].argmax())
    return facts


if __name__ == "__main__":
    found, told = outcome(sys.argv[1])
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, f"{sys.argv[2]}.safetensors")
    with open(f"{sys.argv[2]}.json", "w", encoding="utf-8") as file:
        json.dump(told, file)
