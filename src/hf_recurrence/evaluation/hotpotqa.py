"""HotpotQA's scores of answers, as a metric that needs no network."""

from typing import Any

import datasets
import evaluate

from .answers import answer_f1, answer_scores, mean_scores, normalized, scores_by_class, squad_f1


class HotpotQAMetric(evaluate.Metric):  # type: ignore[misc]
    """HotpotQA's `f1` and `exact_match` of answers, in percent of the examples, by the rules of `answer_f1`.

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
        pairs = zip(predictions, references, strict=True)
        scores = mean_scores([answer_scores(prediction, [reference]) for prediction, reference in pairs])
        return {name: scores[name] for name in ("f1", "exact_match")}


__all__ = ["HotpotQAMetric", "answer_f1", "answer_scores", "normalized", "scores_by_class", "squad_f1"]
