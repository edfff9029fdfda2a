"""Small checkpoints as training leaves them: weights, code, tokenizer, recipe, metrics."""

import json
from pathlib import Path
from typing import Any

import torch

from hf_recurrence import BlockRecurrentConfig, BlockRecurrentForCausalLM
from hf_recurrence.publishing import convert
from tests.test_readme import make_bert, make_gpt2, make_roberta


TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 20
PLAIN = {"recurrent_gpt2": make_gpt2, "recurrent_roberta": make_roberta, "sru_bert": make_bert}
SMALL: dict[str, dict[str, Any]] = {
    "recurrent_gpt2": {"window_size": 8, "overlap": 2, "recurrence_hidden_size": 12},
    "recurrent_roberta": {"window_size": 24, "overlap": 2, "recurrence_hidden_size": 12},
    "sru_bert": {"recurrence_direction": "alternate"},
}
BLOCK = {
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 6,
    "intermediate_size": 16,
    "window_size": 8,
    "num_states": 4,
    "recurrent_layers": [1],
    "vocab_size": 300,
    "pad_token_id": 0,
}


def make_checkpoint(folder: Path, kind: str, metrics: bool = True) -> Path:
    """The folder, after a small model of this kind was saved to it."""
    torch.manual_seed(3)
    plain = folder.with_name(f"{folder.name}-plain")
    PLAIN.get(kind, make_gpt2)(plain, TEXT)
    if kind == "block_recurrent":
        BlockRecurrentForCausalLM(BlockRecurrentConfig(**BLOCK)).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((plain / name).read_bytes())
    else:
        convert(plain, folder, **SMALL[kind])
    if metrics:
        (folder / "metrics.json").write_text(json.dumps(make_metrics(), indent=2))
    return folder


def make_metrics() -> dict[str, Any]:
    """Records as `hf_recurrence.metrics.run_record` makes them."""
    shared = {
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "hf_recurrence": "0.1.0"},
    }
    train = {
        "command": "hf-recurrence train configs/books.yaml --data /srv/corpora/books",
        "seeds": [42],
        "data": {
            "train": {"name": "/srv/corpora/books", "sha256": "ab" * 32, "tokens": 4321},
            "validation": {"name": "/srv/corpora/books", "sha256": "ef" * 32, "tokens": 432},
        },
        "settings": {"recipe": {"model": "gpt2", "learning_rate": 5e-5, "output_dir": "/home/me/runs/one"}},
        "results": {"train_loss": 3.25, "losses": [4.0, 3.25], "train_seconds": 61.5},
    }
    evaluate = {
        "command": "hf-recurrence evaluate runs/one --data wikitext-2",
        "seeds": [],
        "data": {"name": "wikitext-2", "split": "test", "sha256": "cd" * 32, "documents": 3},
        "settings": {"metrics": ["perplexity", "state_gain"], "dtype": "float32"},
        "results": {
            "perplexity": [
                {"window_size": 8, "overlap": 2, "perplexity": 21.375, "flops_per_token": 123456789, "losses": [3.0]},
                {"window_size": 8, "overlap": 4, "perplexity": 20.25, "flops_per_token": 234567891, "tokens": 99},
            ],
            "state_gain": {"gain": 0.125, "gain_by_distance": [0.125, 0.0625]},
        },
    }
    return {"train": {**shared, **train}, "perplexity-wikitext-2": {**shared, **evaluate}}
