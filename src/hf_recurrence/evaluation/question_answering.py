"""Question answering: the answers of a model to many questions, and their scores."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..answering import question_windows
from ..configuration_recurrent_roberta import ANSWER_CLASSES, RecurrentRobertaConfig
from ..data.question_answering import HotpotQAProcessor, flat_example, read_questions
from .answers import answer_scores, mean_scores


# Examples are tokenised so many batches at a time, of which those of like lengths come together.
BATCHES_AHEAD = 16


def evaluate_answers(
    model: Any,
    tokenizer: Any,
    examples: str | Path | Sequence[dict[str, Any]],
    batch_size: int = 8,
    max_answer_length: int = 30,
    progress: bool = True,
) -> dict[str, Any]:
    """`f1` and `exact_match` of a model's answers in percent and their `count`, also of each class of right answer.

    Every example is scored by the rules of its data: HotpotQA's, or SQuAD's with the best of several right answers.
    `by_class` has the same three of span, yes, no and none (unanswerable), of those that occur, and
    `class_accuracy` is the share of answers that are of the right class.

    ```python
    >>> evaluate_answers(model, tokenizer, "hotpot_dev_distractor_v1.json")
    {'f1': 49.1, 'exact_match': 44.6, 'count': 7405, 'by_class': {'span': {...}, ...}, 'class_accuracy': 97.2}
    ```

    Args:
        model: a `RecurrentRobertaForQuestionAnswering`.
        tokenizer: the model's, a fast one.
        examples: those of HotpotQA or SQuAD, or a file of either, .json or .json.gz.
        batch_size: documents that are read together.
        max_answer_length: the most tokens of a span.
        progress: whether a bar is shown.
    """
    flat = read_questions(examples) if isinstance(examples, str | Path) else [flat_example(one) for one in examples]
    if not flat:
        raise ValueError("`examples` must hold at least one example, got none.")
    for example in flat:
        if not example["references"]:
            raise ValueError(f"`examples` must have answers to be scored, got {example['id']!r} without one.")
    found = predict_answers(model, tokenizer, flat, batch_size, max_answer_length, progress)
    scores: dict[str, list[tuple[float, float]]] = {}
    right = 0
    for answer, example in zip(found, flat, strict=True):
        of_one = answer_scores(answer["answer"], example["references"], example["scoring"])
        scores.setdefault(example["answer_class"], []).append(of_one)
        right += answer["answer_class"] == example["answer_class"]
    everything = mean_scores([pair for pairs in scores.values() for pair in pairs])
    by_class = {kind: mean_scores(scores[kind]) for kind in ANSWER_CLASSES if kind in scores}
    return {**everything, "by_class": by_class, "class_accuracy": 100 * right / len(flat)}


@torch.no_grad()
def predict_answers(
    model: Any,
    tokenizer: Any,
    examples: Sequence[dict[str, Any]],
    batch_size: int = 8,
    max_answer_length: int = 30,
    progress: bool = True,
) -> list[dict[str, str]]:
    """The `id`, `answer` and `answer_class` that a model gives to each example; see `evaluate_answers`."""
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
    config = model.config
    if config.model_type != RecurrentRobertaConfig.model_type:
        raise ValueError(
            f"`model` must be a RecurrentRobertaForQuestionAnswering, got one of the type {config.model_type!r}."
        )
    processor = HotpotQAProcessor(tokenizer, config.window_size, config.overlap, max_answer_length)
    flat = [flat_example(example) for example in examples]
    check_questions(flat, processor)
    collate, answers, training = processor.collator(), [], model.training
    model.eval()
    try:
        with tqdm(total=len(flat), desc="questions", disable=not progress) as bar:
            for ahead in in_pieces(flat, batch_size * BATCHES_AHEAD):
                features = [processor(example) for example in ahead]
                of_piece: dict[int, dict[str, str]] = {}
                order = sorted(range(len(features)), key=lambda index: len(features[index]["input_ids"]))
                for chosen in in_pieces(order, batch_size):
                    rows = [features[index] for index in chosen]
                    batch = collate(rows)
                    inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
                    outputs = model(**inputs, return_dict=True)
                    scores = (outputs.start_logits, outputs.end_logits, outputs.class_logits)
                    texts = processor.answers(rows, tuple(part.float().cpu() for part in scores))
                    kinds = outputs.class_logits.argmax(-1).tolist()
                    for index, text, kind in zip(chosen, texts, kinds, strict=True):
                        name = str(features[index]["id"])
                        of_piece[index] = {"id": name, "answer": text, "answer_class": ANSWER_CLASSES[kind]}
                    bar.update(len(rows))
                answers += [of_piece[index] for index in range(len(features))]
    finally:
        model.train(training)
    return answers


def in_pieces(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while piece := list(islice(rest, size)):
        yield piece


def check_questions(examples: list[dict[str, Any]], processor: HotpotQAProcessor) -> None:
    """Raises a `ValueError` for the first example that cannot be asked, before any of them is."""
    for example in examples:
        beginning = example["context"].strip()[:20]
        try:
            question_windows(
                processor.tokenizer, example["question"], beginning, processor.window_size, processor.overlap
            )
        except ValueError as error:
            raise ValueError(f"`examples` must all fit the model, but of {example['id']!r} {error}") from error


__all__ = ["evaluate_answers", "predict_answers"]
