"""Question answering: HotpotQA's and SQuAD's examples to windows and labels, and scores back to answers."""

import gzip
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..answering import best_span, question_windows
from ..configuration_recurrent_roberta import ANSWER_CLASSES


NOWHERE = [-100, -100]
NO_CONTEXT = -6e4  # tokens that no answer may have get the least score of their type, of float16 -65504


def read_questions(file: str | Path) -> list[dict[str, Any]]:
    """The examples of a file of HotpotQA's or SQuAD's, JSON or JSON packed by gzip, as `flat_example` gives them."""
    file = Path(file)
    stored = file.read_bytes()
    try:
        content = json.loads(gzip.decompress(stored) if file.suffix == ".gz" else stored)
        if isinstance(content, dict):
            paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
            content = [{**asked, "context": part["context"]} for part in paragraphs for asked in part["qas"]]
        examples = [flat_example(example) for example in content]
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(
            f"`file` must hold HotpotQA's or SQuAD's JSON, got {file}: {type(error).__name__}: {error}."
        ) from error
    if not examples:
        raise ValueError(f"`file` must hold at least one question, got none in {file}.")
    return examples


def flat_example(example: dict[str, Any]) -> dict[str, Any]:
    """The `id`, `question`, `context` (one text), `answer`, `answer_class` and `answer_start` of an example.

    Takes HotpotQA's own JSON, its form on the Hub (columns of titles and of sentences), SQuAD's examples, and its own
    results. A `Dataset` can be made of these, not of HotpotQA's JSON, whose lists mix types. `answer_start` is where
    the answer is annotated: in HotpotQA the first place in a supporting sentence, or else in the text; -1 without one.
    For evaluation it also has the `references`, all answers that count as right, [""] for an unanswerable question and
    [] where the answer is not given, and by whose rules they are scored: `scoring`, "hotpotqa" or "squad".
    """
    if "answer_class" in example:
        return example
    name = str(example.get("_id", example.get("id", "")))
    flat = {"id": name, "question": example["question"]}
    if isinstance(example["context"], str):
        return flat | {"context": example["context"], **squad_answer(example.get("answers"))}
    context, facts = example["context"], example.get("supporting_facts", [])
    if isinstance(context, dict):
        context = list(zip(context["title"], context["sentences"], strict=True))
    if isinstance(facts, dict):
        facts = list(zip(facts["title"], facts["sent_id"], strict=True))
    text, supporting = joined_paragraphs(context, {(title, number) for title, number in facts})
    answer = example.get("answer")
    kind = answer if answer in ("yes", "no") else "span"
    start = find_answer(text, answer, supporting) if answer and kind == "span" else -1
    return flat | {
        "context": text,
        "answer": answer or "",
        "answer_class": kind,
        "answer_start": start,
        "references": [answer] if answer else [],
        "scoring": "hotpotqa",
    }


def squad_answer(answers: dict[str, list[Any]] | list[dict[str, Any]] | None) -> dict[str, Any]:
    """The first of SQuAD's answers, in the form of its files or of the Hub; none is the class of no answer."""
    if isinstance(answers, list):
        answers = {key: [answer[key] for answer in answers] for key in ("text", "answer_start")}
    if not answers or not answers["text"]:
        found = {"answer": "", "answer_class": "none", "answer_start": -1}
        return {**found, "references": [] if answers is None else [""], "scoring": "squad"}
    return {
        "answer": answers["text"][0],
        "answer_class": "span",
        "answer_start": int(answers["answer_start"][0]),
        "references": list(answers["text"]),
        "scoring": "squad",
    }


def joined_paragraphs(
    paragraphs: Iterable[tuple[str, list[str]]], facts: set[tuple[str, int]]
) -> tuple[str, list[tuple[int, int]]]:
    """Titles and sentences as one text, a paragraph a line, and where in it those of `facts` are."""
    text, supporting = "", []
    for title, sentences in paragraphs:
        start, needed = len(text), {number for of, number in facts if of == title}
        text += f"{title}. "
        if needed:
            supporting.append((start, start + len(title)))
        for number, sentence in enumerate(sentences):
            sentence = sentence if number else sentence.lstrip()
            if number in needed:
                supporting.append((len(text), len(text) + len(sentence)))
            text += sentence
        text += "\n"
    return text, supporting


def find_answer(text: str, answer: str, supporting: list[tuple[int, int]]) -> int:
    """The first character of the answer: as whole words in a supporting piece, as such anywhere, or anyhow; or -1."""
    words = re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)")
    for start, stop in supporting:
        found = words.search(text, start, stop)
        if found:
            return found.start()
    found = words.search(text)
    return text.find(answer) if found is None else found.start()


class HotpotQAProcessor:
    """Makes windows and labels of examples, and answers of the scores that a model gives for them.

    ```python
    >>> processor = HotpotQAProcessor(tokenizer, window_size=512)
    >>> examples = Dataset.from_list([flat_example(example) for example in json.load(file)])
    >>> features = examples.map(processor)
    >>> trainer = Trainer(model, arguments, train_dataset=features, data_collator=processor.collator())
    >>> processor.answers(features, trainer.predict(features).predictions)
    ```

    Args:
        tokenizer: the model's, a fast one.
        window_size, overlap: the tokens of a window, and those of the context that neighbours share.
        max_answer_length: the most tokens of an answer.
    """

    def __init__(self, tokenizer: Any, window_size: int = 512, overlap: int = 0, max_answer_length: int = 30) -> None:
        self.tokenizer, self.window_size, self.overlap = tokenizer, window_size, overlap
        self.max_answer_length = max_answer_length

    def collator(self) -> "QuestionAnsweringCollator":
        """What makes batches of these features."""
        return QuestionAnsweringCollator(self.tokenizer.pad_token_id, self.window_size)

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        """The example as `flat_example` gives it, with its windows and labels.

        `input_ids` and `context_mask` are lists of windows; `start_positions` and `end_positions` are a window and a
        slot in it, -100 where the answer is no span or not in the text; `places` and `offsets` lead from the tokens
        of the context to their slots and to their characters.
        """
        flat = flat_example(example)
        windows = question_windows(self.tokenizer, flat["question"], flat["context"], self.window_size, self.overlap)
        start, end = NOWHERE, NOWHERE
        if flat["answer_class"] == "span" and flat["answer_start"] >= 0:
            first_character, behind = flat["answer_start"], flat["answer_start"] + len(flat["answer"])
            first = bisect_right([stop for _, stop in windows.offsets], first_character)
            last = bisect_left([begin for begin, _ in windows.offsets], behind) - 1
            if first <= last:
                start, end = list(windows.places[first]), list(windows.places[last])
        return {
            **flat,
            "input_ids": windows.input_ids,
            "context_mask": windows.context_mask,
            "start_positions": start,
            "end_positions": end,
            "answer_classes": ANSWER_CLASSES.index(flat["answer_class"]),
            "places": [list(place) for place in windows.places],
            "offsets": [list(pair) for pair in windows.offsets],
        }

    def answers(self, features: Iterable[dict[str, Any]], predictions: tuple[Any, Any, Any]) -> list[str]:
        """The answer to each feature, a literal piece of its context, yes, no, or "" where there is none.

        `predictions` are start scores and end scores, [examples, N, W], and class scores, as `Trainer.predict` and
        `compute_metrics` have them. They must be in the order of the features: a Trainer that groups examples by
        length does so in evaluation too, and loses it. `predict_answers` takes the examples instead.
        """
        found = []
        for feature, starts, ends, classes in zip(features, *predictions, strict=True):
            missing = {"offsets", "places", "context"} - feature.keys()
            if missing:
                raise ValueError(f"`features` must have what the processor made of them, got one without {missing}.")
            kind = ANSWER_CLASSES[int(torch.as_tensor(classes).argmax())]
            if kind != "span":
                found.append("" if kind == "none" else kind)
                continue
            places = torch.tensor(feature["places"]).unbind(1)
            starts, ends = torch.as_tensor(starts)[places], torch.as_tensor(ends)[places]
            if (starts <= NO_CONTEXT).any():
                raise ValueError(
                    "`predictions` must be in the order of `features`, got scores of other tokens than those of "
                    f"the context of {feature.get('id')!r}."
                )
            first, last = best_span(starts, ends, self.max_answer_length)
            found.append(feature["context"][feature["offsets"][first][0] : feature["offsets"][last][1]])
        return found


@dataclass
class QuestionAnsweringCollator:
    """Makes one batch [B, N, W] of examples with any number of windows; what they lack is padded.

    All batches have the same W, so that `Trainer` can put their scores together.
    """

    pad_token_id: int
    window_size: int

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        shape = (len(features), max(len(feature["input_ids"]) for feature in features), self.window_size)
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id),
            "attention_mask": torch.zeros(shape, dtype=torch.long),
            "context_mask": torch.zeros(shape, dtype=torch.long),
        }
        for row, feature in enumerate(features):
            for number, ids in enumerate(feature["input_ids"]):
                if len(ids) > self.window_size:
                    raise ValueError(
                        f"`input_ids` must be windows of at most `window_size` ({self.window_size}) tokens, got "
                        f"{len(ids)}."
                    )
                batch["input_ids"][row, number, : len(ids)] = torch.as_tensor(ids)
                batch["attention_mask"][row, number, : len(ids)] = 1
                batch["context_mask"][row, number, : len(ids)] = torch.as_tensor(feature["context_mask"][number])
        for name in ("start_positions", "end_positions", "answer_classes"):
            if name in features[0]:
                batch[name] = torch.tensor([feature[name] for feature in features])
        return batch


__all__ = ["HotpotQAProcessor", "QuestionAnsweringCollator", "flat_example", "read_questions"]
