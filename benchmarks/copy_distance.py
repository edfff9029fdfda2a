"""Over how many windows a token is copied: shown somewhere in a window of 8, asked for `distance` windows later.

`python -m benchmarks.copy_distance` trains small RecurrentGPT2 models from scratch, about ten minutes.
"""

import sys
from collections.abc import Callable

import torch

from benchmarks.common import write_results
from hf_recurrence import (
    BlockRecurrentConfig,
    BlockRecurrentForCausalLM,
    RecurrentGPT2Config,
    RecurrentGPT2LMHeadModel,
)


NUM_KEYS, WINDOW, ROWS, LEARNING_RATE = 16, 8, 64, 5e-4
DISTANCES, STEPS, SEEDS = (1, 2, 3), 1500, (0, 1, 2)


def copy_task(distance: int, steps: int, recurrent: bool = True, seed: int = 0) -> list[float]:
    """The share of right answers at each step; without recurrence only the window of the question is given."""
    torch.manual_seed(seed)
    first_noise = 3 + NUM_KEYS
    config = RecurrentGPT2Config(
        vocab_size=first_noise + NUM_KEYS,
        n_positions=WINDOW,
        window_size=WINDOW,
        n_embd=64,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = RecurrentGPT2LMHeadModel(config).train()

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(first_noise, config.vocab_size, (ROWS, WINDOW * (distance + 1)))
        key = torch.randint(3, first_noise, (ROWS,))
        ids[torch.arange(ROWS), torch.randint(0, WINDOW, (ROWS,))] = key
        question = WINDOW * distance
        ids[:, question], ids[:, question + 1] = 1, key
        return (ids if recurrent else ids[:, question:]), key

    return train(model, batch, steps, question=WINDOW * distance if recurrent else 0)


def remember_task(
    steps: int, recurrent: bool = True, distance: int = 3, seed: int = 0, **settings: str
) -> list[float]:
    """The same for a block-recurrent model of two layers, whose attention reaches two windows back by itself."""
    torch.manual_seed(seed)
    first_noise = 3 + NUM_KEYS
    config = BlockRecurrentConfig(
        vocab_size=first_noise + NUM_KEYS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=16,
        intermediate_size=128,
        window_size=WINDOW,
        num_states=8,
        recurrent_layers=[0] if recurrent else [],
        dropout=0.0,
        attention_dropout=0.0,
        **settings,
    )
    model = BlockRecurrentForCausalLM(config).train()

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(first_noise, config.vocab_size, (ROWS // 2, WINDOW * distance + 2))
        key = torch.randint(3, first_noise, (ROWS // 2,))
        ids[:, 0], ids[:, 1] = 1, key
        ids[:, -2], ids[:, -1] = 1, key
        return ids, key

    return train(model, batch, steps, question=WINDOW * distance, learning_rate=1e-3)


def train(
    model: torch.nn.Module,
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    question: int,
    learning_rate: float = LEARNING_RATE,
) -> list[float]:
    """The share of right answers at column `question` of each step's batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    right = []
    for _ in range(steps):
        ids, key = batch()
        labels = torch.full_like(ids, -100)
        labels[:, question + 1] = key
        out = model(ids, labels=labels, skip_logits=False)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        right.append((out.logits[:, question].argmax(-1) == key).float().mean().item())
    return right


def main() -> None:
    results = {}
    for distance in DISTANCES:
        curves = {}
        for seed in SEEDS:
            right = copy_task(distance, STEPS, seed=seed)
            curves[str(seed)] = [round(sum(right[i : i + 100]) / 100, 3) for i in range(0, STEPS, 100)]
            print(distance, seed, curves[str(seed)], file=sys.stderr)
        results[str(distance)] = {
            "accuracy_of_every_100_steps": curves,
            "seeds_above_95_percent": sum(curve[-1] > 0.95 for curve in curves.values()),
        }
    write_results(
        "copy_distance",
        {
            "window_size": WINDOW,
            "n_layer": 3,
            "n_embd": 64,
            "rows": ROWS,
            "keys": NUM_KEYS,
            "chance": 1 / NUM_KEYS,
            "steps": STEPS,
            "learning_rate": LEARNING_RATE,
            "seeds": SEEDS,
        },
        results,
        {"1": "learned to 95 % within 500 steps", "2 and more": "none; what is reached"},
    )


if __name__ == "__main__":
    main()
