"""The whole pipeline (Lanes, Trainer, CarryState) against the bare step of the model.

`python -m benchmarks.pipeline` times both in turn, in one process, over the same batches; `smoke` only tries it out.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments

from benchmarks.common import write_results
from hf_recurrence import RecurrentGPT2Config, RecurrentGPT2LMHeadModel
from hf_recurrence.data import Lanes, TokenStore, collate_lanes
from hf_recurrence.training import CarryState


SHAPE = {"n_layer": 6, "n_embd": 384, "n_head": 6, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
WINDOW, WINDOWS, ROWS, STEPS, ROUNDS = 300, 5, 2, 4, 7


def texts(megabytes: int) -> Iterator[str]:
    """Documents of about 1 MB of made-up words."""
    source = random.Random(0)
    words = ["".join(source.choices("etaoinshrdlu", k=source.randint(1, 9))) for _ in range(20_000)]
    for _ in range(megabytes):
        yield " ".join(source.choices(words, k=170_000))


def make_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(texts(1), trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=core)


class Clock(TrainerCallback):
    """The seconds from the end of the first step to the end of the last."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.start = time.perf_counter()
        self.seconds = time.perf_counter() - self.start


def compare(rounds: int, steps: int, shape: dict[str, Any]) -> dict[str, float]:
    """Median seconds of the bare steps and of the pipeline's, and of the ratio of tokens a second."""
    torch.manual_seed(0)
    model = RecurrentGPT2LMHeadModel(RecurrentGPT2Config(**shape, vocab_size=8192, window_size=WINDOW)).train()
    with tempfile.TemporaryDirectory() as folder:
        store = TokenStore.build(f"{folder}/store", texts(ROWS), make_tokenizer())
        lanes = Lanes(store, ROWS, WINDOW * WINDOWS)
        rows = iter(lanes)
        batches = [collate_lanes([next(rows) for _ in range(ROWS)]) for _ in range(steps + 1)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)  # as Trainer's default

        def bare() -> float:
            cache, start = None, 0.0
            for number, batch in enumerate(batches):
                out = model(**batch, past_key_values=cache, use_cache=True)
                out.loss.backward()
                cache = out.past_key_values
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                model.zero_grad()
                if number == 0:
                    start = time.perf_counter()
            return time.perf_counter() - start

        def pipeline() -> float:
            clock = Clock()
            arguments = TrainingArguments(
                f"{folder}/run",
                max_steps=steps + 1,
                per_device_train_batch_size=ROWS,
                learning_rate=1e-5,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            )
            callbacks = [CarryState(), clock]
            Trainer(model, arguments, train_dataset=lanes, data_collator=collate_lanes, callbacks=callbacks).train()
            return clock.seconds

        pairs = []
        for turn in range(rounds + 1):
            pair = (bare(), pipeline())
            if turn:  # the first one warms up
                pairs.append(pair)
            print(f"turn {turn} of {rounds}", file=sys.stderr)
    return {
        "bare_seconds": statistics.median(pair[0] for pair in pairs),
        "pipeline_seconds": statistics.median(pair[1] for pair in pairs),
        "pipeline_over_bare_tokens_per_second": statistics.median(first / second for first, second in pairs),
    }


def main() -> None:
    if sys.argv[1:] == ["smoke"]:
        print(json.dumps(compare(3, 3, {**SHAPE, "n_layer": 2, "n_embd": 128, "n_head": 2}), indent=2))
        return
    settings = {**SHAPE, "window_size": WINDOW, "windows": WINDOWS, "rows": ROWS, "steps": STEPS, "rounds": ROUNDS}
    targets = {"pipeline_over_bare_tokens_per_second": "at least 0.95"}
    write_results(Path(__file__).stem, settings, compare(ROUNDS, STEPS, SHAPE), targets)


if __name__ == "__main__":
    main()
