"""Peak memory of a training step against the number of windows: flat with window checkpointing.

`python -m benchmarks.training_memory` runs every case in a process of its own.
"""

import json
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.common import in_process, memory_mb, write_results
from hf_recurrence import RecurrentGPT2Config, RecurrentGPT2LMHeadModel


SHAPE = {"n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 50257}
# With dropout, full attention on a CPU would hold its whole matrix; without, the comparison is fair to it.
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
WINDOW, WINDOWS = 300, (1, 5, 20, 60)
CASES = ("two_pass", "plain_backpropagation", "full_attention")
LIMIT_MB = 15_000  # cases that would need more are left out, and said so


def build(case: str, windows: int) -> torch.nn.Module:
    torch.manual_seed(0)
    if case == "full_attention":
        return GPT2LMHeadModel(GPT2Config(**SHAPE, **DROPOUT, n_positions=windows * WINDOW)).train()
    model = RecurrentGPT2LMHeadModel(RecurrentGPT2Config(**SHAPE, **DROPOUT, window_size=WINDOW)).train()
    if case == "two_pass":
        model.gradient_checkpointing_enable()
    return model


def measure(case: str, windows: int) -> dict[str, float]:
    model = build(case, windows)
    ids = torch.randint(SHAPE["vocab_size"], (1, windows * WINDOW))
    before = memory_mb("VmRSS")
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"peak_mb": memory_mb("VmHWM"), "before_step_mb": before, "loss": loss.item()}


def main() -> None:
    results: dict[str, dict[str, dict[str, float] | str]] = {case: {} for case in CASES}
    for case in CASES:
        growth = 0.0
        for windows in WINDOWS:
            measured = [number for number, value in results[case].items() if isinstance(value, dict)]
            if len(measured) > 1:
                first, last = (results[case][number] for number in measured[-2:])
                growth = (last["peak_mb"] - first["peak_mb"]) / (int(measured[-1]) - int(measured[-2]))
                if last["peak_mb"] + growth * (windows - int(measured[-1])) > LIMIT_MB:
                    results[case][str(windows)] = f"not run: about {growth:.0f} MB a window"
                    continue
            results[case][str(windows)] = in_process("benchmarks.training_memory", case, windows)
            print(case, windows, results[case][str(windows)], file=sys.stderr)
    flat = results["two_pass"]
    summary = {
        "peak_60_over_peak_5": flat["60"]["peak_mb"] / flat["5"]["peak_mb"],
        "mb_a_window": {
            case: (values["20"]["peak_mb"] - values["5"]["peak_mb"]) / 15 for case, values in results.items()
        }
        | {"two_pass_5_to_60": (flat["60"]["peak_mb"] - flat["5"]["peak_mb"]) / 55},
    }
    write_results(
        "training_memory",
        {**SHAPE, "window_size": WINDOW, "rows": 1, "dropout": 0.0, "dtype": "float32", "seed": 0},
        {"summary": summary, "cases": results},
        {"peak_60_over_peak_5": "at most 1.02", "two_pass_5_to_60": "under 0.1 MB a window"},
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
