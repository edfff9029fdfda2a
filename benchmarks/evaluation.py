"""Evaluation against a bare loop of forward passes, and what overlaps cost.

`python -m benchmarks.evaluation` times `evaluate_perplexity` and the loop in turn over the same documents, for the
plain and the recurrent GPT-2, and evaluation with overlaps against that without. `... smoke` only
tries it out.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.common import interleaved_ratios, write_results
from benchmarks.pipeline import make_tokenizer, texts
from hf_recurrence import RecurrentGPT2Config, RecurrentGPT2LMHeadModel
from hf_recurrence.data import TokenStore
from hf_recurrence.evaluation import evaluate_perplexity, flops_per_token


SHAPE = {"n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 8192, "n_positions": 1024}
WINDOW, ROWS, LENGTH, ROUNDS = 300, 4, 3001, 5
OVERLAPS = (0, 75, 150)


class Pieces:
    """The first tokens of documents."""

    def __init__(self, store: TokenStore, count: int, length: int) -> None:
        self.store, self.lengths = store, store.lengths[:count].clip(max=length)
        self.num_words = self.num_bytes = self.lengths

    def read(self, document: int, start: int, stop: int) -> Any:
        return self.store.read(document, start, min(stop, int(self.lengths[document])))


@torch.no_grad()
def bare(model: Any, ids: torch.Tensor) -> float:
    """The loss of rows [B, T + 1] by a plain loop of forward passes over windows."""
    cache, total = None, 0.0
    for start in range(0, ids.shape[1] - 1, WINDOW):
        inputs = ids[:, start : min(start + WINDOW, ids.shape[1] - 1)]
        targets = ids[:, start + 1 : start + inputs.shape[1] + 1]
        if model.config.model_type == "gpt2":
            outputs = model(inputs, use_cache=False)
        else:
            outputs = model(inputs, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
        total += F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    return total


def measure(shape: dict[str, Any], length: int, rounds: int) -> dict[str, Any]:
    """Ratios of times, and of FLOPs, of evaluation."""
    torch.manual_seed(0)
    models = {
        "plain": GPT2LMHeadModel(GPT2Config(**shape)).eval(),
        "recurrent": RecurrentGPT2LMHeadModel(RecurrentGPT2Config(**shape, window_size=WINDOW)).eval(),
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokens = Pieces(TokenStore.build(folder, texts(ROWS), make_tokenizer()), ROWS, length)
        ids = torch.stack([torch.from_numpy(tokens.read(row, 0, length).astype("int64")) for row in range(ROWS)])
        for name, model in models.items():
            settings = {"window_size": WINDOW, "batch_size": ROWS, "progress": False}
            loss = evaluate_perplexity(model, tokens, **settings)["losses"]
            assert abs(sum(loss) / bare(model, ids) - 1) < 1e-5, "the two must measure the same"

            def evaluation(overlap: int, model: Any = model, settings: dict[str, Any] = settings) -> Any:
                return lambda: evaluate_perplexity(model, tokens, overlap=overlap, **settings)

            runs = {"bare": lambda model=model: bare(model, ids)}
            runs |= {f"overlap {overlap}": evaluation(overlap) for overlap in OVERLAPS}
            times = interleaved_ratios(runs, "overlap 0", rounds)
            flops = {
                overlap: flops_per_token(model.config, WINDOW, overlap, logits=True, masked=True)
                / flops_per_token(model.config, WINDOW, 0, logits=True, masked=True)
                for overlap in OVERLAPS
            }
            found[name] = {
                "evaluation_over_bare_tokens_per_second": times["bare"]["ratio"],
                "tokens_per_second": ROWS * (length - 1) / times["overlap 0"]["seconds"],
                "time_over_that_without_overlap": {n: times[f"overlap {n}"]["ratio"] for n in OVERLAPS},
                "windows_over_those_without_overlap": {n: WINDOW / (WINDOW - n) for n in OVERLAPS},
                "flops_over_those_without_overlap": flops,
            }
    return found


def main() -> None:
    if sys.argv[1:] == ["smoke"]:
        small = {**SHAPE, "n_layer": 2, "n_embd": 128, "n_head": 2}
        print(json.dumps(measure(small, 1501, 2), indent=2))
        return
    settings = {**SHAPE, "window_size": WINDOW, "rows": ROWS, "tokens_of_a_row": LENGTH, "rounds": ROUNDS}
    targets = {
        "evaluation_over_bare_tokens_per_second": "at least 0.95",
        "time_over_that_without_overlap": "as T / (T - O), less what logits take, which are made once a token",
    }
    write_results(Path(__file__).stem, settings, measure(SHAPE, LENGTH, ROUNDS), targets)


if __name__ == "__main__":
    main()
