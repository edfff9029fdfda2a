"""Quality of SRUBert against BERT of equal parameters: masked-LM loss on books, then fine-tuning on GLUE tasks.

`python -m benchmarks.sru_bert_quality BOOKS GLUE` takes about an hour on one core. BOOKS has folders `train`, `valid`
and `test` of text files, GLUE a folder a task as it is distributed. Both models see the same data in the same order,
for the same steps, with three seeds. The rate of pretraining is chosen for each model by its first seed's loss on
books of their own (valid); the loss that is reported is of others (test). Every finished run is in the results at
once, its model in the folder `--work`; started again, it goes on with the next one. `--smoke` runs a few steps of
everything, apart from that.
"""

import argparse
import contextlib
import io
import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import BertWordPieceTokenizer
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import logging

from benchmarks.common import RESULTS, write_results
from hf_recurrence import SRUBertConfig, SRUBertForMaskedLM, SRUBertForSequenceClassification
from hf_recurrence.data import MaskedSegments, TokenStore, documents, glue_task, masked_lm_collator, read_glue
from hf_recurrence.evaluation import glue_scores


NAME = "sru_bert_quality"


class MaskedBert(BertForMaskedLM):
    """BERT whose loss is made of the masked tokens alone: the same gradients in less time."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> MaskedLMOutput:
        hidden, chosen = self.bert(input_ids).last_hidden_state, labels != -100
        return MaskedLMOutput(loss=F.cross_entropy(self.cls(hidden[chosen]), labels[chosen]))


MODELS = {
    "bert": (BertConfig, MaskedBert, BertForSequenceClassification),
    "sru_bert": (SRUBertConfig, SRUBertForMaskedLM, SRUBertForSequenceClassification),
}
# BERT's deviation of 0.02 is about half of 768 to the power of -1/2; narrow models want a larger one
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 255,  # 2/3 of it is a whole number
    "initializer_range": 0.125,
}
# First short windows, then longer ones, as BERT's own recipe: for its positions alone BERT needs so many steps on long
# ones that a small run would end on the plateau where only the frequencies of tokens are known.
PRETRAINING: dict[str, Any] = {
    "vocab_size": 4096,
    "stages": [[16, 64, 2500], [32, 32, 1000], [64, 16, 1500]],  # tokens and rows of a batch, steps
    "learning_rates": [2e-3, 4e-3, 8e-3],
    "warmup_steps": 200,
    "dropout": 0.0,
    "characters_a_book": 250_000,
    "windows": 512,  # of the books for the choice of the rate, and of those that are reported
}
FINE_TUNING: dict[str, Any] = {
    "training_rows": 2000,
    "validation_rows": 1000,
    "epochs": 3,
    "rows": 16,
    "length": 64,
    "learning_rates": [1e-4, 3e-4, 1e-3, 3e-3],
    "warmup_steps": 25,
    "dropout": 0.1,
}
SEEDS = [0, 1, 2]
TASKS = ["CoLA", "SST-2", "MRPC", "RTE", "STS-B"]


def read_books(folder: Path, work: Path) -> tuple[BertTokenizerFast, dict[str, TokenStore]]:
    """A tokenizer made of the training books, and the tokens of all of them."""

    def texts(split: str) -> Iterator[str]:
        return (text[: PRETRAINING["characters_a_book"]] for text in documents(folder, split))

    if not (work / "tokenizer").exists():
        core = BertWordPieceTokenizer(lowercase=True)
        core.train_from_iterator(texts("train"), vocab_size=PRETRAINING["vocab_size"], show_progress=False)
        core.save_model(str(work))
        BertTokenizerFast(str(work / "vocab.txt"), do_lower_case=True).save_pretrained(work / "tokenizer")
    tokenizer = BertTokenizerFast.from_pretrained(work / "tokenizer")
    splits = ("train", "validation", "test")
    return tokenizer, {split: TokenStore.build(work / split, texts(split), tokenizer) for split in splits}


def whole_windows(tokens: TokenStore, tokenizer: BertTokenizerFast, length: int) -> MaskedSegments:
    """The windows of this length, without the shorter ones at the ends of documents."""
    windows = MaskedSegments(tokens, tokenizer, length)
    windows.pieces = windows.pieces[windows.pieces[:, 2] - windows.pieces[:, 1] == length - 2]
    return windows


def masked(windows: MaskedSegments, places: Any, collator: Any) -> dict[str, torch.Tensor]:
    """A batch of these windows, masked. Its special tokens are known to be the first and last, which saves time."""
    ids = torch.from_numpy(np.stack([windows[int(place)]["input_ids"] for place in places]))
    special = torch.zeros_like(ids, dtype=torch.bool)
    special[:, 0] = special[:, -1] = True
    input_ids, labels = collator.torch_mask_tokens(ids, special_tokens_mask=special)
    return {"input_ids": input_ids, "labels": labels}


class Batches(torch.utils.data.IterableDataset):
    """The batches of all stages of pretraining, one after the other; the seed decides which and how masked."""

    def __init__(self, tokens: TokenStore, tokenizer: BertTokenizerFast, seed: int) -> None:
        self.tokens, self.tokenizer, self.seed = tokens, tokenizer, seed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        collator = masked_lm_collator(self.tokenizer)
        collator.generator = torch.Generator().manual_seed(self.seed)
        random = np.random.default_rng(self.seed)
        for length, rows, steps in PRETRAINING["stages"]:
            windows = whole_windows(self.tokens, self.tokenizer, length)
            for _ in range(steps):
                yield masked(windows, random.choice(len(windows), rows, replace=False), collator)


@torch.no_grad()
def masked_lm_loss(model: Any, tokens: TokenStore, tokenizer: BertTokenizerFast) -> float:
    """The mean loss a masked token of the same windows with the same masks for all models."""
    collator = masked_lm_collator(tokenizer)
    collator.generator = torch.Generator().manual_seed(12345)
    windows = whole_windows(tokens, tokenizer, PRETRAINING["stages"][-1][0])
    places = np.random.default_rng(12345).permutation(len(windows))[: PRETRAINING["windows"]]
    total, count = 0.0, 0
    for start in range(0, len(places), 32):
        batch = masked(windows, places[start : start + 32], collator)
        number = int((batch["labels"] != -100).sum())
        total, count = total + number * float(model(**batch).loss), count + number
    return total / count


class Frequencies(torch.nn.Module):
    """The model that knows how often tokens are, and nothing else: the plateau of pretraining."""

    def __init__(self, tokens: TokenStore, size: int) -> None:
        super().__init__()
        counts = np.ones(size)
        for number, length in enumerate(tokens.lengths):
            counts += np.bincount(tokens.read(number, 0, int(length)), minlength=size)
        self.scores = torch.from_numpy(np.log(counts / counts.sum()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> MaskedLMOutput:
        return MaskedLMOutput(loss=-self.scores[labels[labels != -100]].mean())


def arguments(folder: Path, seed: int, **settings: Any) -> TrainingArguments:
    common = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 500}
    return TrainingArguments(str(folder), seed=seed, data_seed=seed, weight_decay=0.01, **common, **settings)


def pretrain(kind: str, seed: int, rate: float, books: Path, work: Path) -> dict[str, Any]:
    """Trains a model from scratch, keeps it in the work folder, and returns its losses on other books."""
    tokenizer, tokens = read_books(books, work)
    config_class, model_class, _ = MODELS[kind]
    dropout, length = PRETRAINING["dropout"], PRETRAINING["stages"][-1][0]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=len(tokenizer),
        max_position_embeddings=length,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **SHAPE,
    )
    model = model_class(config)
    settings = arguments(
        work / "trainer",
        seed,
        max_steps=sum(steps for _, _, steps in PRETRAINING["stages"]),
        per_device_train_batch_size=1,  # which is a whole batch already
        learning_rate=rate,
        warmup_steps=PRETRAINING["warmup_steps"],
    )
    batches = Batches(tokens["train"], tokenizer, seed)
    trainer = Trainer(model, settings, train_dataset=batches, data_collator=lambda found: found[0])
    seconds = trainer.train().metrics["train_runtime"]
    model.eval().save_pretrained(work / "models" / f"{kind}-{seed}-{rate}")
    return {
        "loss": masked_lm_loss(model, tokens["test"], tokenizer),
        "loss_for_choice": masked_lm_loss(model, tokens["validation"], tokenizer),
        "losses_in_training": [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry],
        "seconds": seconds,
        "parameters": model.num_parameters(),
    }


def read_task(folder: Path, task: str, split: str, tokenizer: BertTokenizerFast, count: int) -> Any:
    """The first `count` rows of a task in a shuffled order that is the same for all runs, as tokens."""
    rows = read_glue(folder, task, split).shuffle(seed=0)
    rows = rows.select(range(min(count, len(rows))))
    texts = list(glue_task(task).texts)

    def tokenise(batch: dict[str, list[Any]]) -> dict[str, Any]:
        found = tokenizer(*(batch[name] for name in texts), truncation=True, max_length=FINE_TUNING["length"])
        return {**found, "labels": batch["label"]}

    return rows.map(tokenise, batched=True, remove_columns=rows.column_names)


def fine_tune(
    kind: str, seed: int, first_rate: float, task: str, rate: float, glue: Path, work: Path
) -> dict[str, float]:
    """The metrics of a task after fine-tuning the pretrained model of this seed."""
    tokenizer = BertTokenizerFast.from_pretrained(work / "tokenizer")
    torch.manual_seed(seed)
    dropout = FINE_TUNING["dropout"]
    model = MODELS[kind][2].from_pretrained(
        work / "models" / f"{kind}-{seed}-{first_rate}",
        num_labels=glue_task(task).num_labels,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    settings = arguments(
        work / "trainer",
        seed,
        num_train_epochs=FINE_TUNING["epochs"],
        per_device_train_batch_size=FINE_TUNING["rows"],
        per_device_eval_batch_size=50,
        learning_rate=rate,
        warmup_steps=FINE_TUNING["warmup_steps"],
    )
    trainer = Trainer(
        model,
        settings,
        processing_class=tokenizer,
        train_dataset=read_task(glue, task, "train", tokenizer, FINE_TUNING["training_rows"]),
        eval_dataset=read_task(glue, task, "validation", tokenizer, FINE_TUNING["validation_rows"]),
        # a run that has diverged scores what a constant answer does
        compute_metrics=lambda found: glue_scores(task, np.nan_to_num(found.predictions), found.label_ids),
    )
    trainer.train()
    metrics = trainer.evaluate()
    skipped = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch")
    return {name.removeprefix("eval_"): value for name, value in metrics.items() if name not in skipped}


def mean_and_spread(values: list[float]) -> dict[str, Any]:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "deviation": spread, "runs": len(values)}


def best_rate(runs: dict[str, dict[str, Any]], kind: str) -> float:
    """The rate of pretraining at which the first seed has the least loss on the books for this choice."""
    tried = [rate for rate in PRETRAINING["learning_rates"] if f"mlm/{kind}/{SEEDS[0]}/{rate}" in runs]
    return min(tried, key=lambda rate: runs[f"mlm/{kind}/{SEEDS[0]}/{rate}"]["loss_for_choice"], default=0.0)


def summarise(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of what is finished: of pretraining over seeds, of fine-tuning over seeds by rate.

    `glue_over_all_rates` is of all rates and seeds, chosen by nothing. `glue_at_best_rate` is at the rate whose mean
    is best on the same rows, one for each task and model: as papers report, and too good for both in the same way.
    """
    summary: dict[str, Any] = {"masked_lm_loss": {}, "glue": {}, "glue_over_all_rates": {}, "glue_at_best_rate": {}}
    for kind in MODELS:
        rate = best_rate(runs, kind)
        losses = [runs[f"mlm/{kind}/{s}/{rate}"]["loss"] for s in SEEDS if f"mlm/{kind}/{s}/{rate}" in runs]
        if losses:
            summary["masked_lm_loss"][kind] = {**mean_and_spread(losses), "learning_rate": rate}
        overall, best = {}, {}
        for task in TASKS:
            rates, everything = {}, []
            for rate in FINE_TUNING["learning_rates"]:
                # where not all runs have ended, those that both models have
                seeds = [s for s in SEEDS if all(f"glue/{task}/{other}/{s}/{rate}" in runs for other in MODELS)]
                found = [runs[f"glue/{task}/{kind}/{seed}/{rate}"][glue_task(task).metric] for seed in seeds]
                if found:
                    rates[str(rate)] = mean_and_spread(found)
                    everything += found
            if rates:
                summary["glue"].setdefault(task, {})[kind] = rates
                overall[task] = mean_and_spread(everything)
                best[task] = max(rates.values(), key=lambda value: value["mean"])
        for name, values in (("glue_over_all_rates", overall), ("glue_at_best_rate", best)):
            if len(values) == len(TASKS):
                mean = statistics.mean(value["mean"] for value in values.values())
                summary[name][kind] = {"mean_of_tasks": mean, **values}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("books", type=Path)
    parser.add_argument("glue", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs") / NAME)
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything, nothing is kept as a result")
    given = parser.parse_args()
    logging.set_verbosity_error()
    if given.smoke:
        PRETRAINING.update(stages=[[16, 8, 3], [64, 4, 2]], warmup_steps=1, characters_a_book=5000, windows=8)
        FINE_TUNING.update(training_rows=32, validation_rows=50, epochs=1)
        given.work = given.work.with_name(f"{given.work.name}_smoke")
    given.work.mkdir(parents=True, exist_ok=True)
    (given.work / ".gitignore").write_text("*\n")
    kept = given.work / "runs.json" if given.smoke else RESULTS / f"{NAME}.json"
    runs: dict[str, dict[str, Any]] = json.loads(kept.read_text())["results"]["runs"] if kept.exists() else {}

    def run(name: str, start: Any) -> None:
        if name in runs:
            return
        runs[name] = start()
        print(name, runs[name], flush=True)
        results = {"summary": summarise(runs), "runs": runs}
        if given.smoke:
            kept.write_text(json.dumps({"results": results}))
            return
        settings = {"shape": SHAPE, "pretraining": PRETRAINING, "fine_tuning": FINE_TUNING, "seeds": SEEDS}
        data = {
            "books": "100 English Novels: train; valid for the choice of the rate; test",
            "glue": "rows of dev sets",
        }
        with contextlib.redirect_stdout(io.StringIO()):
            write_results(NAME, settings | {"data": data}, results, {})

    def frequencies() -> dict[str, float]:
        tokenizer, tokens = read_books(given.books, given.work)
        return {"loss": masked_lm_loss(Frequencies(tokens["train"], len(tokenizer)), tokens["test"], tokenizer)}

    def pretrained(kind: str, seed: int, rate: float) -> None:
        run(f"mlm/{kind}/{seed}/{rate}", lambda: pretrain(kind, seed, rate, given.books, given.work))

    run("mlm/frequencies of tokens", frequencies)
    for rate, kind in itertools.product(PRETRAINING["learning_rates"], MODELS):
        pretrained(kind, SEEDS[0], rate)
    for seed in SEEDS:
        for kind in MODELS:
            pretrained(kind, seed, best_rate(runs, kind))
        for task, rate, kind in itertools.product(TASKS, FINE_TUNING["learning_rates"], MODELS):
            values = (kind, seed, best_rate(runs, kind), task, rate, given.glue, given.work)
            run(f"glue/{task}/{kind}/{seed}/{rate}", lambda values=values: fine_tune(*values))
    print(json.dumps(summarise(runs), indent=2))


if __name__ == "__main__":
    main()
