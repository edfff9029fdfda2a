"""HotpotQA's scores of answers, as a metric that needs no network."""

import re
import string
from collections import Counter
from typing import Any

import datasets
import evaluate


def normalized(answer: str) -> str:
    """The answer in lower case, without punctuation, articles and spaces that do not part words."""
    text = "".join(character for character in answer.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def answer_f1(prediction: str, reference: str) -> float:
    """The harmonic mean of precision and recall of words; yes, no and an empty answer must be met exactly."""
    found, expected = normalized(prediction), normalized(reference)
    if found != expected and not {found, expected}.isdisjoint(("yes", "no", "noanswer", "")):
        return 0.0
    if found == expected:
        return 1.0
    words, right = found.split(), expected.split()
    common = sum((Counter(words) & Counter(right)).values())
    return 2 * common / (len(words) + len(right))


class HotpotQAMetric(evaluate.Metric):  # type: ignore[misc]
    """HotpotQA's `f1` and `exact_match` of answers, in percent of the examples.

    ```python
    >>> HotpotQAMetric().compute(predictions=["the Nile"], references=["Nile River"])
    {'f1': 66.66666666666667, 'exact_match': 0.0}
    ```"""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Word F1 and exact match of answers, after HotpotQA's normalisation.",
            citation="Yang et al. 2018, HotpotQA: A dataset for diverse, explainable multi-hop question answering.",
            inputs_description="predictions and references: one answer each.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: list[str], references: list[str], **kwargs: Any) -> dict[str, float]:
        pairs = list(zip(predictions, references, strict=True))
        return {
            "f1": 100 * sum(answer_f1(*pair) for pair in pairs) / len(pairs),
            "exact_match": 100 * sum(normalized(a) == normalized(b) for a, b in pairs) / len(pairs),
        }


__all__ = ["HotpotQAMetric", "answer_f1", "normalized"]
