"""Quality of SRUBert against BERT of equal parameters: masked-LM loss on books, then fine-tuning on GLUE tasks.

`python -m benchmarks.sru_bert_quality BOOKS GLUE` takes an hour or two on one core. BOOKS has folders `train` and
`valid` of text files, GLUE a folder a task as it is distributed. Both models see the same data in the same order, for
the same steps, with three seeds. Every finished run is in the results at once, its model in the folder `--work`;
started again, it goes on with the next one. `--smoke` runs a few steps of everything, apart from that.
"""

import argparse
import contextlib
import csv
import io
import itertools
import json
import statistics
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

from benchmarks.common import RESULTS, write_results
from hf_recurrence import SRUBertConfig, SRUBertForMaskedLM, SRUBertForSequenceClassification


NAME = "sru_bert_quality"


class MaskedBert(BertForMaskedLM):
    """BERT whose loss in training is made of the masked tokens alone: the same gradients in less time."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> MaskedLMOutput:
        if not self.training:
            return super().forward(input_ids, labels=labels)
        hidden, chosen = self.bert(input_ids).last_hidden_state, labels != -100
        return MaskedLMOutput(loss=F.cross_entropy(self.cls(hidden[chosen]), labels[chosen]))


MODELS = {
    "bert": (BertConfig, MaskedBert, BertForSequenceClassification),
    "sru_bert": (SRUBertConfig, SRUBertForMaskedLM, SRUBertForSequenceClassification),
}
SHAPE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
PRETRAINING = {
    "vocab_size": 8192,
    "length": 128,
    "steps": 2500,
    "rows": 16,
    "learning_rates": [5e-4, 1e-3],  # of the first seed; the others have the better one of their model
    "warmup_steps": 250,
    "characters_a_book": 250_000,
    "validation_windows": 512,
}
FINE_TUNING = {
    "training_rows": 2000,
    "validation_rows": 600,
    "epochs": 2,
    "rows": 16,
    "learning_rates": [1e-4, 3e-4, 1e-3, 3e-3],
}
SEEDS = [0, 1, 2]
# task -> (columns of the sentences, column of the label, labels or None for a score, tokens, has a header)
TASKS: dict[str, tuple[list[int], int, list[str] | None, int, bool]] = {
    "CoLA": ([3], 1, ["0", "1"], 32, False),
    "SST-2": ([0], 1, ["0", "1"], 48, True),
    "MRPC": ([3, 4], 0, ["0", "1"], 96, True),
    "RTE": ([1, 2], 3, ["entailment", "not_entailment"], 128, True),
    "STS-B": ([7, 8], 9, None, 64, True),
}


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's, 0 where one of them is constant."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / size if size > 0 else 0.0


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[places]


def scores(task: str, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The metrics of a task; the first is the one that runs are compared by."""
    if task == "STS-B":
        values = predictions.reshape(-1).astype(np.float64)
        labels = labels.reshape(-1).astype(np.float64)
        return {"spearman": correlation(ranks(values), ranks(labels)), "pearson": correlation(values, labels)}
    chosen = predictions.argmax(-1)
    accuracy = float((chosen == labels).mean())
    if task == "CoLA":  # Matthews' coefficient of two classes is their correlation
        return {"matthews": correlation(chosen.astype(np.float64), labels.astype(np.float64)), "accuracy": accuracy}
    if task == "MRPC":
        hits = float(((chosen == 1) & (labels == 1)).sum())
        return {"f1": 2 * hits / max(float((chosen == 1).sum() + (labels == 1).sum()), 1.0), "accuracy": accuracy}
    return {"accuracy": accuracy}


class MaskedWindows(torch.utils.data.Dataset):
    """Windows with 15 % of their tokens to predict: 80 % masked, 10 % random, 10 % as they are; by seed and place."""

    def __init__(self, windows: torch.Tensor, seed: int, tokenizer: BertTokenizerFast) -> None:
        self.windows, self.seed, self.tokenizer = windows, seed, tokenizer

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        ids = self.windows[index].long()
        chance = torch.rand(len(ids), generator=generator)
        chosen = (chance < 0.15) & (ids != self.tokenizer.cls_token_id) & (ids != self.tokenizer.sep_token_id)
        kind = torch.rand(len(ids), generator=generator)
        others = torch.randint(len(self.tokenizer), (len(ids),), generator=generator)
        labels = ids.masked_fill(~chosen, -100)
        ids = torch.where(chosen & (kind < 0.8), self.tokenizer.mask_token_id, ids)
        return {"input_ids": torch.where(chosen & (kind >= 0.9), others, ids), "labels": labels}


def read_books(folder: Path, work: Path) -> tuple[BertTokenizerFast, torch.Tensor, torch.Tensor]:
    """A tokenizer made of the training books, and windows of these and of the others. [N, length]"""
    if not (work / "windows.pt").exists():
        size = PRETRAINING["characters_a_book"]
        texts = {
            split: [file.read_text(errors="replace")[:size] for file in sorted((folder / split).glob("*.txt"))]
            for split in ("train", "valid")
        }
        core = BertWordPieceTokenizer(lowercase=True)
        core.train_from_iterator(texts["train"], vocab_size=PRETRAINING["vocab_size"], show_progress=False)
        core.save_model(str(work))
        tokenizer = BertTokenizerFast(str(work / "vocab.txt"), do_lower_case=True)
        tokenizer.save_pretrained(work / "tokenizer")
        found, inner = {}, PRETRAINING["length"] - 2
        for split, books in texts.items():
            windows = []
            for book in books:
                ids = torch.tensor(tokenizer(book, add_special_tokens=False, verbose=False).input_ids)
                windows.append(ids[: len(ids) // inner * inner].view(-1, inner))
            rows = torch.cat(windows)
            edge = torch.ones(len(rows), 1, dtype=torch.long)
            marked = torch.cat([edge * tokenizer.cls_token_id, rows, edge * tokenizer.sep_token_id], 1)
            order = torch.randperm(len(marked), generator=torch.Generator().manual_seed(0))
            found[split] = marked[order].to(torch.int16)
        torch.save(found, work / "windows.pt")
    found = torch.load(work / "windows.pt")
    tokenizer = BertTokenizerFast.from_pretrained(work / "tokenizer")
    return tokenizer, found["train"], found["valid"][: PRETRAINING["validation_windows"]]


def read_task(folder: Path, task: str, split: str, tokenizer: BertTokenizerFast, count: int) -> list[dict[str, Any]]:
    """The first `count` rows of a task in a shuffled order that is the same for all runs."""
    sentences, label, names, length, header = TASKS[task]
    with open(folder / task / f"{split}.tsv", encoding="utf-8-sig", newline="") as file:
        lines = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1 if header else 0 :]
    lines = [line for line in lines if len(line) > max(*sentences, label)]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0)).tolist()
    rows = []
    for line in (lines[index] for index in order[:count]):
        row = dict(tokenizer(*(line[column] for column in sentences), truncation=True, max_length=length))
        row["labels"] = float(line[label]) if names is None else names.index(line[label])
        rows.append(row)
    return rows


def arguments(folder: Path, seed: int, **settings: Any) -> TrainingArguments:
    common = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 250}
    return TrainingArguments(str(folder), seed=seed, data_seed=seed, **common, **settings)


def pretrain(kind: str, seed: int, rate: float, books: Path, work: Path) -> dict[str, float]:
    """Trains a model from scratch, keeps it in the work folder, and returns its loss on the other books."""
    tokenizer, train, valid = read_books(books, work)
    config_class, model_class, _ = MODELS[kind]
    torch.manual_seed(seed)
    model = model_class(
        config_class(vocab_size=len(tokenizer), max_position_embeddings=PRETRAINING["length"], **SHAPE)
    )
    settings = arguments(
        work / "trainer",
        seed,
        max_steps=PRETRAINING["steps"],
        per_device_train_batch_size=PRETRAINING["rows"],
        per_device_eval_batch_size=32,
        learning_rate=rate,
        warmup_steps=PRETRAINING["warmup_steps"],
        weight_decay=0.01,
        prediction_loss_only=True,
    )
    trainer = Trainer(
        model,
        settings,
        train_dataset=MaskedWindows(train, seed, tokenizer),
        eval_dataset=MaskedWindows(valid, 12345, tokenizer),
    )
    seconds = trainer.train().metrics["train_runtime"]
    loss = trainer.evaluate()["eval_loss"]
    model.save_pretrained(work / "models" / f"{kind}-{seed}-{rate}")
    return {
        "loss": loss,
        "seconds": seconds,
        "parameters": model.num_parameters(),
    }


def fine_tune(
    kind: str, seed: int, first_rate: float, task: str, rate: float, glue: Path, work: Path
) -> dict[str, float]:
    """The metrics of a task after fine-tuning the pretrained model of this seed."""
    tokenizer = BertTokenizerFast.from_pretrained(work / "tokenizer")
    torch.manual_seed(seed)
    num_labels = 1 if TASKS[task][2] is None else 2
    folder = work / "models" / f"{kind}-{seed}-{first_rate}"
    model = MODELS[kind][2].from_pretrained(folder, num_labels=num_labels)
    settings = arguments(
        work / "trainer",
        seed,
        num_train_epochs=FINE_TUNING["epochs"],
        per_device_train_batch_size=FINE_TUNING["rows"],
        per_device_eval_batch_size=50,
        learning_rate=rate,
        warmup_steps=25,
        weight_decay=0.01,
    )
    trainer = Trainer(
        model,
        settings,
        processing_class=tokenizer,
        train_dataset=read_task(glue, task, "train", tokenizer, FINE_TUNING["training_rows"]),
        eval_dataset=read_task(glue, task, "dev", tokenizer, FINE_TUNING["validation_rows"]),
        compute_metrics=lambda found: scores(task, found.predictions, found.label_ids),
    )
    trainer.train()
    metrics = trainer.evaluate()
    skipped = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch")
    return {name.removeprefix("eval_"): value for name, value in metrics.items() if name not in skipped}


def mean_and_spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}


def best_rate(runs: dict[str, dict[str, float]], kind: str) -> float:
    """The rate of pretraining at which the first seed has the least loss."""
    tried = [rate for rate in PRETRAINING["learning_rates"] if f"mlm/{kind}/{SEEDS[0]}/{rate}" in runs]
    return min(tried, key=lambda rate: runs[f"mlm/{kind}/{SEEDS[0]}/{rate}"]["loss"], default=0.0)


def summarise(runs: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of what is finished; of fine-tuning by rate, and at the best of them."""
    summary: dict[str, Any] = {"masked_lm_loss": {}, "glue": {}, "mean_of_tasks_at_best_rate": {}, "over_rates": {}}
    for kind in MODELS:
        rate = best_rate(runs, kind)
        losses = [runs[f"mlm/{kind}/{s}/{rate}"]["loss"] for s in SEEDS if f"mlm/{kind}/{s}/{rate}" in runs]
        if losses:
            summary["masked_lm_loss"][kind] = {**mean_and_spread(losses), "seeds": len(losses), "learning_rate": rate}
        best, spread = [], []
        for task in TASKS:
            rates = {}
            for rate in FINE_TUNING["learning_rates"]:
                names = [f"glue/{task}/{kind}/{seed}/{rate}" for seed in SEEDS]
                found = [next(v for k, v in runs[name].items() if k != "loss") for name in names if name in runs]
                if found:
                    rates[str(rate)] = mean_and_spread(found)
            if rates:
                means = [value["mean"] for value in rates.values()]
                summary["glue"].setdefault(task, {})[kind] = rates
                best.append(max(means))
                spread.append(max(means) - min(means))
        if len(best) == len(TASKS):
            summary["mean_of_tasks_at_best_rate"][kind] = statistics.mean(best)
            summary["over_rates"][kind] = statistics.mean(spread)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("books", type=Path)
    parser.add_argument("glue", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs") / NAME)
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything, nothing is kept as a result")
    given = parser.parse_args()
    if given.smoke:
        PRETRAINING.update(steps=5, warmup_steps=1, characters_a_book=5000, validation_windows=8)
        FINE_TUNING.update(training_rows=32, validation_rows=50, epochs=1)
        given.work = given.work.with_name(f"{given.work.name}_smoke")
    given.work.mkdir(parents=True, exist_ok=True)
    (given.work / ".gitignore").write_text("*\n")
    kept = given.work / "runs.json" if given.smoke else RESULTS / f"{NAME}.json"
    runs: dict[str, dict[str, float]] = json.loads(kept.read_text())["results"]["runs"] if kept.exists() else {}

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
        data = {"books": "100 English Novels, other books for validation", "glue": "first rows, dev sets"}
        with contextlib.redirect_stdout(io.StringIO()):
            write_results(NAME, settings | {"data": data}, results, {})

    for kind, rate in itertools.product(MODELS, PRETRAINING["learning_rates"]):
        name = f"mlm/{kind}/{SEEDS[0]}/{rate}"
        run(name, lambda k=kind, r=rate: pretrain(k, SEEDS[0], r, given.books, given.work))
    for seed, kind in itertools.product(SEEDS, MODELS):
        rate = best_rate(runs, kind)
        run(f"mlm/{kind}/{seed}/{rate}", lambda k=kind, s=seed, r=rate: pretrain(k, s, r, given.books, given.work))
    for seed, task, rate, kind in itertools.product(SEEDS, TASKS, FINE_TUNING["learning_rates"], MODELS):
        values = (kind, seed, best_rate(runs, kind), task, rate, given.glue, given.work)
        run(f"glue/{task}/{kind}/{seed}/{rate}", lambda values=values: fine_tune(*values))
    print(json.dumps(summarise(runs), indent=2))


if __name__ == "__main__":
    main()
