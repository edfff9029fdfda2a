"""Time of a training step against plain GPT-2 on the same windows, which there are the rows of a batch.

`python -m benchmarks.training_time` times all in turn, in one process, and reports median ratios.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.common import interleaved_ratios, write_results
from hf_recurrence import RecurrentGPT2Config, RecurrentGPT2LMHeadModel


SHAPES = {
    "6 layers, 384 wide": {"n_layer": 6, "n_embd": 384, "n_head": 6},
    "GPT-2 small's 12 layers, 768 wide": {"n_layer": 12, "n_embd": 768, "n_head": 12},
}
WINDOW, WINDOWS, ROUNDS = 300, 5, 7
BASE = "plain GPT-2"


def measure(shape: dict[str, int], dropout: float, ids: torch.Tensor) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    settings = {**shape, "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    plain = GPT2LMHeadModel(GPT2Config(**settings)).train()
    recurrent = RecurrentGPT2LMHeadModel(RecurrentGPT2Config(**settings, window_size=WINDOW)).train()
    rows = ids.view(WINDOWS, WINDOW)

    def step(model: torch.nn.Module, inputs: torch.Tensor) -> None:
        model(inputs, labels=inputs, use_cache=False).loss.backward()
        model.zero_grad()

    def checkpointed() -> None:
        recurrent.gradient_checkpointing_enable()
        step(recurrent, ids)
        recurrent.gradient_checkpointing_disable()

    runs = {
        BASE: lambda: step(plain, rows),
        "recurrent": lambda: step(recurrent, ids),
        "recurrent, window checkpointing": checkpointed,
    }
    return interleaved_ratios(runs, BASE, ROUNDS)


def main() -> None:
    ids = torch.randint(50257, (1, WINDOWS * WINDOW), generator=torch.Generator().manual_seed(0))
    results = {
        f"{name}, dropout {dropout}": measure(shape, dropout, ids)
        for name, shape in SHAPES.items()
        for dropout in (0.0, 0.1)
    }
    write_results(
        "training_time",
        {"window_size": WINDOW, "windows": WINDOWS, "rows": 1, "vocab_size": 50257, "rounds": ROUNDS, "seed": 0},
        results,
        {"recurrent": "at most 1.05", "recurrent, window checkpointing": "at most 1.10, for GPT-2 small's size 1.35"},
    )


if __name__ == "__main__":
    main()
