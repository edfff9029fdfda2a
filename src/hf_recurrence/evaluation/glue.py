# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""GLUE's metrics of a task, from the outputs of a model."""

from typing import Any

import numpy as np

from ..data.glue import glue_task


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation, 0 where one side is constant; of two classes it is Matthews' coefficient."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / size if size > 0 else 0.0


def ranks(values: np.ndarray) -> np.ndarray:
    """The ranks of values from 1; equal ones share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[places]


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The harmonic mean of precision and recall of class 1, 0 where neither side has it."""
    count = int((predictions == 1).sum() + (labels == 1).sum())
    return 2 * float(((predictions == 1) & (labels == 1)).sum()) / count if count else 0.0


def glue_scores(task: str, predictions: Any, labels: Any) -> dict[str, float]:
    """The metrics of a task, from 0 (or -1) to 1; the first is the one that it is ranked by.

    Args:
        task: as in `read_glue`.
        predictions: what the model gives, [rows, classes], or for a score [rows] or [rows, 1].
        labels: classes or scores, [rows].

    ```python
    >>> glue_scores("cola", [[0.2, 0.8], [0.9, 0.1]], [1, 0])
    {'matthews_correlation': 1.0, 'accuracy': 1.0}
    ```"""
    kind, outputs, expected = glue_task(task), np.asarray(predictions), np.asarray(labels).reshape(-1)
    rows = len(expected)
    shapes = [(rows, kind.num_labels)] if kind.labels else [(rows,), (rows, 1)]
    if not rows or outputs.shape not in shapes:
        rule = f"`predictions` must be {' or '.join(str(list(shape)) for shape in shapes)} as `labels`"
        raise ValueError(f"{rule}, with at least one row, got {list(outputs.shape)}.")
    if not np.isfinite(outputs).all():
        raise ValueError(f"`predictions` must be finite, got {int((~np.isfinite(outputs)).sum())} that are not.")
    if kind.labels is None:
        values, expected = outputs.reshape(-1).astype(np.float64), expected.astype(np.float64)
        return {
            "spearman": correlation(ranks(values), ranks(expected)),
            "pearson": correlation(values, expected),
        }
    chosen = outputs.argmax(-1)
    found = {"accuracy": float((chosen == expected).mean())}
    if kind.metric == "matthews_correlation":
        found["matthews_correlation"] = correlation(chosen.astype(np.float64), expected.astype(np.float64))
    elif kind.metric == "f1":
        found["f1"] = f1(chosen, expected)
    return {kind.metric: found.pop(kind.metric), **found}


__all__ = ["glue_scores"]
