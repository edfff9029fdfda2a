"""Whether what a model writes keeps to the topic of what it has read ("Adding Recurrence ...", section 5.3.1)."""

import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..data.lanes import Tokens


def needed(module: str) -> Any:
    """A module of the extra `evaluate`, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is needed for this: pip install 'hf-recurrence[evaluate]'.") from error


class TopicModel:
    """Latent Dirichlet allocation over the words of documents.

    ```python
    >>> topics = TopicModel(documents("books", "train"), num_topics=20)
    >>> topics.distributions(["A text.", "Another."])  # [texts, topics], each row adds up to 1
    ```"""

    def __init__(self, texts: Iterable[str], num_topics: int = 20, max_words: int = 10_000, seed: int = 0) -> None:
        if num_topics < 2:
            raise ValueError(f"`num_topics` must be at least 2, got {num_topics}.")
        text = needed("sklearn.feature_extraction.text")
        decomposition = needed("sklearn.decomposition")
        self.vectorizer = text.CountVectorizer(stop_words="english", max_features=max_words)
        counts = self.vectorizer.fit_transform(texts)
        self.model = decomposition.LatentDirichletAllocation(num_topics, random_state=seed).fit(counts)

    def distributions(self, texts: list[str]) -> np.ndarray:
        """The shares of the topics in each text, [texts, topics]."""
        shares: np.ndarray = self.model.transform(self.vectorizer.transform(texts))
        return shares

    def words(self, count: int = 8) -> list[list[str]]:
        """The words that tell most of each topic."""
        names = self.vectorizer.get_feature_names_out()
        return [[str(names[index]) for index in row.argsort()[::-1][:count]] for row in self.model.components_]


def divergences(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The Jensen-Shannon divergences of rows of shares, [rows, topics] both, in bits: from 0 to 1. [rows]"""
    distances: np.ndarray = needed("scipy.spatial.distance").jensenshannon(first, second, base=2, axis=1)
    return distances**2


def pick_contexts(tokens: Tokens, length: int, count: int, seed: int) -> list[np.ndarray]:
    """Pieces of `length` tokens from random places of random documents, drawn by how many places they have."""
    room = np.maximum(np.asarray(tokens.lengths) - length + 1, 0)
    if not room.sum():
        raise ValueError(f"`tokens` must have a document of at least {length} tokens, got none.")
    random = np.random.default_rng(seed)
    places = np.sort(random.integers(0, room.sum(), count))
    ends = room.cumsum()
    found = np.searchsorted(ends, places, side="right")
    return [
        tokens.read(int(n), int(p - ends[n] + room[n]), int(p - ends[n] + room[n]) + length)
        for n, p in zip(found, places)
    ]


@torch.no_grad()
def greedy(model: Any, rows: list[np.ndarray], length: int, batch_size: int, progress: bool) -> torch.Tensor:
    """The `length` likeliest tokens after each of rows that are equally long, one by one. [rows, length]"""
    ids = torch.from_numpy(np.stack(rows).astype(np.int64))
    found = []
    for part in tqdm(ids.split(batch_size), unit="batch", disable=not progress):
        part = part.to(model.device)
        settings = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
        out = model.generate(part, attention_mask=torch.ones_like(part), **settings)
        found.append(out[:, part.shape[1] :].cpu())
    return torch.cat(found)


def topic_propagation(
    recurrent: Any,
    baseline: Any,
    tokenizer: Any,
    topics: TopicModel,
    tokens: Tokens,
    num_contexts: int = 8000,
    context_length: int | None = None,
    continuation_length: int = 30,
    batch_size: int = 32,
    num_samples: int = 10,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """How far the topics of greedy continuations are from those of their contexts, recurrent model against baseline.

    The recurrent model reads a context and then one token more, which begins a new window: of the context it has the
    state only. The baseline gets that one token (and the overlap, if there is one). `divergence` is the mean
    Jensen-Shannon divergence in bits, `share` of the contexts whose recurrent continuation is nearer, among those
    that differ, and `p_value` of a share so large by chance (one-sided binomial test).

    Args:
        topics: fitted on training documents.
        tokens: the documents that contexts are drawn from.
        context_length: whole windows, one by default.
        num_samples: contexts that are returned with both continuations.
    """
    config = recurrent.config
    width, overlap = config.window_size, getattr(config, "overlap", 0)
    length = width if context_length is None else context_length
    if length < width or (length - width) % (width - overlap):
        raise ValueError(
            f"`context_length` must be whole windows of {width} tokens with an overlap of {overlap}, got {length}."
        )
    if num_contexts < 1:
        raise ValueError(f"`num_contexts` must be at least 1, got {num_contexts}.")
    pieces = pick_contexts(tokens, length + 1, num_contexts, seed)
    written = {
        "recurrent": greedy(recurrent, pieces, continuation_length, batch_size, progress),
        "baseline": greedy(
            baseline, [piece[length - overlap :] for piece in pieces], continuation_length, batch_size, progress
        ),
    }
    contexts = [tokenizer.decode(piece[:length]) for piece in pieces]
    texts = {name: [tokenizer.decode(row) for row in ids] for name, ids in written.items()}
    shares = topics.distributions(contexts)
    found = {name: divergences(shares, topics.distributions(of)) for name, of in texts.items()}
    nearer, differ = found["recurrent"] < found["baseline"], found["recurrent"] != found["baseline"]
    count, total = int(nearer.sum()), int(differ.sum())
    test = needed("scipy.stats").binomtest(count, total, alternative="greater") if total else None
    chosen = np.sort(np.random.default_rng(seed).permutation(num_contexts)[:num_samples])
    return {
        "divergence": {name: float(values.mean()) for name, values in found.items()},
        "share": count / total if total else 0.5,
        "p_value": float(test.pvalue) if test else 1.0,
        "contexts": num_contexts,
        "differing": total,
        "context_length": length,
        "continuation_length": continuation_length,
        "topics": topics.words(),
        "samples": [
            {
                "context": contexts[index],
                "token": tokenizer.decode(pieces[index][length:]),
                "topic": int(shares[index].argmax()),
                **{name: texts[name][index] for name in texts},
                "divergence": {name: float(values[index]) for name, values in found.items()},
            }
            for index in chosen
        ],
    }


__all__ = ["TopicModel", "topic_propagation"]
