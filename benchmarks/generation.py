"""Speed and memory of generation: against plain GPT-2 inside its context, and far beyond it.

`python -m benchmarks.generation` takes about ten minutes.
"""

import statistics
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.common import interleaved_ratios, memory_mb, write_results
from hf_recurrence import RecurrentGPT2Config, RecurrentGPT2LMHeadModel


SHAPE = {"n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 50257}
WINDOW, PROMPT, NEW, ROUNDS = 300, 32, 900, 5
LONG = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 1000}
LONG_WINDOW, EARLY, LATE, SPAN = 100, 500, 20_000, 400  # a span of whole windows


def greedy(model: torch.nn.Module, prompt: torch.Tensor, new: int, **kwargs) -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None, **kwargs)


class Clock:
    """A streamer that notes when each token came, and now and then the memory."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.memory: dict[int, float] = {}

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) % 2000 == 500:
            self.memory[len(self.times)] = memory_mb("VmRSS")

    def end(self) -> None:
        pass


def main() -> None:
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(**SHAPE)).eval()
    recurrent = RecurrentGPT2LMHeadModel(RecurrentGPT2Config(**SHAPE, window_size=WINDOW)).eval()
    prompt = torch.randint(SHAPE["vocab_size"], (1, PROMPT))
    runs = {
        "plain GPT-2": lambda: greedy(plain, prompt, NEW),
        "recurrent": lambda: greedy(recurrent, prompt, NEW),
    }
    inside = interleaved_ratios(runs, "recurrent", ROUNDS)
    for values in inside.values():
        values["tokens_per_second"] = NEW / values["seconds"]
    small = RecurrentGPT2LMHeadModel(RecurrentGPT2Config(**LONG, window_size=LONG_WINDOW, bos_token_id=0)).eval()
    clock = Clock()
    outputs = greedy(small, prompt % 1000, LATE + SPAN, streamer=clock, return_dict_in_generate=True)
    steps = [after - before for before, after in zip(clock.times[1:-1], clock.times[2:], strict=True)]

    def milliseconds(first: int) -> float:
        return 1000 * statistics.median(steps[first : first + SPAN])

    write_results(
        "generation",
        {
            "inside": {**SHAPE, "window_size": WINDOW, "prompt": PROMPT, "new_tokens": NEW, "rounds": ROUNDS},
            "long": {**LONG, "window_size": LONG_WINDOW, "span": SPAN},
            "rows": 1,
            "decoding": "greedy",
        },
        {
            "inside_the_context": inside,
            "recurrent_over_plain_tokens_per_second": inside["plain GPT-2"]["ratio"],
            "milliseconds_per_token": {str(place): milliseconds(place) for place in (EARLY, LATE)},
            "time_at_20000_over_time_at_500": milliseconds(LATE) / milliseconds(EARLY),
            "process_memory_mb_at_token": {str(token): value for token, value in clock.memory.items()},
            "cache_bytes": outputs.past_key_values.nbytes(),
        },
        {
            "recurrent_over_plain_tokens_per_second": "at least 0.95",
            "time_at_20000_over_time_at_500": "at most 1.1",
            "process_memory_mb_at_token": "flat",
        },
    )


if __name__ == "__main__":
    main()
