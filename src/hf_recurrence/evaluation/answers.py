"""Scores of answers by the rules of HotpotQA and of SQuAD."""

import re
import string
from collections import Counter
from collections.abc import Sequence


# Answers of HotpotQA that share no word with others.
WHOLE_ANSWERS = ("yes", "no", "noanswer")


def normalized(answer: str) -> str:
    """The answer in lower case, without punctuation, articles and spaces that do not part words."""
    text = "".join(character for character in answer.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def word_f1(found: str, expected: str) -> float:
    """The harmonic mean of precision and recall of words; 0 where none is common, so also of two empty answers."""
    words, right = found.split(), expected.split()
    common = sum((Counter(words) & Counter(right)).values())
    return 2 * common / (len(words) + len(right)) if common else 0.0


def answer_f1(prediction: str, reference: str) -> float:
    """HotpotQA's F1 of an answer: that of its words, but yes, no and noanswer must be met exactly.

    Two empty answers have an F1 of 0, as by HotpotQA's own script, although they match exactly; by SQuAD 2's they have
    1, see `squad_f1`.

    >>> answer_f1("the river Nile", "Nile"), answer_f1("yes", "yes it is"), answer_f1("", "")
    (0.6666666666666666, 0.0, 0.0)
    """
    found, expected = normalized(prediction), normalized(reference)
    if found != expected and (found in WHOLE_ANSWERS or expected in WHOLE_ANSWERS):
        return 0.0
    return word_f1(found, expected)


def squad_f1(prediction: str, reference: str) -> float:
    """SQuAD's F1 of an answer, that of its words; the empty answer of an unanswerable question must be met exactly.

    >>> squad_f1("the river Nile", "Nile"), squad_f1("yes", "yes it is"), squad_f1("", "")
    (0.6666666666666666, 0.5, 1.0)
    """
    found, expected = normalized(prediction), normalized(reference)
    return word_f1(found, expected) if found and expected else float(found == expected)


SCORING = {"hotpotqa": answer_f1, "squad": squad_f1}


def answer_scores(prediction: str, references: Sequence[str], scoring: str = "hotpotqa") -> tuple[float, float]:
    """The F1 and the exact match of an answer, from 0 to 1, each with the reference that gives the best one.

    Args:
        scoring: by whose rules, "hotpotqa" or "squad". They differ for yes, no and empty answers.
    """
    if scoring not in SCORING:
        raise ValueError(f"`scoring` must be one of {sorted(SCORING)}, got {scoring!r}.")
    if not references:
        raise ValueError("`references` must hold at least one answer, got none.")
    f1 = max(SCORING[scoring](prediction, reference) for reference in references)
    return f1, float(any(normalized(prediction) == normalized(reference) for reference in references))


def mean_scores(scores: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The means of F1 and exact match, in percent, and of how many answers."""
    f1, exact = (100 * sum(values) / len(scores) for values in zip(*scores, strict=True))
    return {"f1": f1, "exact_match": exact, "count": len(scores)}


def scores_by_class(
    predictions: Sequence[str],
    references: Sequence[str | Sequence[str]],
    classes: Sequence[str],
    scoring: str = "hotpotqa",
) -> dict[str, dict[str, float]]:
    """`f1`, `exact_match` and `count` of the answers of each class (span, yes, no, none), in percent.

    Args:
        references: the right answer of each example, or a list of those that count as right.
        classes: the class of the right answer of each.

    >>> scores_by_class(["yes", "Nile", "Rhine"], ["yes", "the Nile", "Nile"], ["yes", "span", "span"])["span"]
    {'f1': 50.0, 'exact_match': 50.0, 'count': 2}
    """
    scores: dict[str, list[tuple[float, float]]] = {}
    for prediction, right, kind in zip(predictions, references, classes, strict=True):
        of_one = answer_scores(prediction, [right] if isinstance(right, str) else right, scoring)
        scores.setdefault(kind, []).append(of_one)
    return {kind: mean_scores(values) for kind, values in scores.items()}
