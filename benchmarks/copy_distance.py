"""Over how many windows a token is copied: shown somewhere in a window of 8, asked for `distance` windows later.

`python -m benchmarks.copy_distance` trains small models from scratch, about ten minutes.
"""

import sys

import torch

from benchmarks.common import write_results
from hf_recurrence import RecurrentGPT2Config, RecurrentGPT2LMHeadModel


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    right = []
    for _ in range(steps):
        ids = torch.randint(first_noise, config.vocab_size, (ROWS, WINDOW * (distance + 1)))
        key = torch.randint(3, first_noise, (ROWS,))
        ids[torch.arange(ROWS), torch.randint(0, WINDOW, (ROWS,))] = key
        question = WINDOW * distance
        ids[:, question], ids[:, question + 1] = 1, key
        labels = torch.full_like(ids, -100)
        labels[:, question + 1] = key
        if not recurrent:
            ids, labels, question = ids[:, question:], labels[:, question:], 0
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
