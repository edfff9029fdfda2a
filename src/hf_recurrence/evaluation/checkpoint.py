"""A checkpoint measured on data, and what was found written beside it."""

import hashlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from ..data.documents import documents
from ..data.glue import GLUE_TASKS, glue_task, read_glue
from ..data.question_answering import HotpotQAProcessor, read_questions
from ..data.token_store import TokenStore, tokenizer_digest
from ..metrics import add_record, files_digest, run_record
from ..segment import check_finite
from .glue import glue_scores
from .masked_lm import evaluate_pseudo_perplexity
from .perplexity import RECURRENT, changed_windows, data_digest, evaluate_perplexity
from .question_answering import evaluate_answers
from .state_use import answer_state_gain, state_gain
from .topics import TopicModel, topic_propagation


# metric -> the end of the names of models that it is of, and how these are loaded
METRICS: dict[str, tuple[tuple[str, ...], Any]] = {
    "perplexity": (("LMHeadModel", "ForCausalLM"), AutoModelForCausalLM),
    "state_gain": (("LMHeadModel", "ForCausalLM"), AutoModelForCausalLM),
    "topics": (("LMHeadModel", "ForCausalLM"), AutoModelForCausalLM),
    "pseudo_perplexity": (("ForMaskedLM",), AutoModelForMaskedLM),
    "answers": (("ForQuestionAnswering",), AutoModelForQuestionAnswering),
    **dict.fromkeys(GLUE_TASKS, (("ForSequenceClassification",), AutoModelForSequenceClassification)),
}
OVER_TEXTS = ("perplexity", "state_gain", "topics", "pseudo_perplexity")
# texts are read up to this many tokens a row for the gain from the state
STATE_TOKENS, STATE_ROWS = 6000, 8


def choose_metrics(config: Any, metrics: Sequence[str] | None, baseline: Any = None) -> list[str]:
    """The metrics that were asked for, or those of this type of model; others are refused."""
    names = tuple(config.architectures or ())
    if metrics:
        for metric in metrics:
            if metric not in METRICS:
                raise ValueError(f"`metrics` must be of {', '.join(METRICS)}, got {metric!r}.")
            if not any(name.endswith(METRICS[metric][0]) for name in names):
                raise ValueError(
                    f"`metrics` must fit the checkpoint, a {' or '.join(names) or config.model_type}, got {metric!r}, "
                    f"which is of models that end in {' or '.join(METRICS[metric][0])}."
                )
            if metric in ("state_gain", "topics") and config.model_type not in RECURRENT:
                raise ValueError(
                    f"`metrics` must fit the checkpoint, got {metric!r} for the type {config.model_type!r}, which "
                    "hands no state from window to window."
                )
        if "topics" in metrics and baseline is None:
            raise ValueError("`baseline` must be a checkpoint to compare topics with, got None.")
        if len({METRICS[metric][1] for metric in metrics}) > 1:
            raise ValueError(f"`metrics` must be of one kind of model, got {', '.join(metrics)}.")
        return list(metrics)
    for metric in ("perplexity", "pseudo_perplexity", "answers"):
        if any(name.endswith(METRICS[metric][0]) for name in names):
            both = metric == "perplexity" and config.model_type in RECURRENT
            return [metric, "state_gain"] if both else [metric]
    raise ValueError(
        f"`metrics` must be given for a checkpoint of {' or '.join(names) or config.model_type}, got none. There are "
        f"{', '.join(METRICS)}."
    )


def load_tokenizer(source: str | os.PathLike[str], config: Any) -> Any:
    """The tokenizer of a folder or Hub id, or None for "bytes"; one with more tokens than the model is refused."""
    if str(source) == "bytes":
        if config.vocab_size < 256:
            raise ValueError(f"`tokenizer` must fit the model's `vocab_size` ({config.vocab_size}), got 256 bytes.")
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`tokenizer` must be a folder or Hub id with a tokenizer, or bytes, got {str(source)!r}: {error}"
        ) from error
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"`tokenizer` must have at most the model's `vocab_size` ({config.vocab_size}) tokens, got "
            f"{len(tokenizer)} in {str(source)!r}: it is another model's."
        )
    return tokenizer


def first_words(texts: Iterable[str], max_documents: int | None, max_words: int | None) -> Iterator[str]:
    """The first documents, and of each the first words with all between them."""
    for text in itertools.islice(texts, max_documents):
        if max_words is None:
            yield text
            continue
        place = 0
        for word in text.split()[:max_words]:
            place = text.index(word, place) + len(word)
        yield text[:place]


def evaluate(
    checkpoint: str | os.PathLike[str],
    data: str | os.PathLike[str],
    split: str = "test",
    metrics: Sequence[str] | None = None,
    windows: Sequence[int] | None = None,
    overlaps: Sequence[int] | None = None,
    batch_size: int = 8,
    tokenizer: str | os.PathLike[str] | None = None,
    column: str = "text",
    max_documents: int | None = None,
    max_words: int | None = None,
    max_tokens: int | None = None,
    baseline: str | os.PathLike[str] | None = None,
    max_contexts: int = 8000,
    name: str | None = None,
    output: str | os.PathLike[str] | None = None,
    device: str | None = None,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """The record of what a checkpoint does on data, which is also put into `metrics.json` beside the checkpoint.

    Args:
        checkpoint: a folder or Hub id, of our models or of a plain causal, masked or classifying one.
        data: what `documents` takes, or a folder of `TokenStore`, for perplexities and the state; a file of HotpotQA
            or SQuAD for `answers`; GLUE's folder for its tasks.
        split: of the data ("validation" for GLUE; files of questions have none).
        metrics: "perplexity" and "state_gain" (the default for causal models), "topics", "pseudo_perplexity",
            "answers", or GLUE's tasks.
        windows, overlaps: window sizes and overlaps for perplexity, each with each; by default the model's own.
        batch_size: rows of a call.
        tokenizer: by default the checkpoint's; "bytes" for models of bytes.
        column: of rows, that with the text.
        max_documents, max_words: only the first documents, and the first words of each.
        max_tokens: so many tokens, chosen at random, for `pseudo_perplexity`.
        baseline, max_contexts: for `topics`, the checkpoint to compare with, and the number of contexts. Topics are
            learned from the train split.
        name: of the record, by default of data and split; a record of that name is replaced.
        output: the folder for metrics.json, where it shall not be the checkpoint's. A run that is interrupted goes on
            from what it left there.

    ```python
    >>> found = evaluate("my-model", "books", overlaps=[0, 50])["results"]["perplexity"]
    >>> found["window 300, overlap 50"]["word_perplexity"]
    ```"""
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    chosen = choose_metrics(config, metrics, baseline)
    folder = Path(output) if output is not None else Path(checkpoint) if Path(checkpoint).is_dir() else None
    name = name or f"evaluate-{Path(data).name or 'data'}-{split}"
    found_tokenizer = load_tokenizer(checkpoint if tokenizer is None else tokenizer, config)
    if not Path(data).exists() and chosen[0] not in OVER_TEXTS:
        raise ValueError(f"`data` must be a file or folder, got {str(data)!r}.")
    loader = METRICS[chosen[0]][1]
    if dtype not in ("float32", "float64", "bfloat16", "float16"):
        raise ValueError(f"`dtype` must be float32, float64, bfloat16 or float16, got {dtype!r}.")
    # not by the argument, whose name changed from transformers 4 to 5
    model = loader.from_pretrained(checkpoint, trust_remote_code=trust_remote_code).to(getattr(torch, dtype)).eval()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device)
    check_finite(model)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    resume = None if folder is None else folder / f"{name}.partial"
    common: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
    if chosen[0] in OVER_TEXTS:

        def measure(store: Any) -> dict[str, Any]:
            results: dict[str, Any] = {}
            for metric in chosen:
                if metric == "perplexity":
                    results[metric] = perplexities(model, store, windows, overlaps, resume, **common)
                elif metric == "state_gain":
                    results[metric] = state_gain(model, text_rows(model, store))
                elif metric == "topics":
                    other: Any = loader.from_pretrained(baseline, trust_remote_code=trust_remote_code)
                    topics = TopicModel(documents(data, "train", column))
                    results[metric] = topic_propagation(
                        model, other.to(device).eval(), found_tokenizer, topics, store, max_contexts, **common
                    )
                else:
                    results[metric] = evaluate_pseudo_perplexity(
                        model, store, found_tokenizer, max_tokens=max_tokens, **common
                    )
            return results

        results, about = with_store(data, split, column, found_tokenizer, max_documents, max_words, measure)
    elif chosen == ["answers"]:
        results = {"answers": evaluate_answers(model, found_tokenizer, Path(data), **common)}
        if config.model_type == "recurrent_roberta":
            results["answer_state_gain"] = answer_state_gain(
                model, question_batches(found_tokenizer, config, data, batch_size)
            )
        about = {"sha256": files_digest([data]), "examples": results["answers"]["count"]}
    else:
        results = {task: evaluate_glue(model, found_tokenizer, data, task, split, **common) for task in chosen}
        about = {"sha256": {task: rows_digest(read_glue(data, task, split)) for task in chosen}}
    settings = {
        "checkpoint": Path(checkpoint).name,
        "model_type": config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "metrics": chosen,
        "batch_size": batch_size,
        "max_documents": max_documents,
        "max_words": max_words,
        "dtype": dtype,
        "device": str(device),
    }
    record = run_record({"name": Path(data).name, "split": split, **about}, settings, results)
    if folder is not None:
        record["file"] = str(add_record(folder, name, record))
    return {"name": name, **record}


def with_store(
    data: str | os.PathLike[str],
    split: str,
    column: str,
    tokenizer: Any,
    max_documents: int | None,
    max_words: int | None,
    measure: Callable[[Any], dict[str, Any]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `measure` gives for the tokens of the data, and what the data are."""
    with tempfile.TemporaryDirectory() as scratch:
        if (Path(data) / "store.json").is_file():
            if max_documents is not None or max_words is not None:
                raise ValueError("`max_documents` and `max_words` must be left out for a folder of tokens.")
            store = TokenStore(data)
            if store.manifest["tokenizer"] != tokenizer_digest(tokenizer):
                raise ValueError(f"`tokenizer` must be that of the tokens in `data`, got another for {str(data)!r}.")
        else:
            texts = first_words(documents(data, split, column), max_documents, max_words)
            store = TokenStore.build(scratch, texts, tokenizer)
        results = measure(store)
        about = {
            "sha256": data_digest(store) if len(store) else None,
            "documents": len(store),
            "tokens": store.num_tokens,
            "words": int(store.num_words.sum()),
        }
    return results, about


def perplexities(
    model: Any,
    store: Any,
    windows: Sequence[int] | None,
    overlaps: Sequence[int] | None,
    resume: Path | None,
    **settings: Any,
) -> dict[str, dict[str, Any]]:
    """The results of `evaluate_perplexity` for each window with each overlap; all are checked before the first."""
    own: list[int | None] = [None]
    pairs = list(itertools.product(windows or own, overlaps or own))
    for window, overlap in pairs:
        with changed_windows(model, window, overlap):
            pass
    found = {}
    for window, overlap in pairs:
        path = None if resume is None else resume.with_name(f"{resume.name}.{window}.{overlap}.json")
        row = evaluate_perplexity(model, store, window, overlap, resume=path, **settings)
        found[f"window {row['window_size']}, overlap {row['overlap']}"] = row
    return found


def text_rows(model: Any, store: Any) -> torch.Tensor:
    """The starts of the longest documents as rows [B, T] of the same length."""
    order = sorted(range(len(store)), key=lambda document: -int(store.lengths[document]))
    length = min(int(store.lengths[order[0]]), max(STATE_TOKENS, 3 * model.config.window_size))
    chosen = [document for document in order[:STATE_ROWS] if int(store.lengths[document]) >= length]
    return torch.stack([torch.from_numpy(store.read(document, 0, length).astype("int64")) for document in chosen])


def question_batches(
    tokenizer: Any, config: Any, data: str | os.PathLike[str], batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """The questions of a file in batches, with their answers."""
    processor = HotpotQAProcessor(tokenizer, config.window_size, config.overlap)
    collate, examples = processor.collator(), read_questions(Path(data))
    for first in range(0, len(examples), batch_size):
        yield collate([processor(example) for example in examples[first : first + batch_size]])


@torch.no_grad()
def evaluate_glue(
    model: Any,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    task: str,
    split: str = "validation",
    batch_size: int = 8,
    progress: bool = True,
) -> dict[str, Any]:
    """The scores of a classifying model on a task of GLUE, first the one that it is ranked by.

    ```python
    >>> evaluate_glue(model, tokenizer, "glue", "rte")
    {'accuracy': 0.66, 'count': 277, 'seconds': 12.3}
    ```"""
    kind = glue_task(task)
    if model.config.num_labels != kind.num_labels:
        raise ValueError(
            f"`model` must have {kind.num_labels} outputs for the task {task!r}, got {model.config.num_labels}."
        )
    rows = read_glue(folder, task, split)
    start, outputs = time.monotonic(), []
    for first in tqdm(range(0, len(rows), batch_size), unit="batch", disable=not progress):
        batch = rows[first : first + batch_size]
        texts = [list(batch[column]) for column in kind.texts]
        inputs = tokenizer(*texts, padding=True, truncation=True, max_length=glue_length(model), return_tensors="pt")
        outputs.append(model(**inputs.to(model.device), return_dict=True).logits.double().cpu())
    scores: dict[str, Any] = glue_scores(task, torch.cat(outputs).numpy(), list(rows["label"]))
    return scores | {"count": len(rows), "seconds": time.monotonic() - start}


def glue_length(model: Any) -> int:
    """The most tokens of a text that the model takes; RoBERTa's positions begin behind that of the pad."""
    most: int = model.config.max_position_embeddings
    return most - 2 if "roberta" in model.config.model_type else most


def rows_digest(rows: datasets.Dataset) -> str:
    """The sha256 of rows of texts and labels."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(sorted(row.items())).encode())
    return digest.hexdigest()


__all__ = ["METRICS", "evaluate", "evaluate_glue"]
