"""Time of a training step against plain GPT-2 on the same windows, as rows of a batch of windows.

`python -m benchmarks.training_time` times all in turn, in one process, and reports median ratios.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.common import interleaved_ratios, write_results
from hf_recurrence import RecurrentGPT2Config, RecurrentGPT2LMHeadModel


SHAPES = {
    "6 layers, 384 wide": {"n_layer": 6, "n_embd": 384, "n_head": 6},
    "GPT-2 small (12 layers, 768 wide)": {"n_layer": 12, "n_embd": 768, "n_head": 12},
}
WINDOW, WINDOWS, ROUNDS = 300, 5, 7


def main() -> None:
    results = {}
    ids = torch.randint(50257, (1, WINDOWS * WINDOW), generator=torch.Generator().manual_seed(0))
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        plain = GPT2LMHeadModel(GPT2Config(**shape)).train()
        recurrent = RecurrentGPT2LMHeadModel(RecurrentGPT2Config(**shape, window_size=WINDOW)).train()

        def step_plain(model=plain) -> None:
            # one window at a time, as the recurrent model must: the same matrix sizes and the same peak of logits
            for window in ids.split(WINDOW, 1):
                (model(window, labels=window, use_cache=False).loss / WINDOWS).backward()
            model.zero_grad()

        def step(checkpointing: bool, model=recurrent) -> None:
            (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
            model(ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad()

        runs = {
            "plain GPT-2": step_plain,
            "recurrent": lambda: step(False),
            "recurrent, window checkpointing": lambda: step(True),
        }
        results[name] = interleaved_ratios(runs, "plain GPT-2", ROUNDS)
    write_results(
        "training_time",
        {"window_size": WINDOW, "windows": WINDOWS, "rows": 1, "vocab_size": 50257, "dropout": 0.1, "rounds": ROUNDS},
        results,
        {"recurrent": "at most 1.05", "recurrent, window checkpointing": "at most 1.10, for GPT-2 small's size 1.35"},
    )


if __name__ == "__main__":
    main()
