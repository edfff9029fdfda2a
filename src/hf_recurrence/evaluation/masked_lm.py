"""How well a masked language model predicts documents: each token from all others of its segment.

Axes: B rows, T tokens, V vocabulary.
"""

import math
import time
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from tqdm.auto import tqdm

from ..data.masked_lm import MaskedSegments
from ..segment import check_finite
from .flops import flops_per_token
from .perplexity import CountedTokens, at_least_float32, check_tokens


@torch.no_grad()
def evaluate_pseudo_perplexity(
    model: Any,
    tokens: CountedTokens,
    tokenizer: Any,
    segment_length: int = 128,
    batch_size: int = 8,
    max_tokens: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """The pseudo-perplexity of a masked language model: every token is masked once, alone, and predicted.

    It takes as many passes over a segment as that has tokens, so `max_tokens` may choose some at random. `loss` is the
    mean in nats; `word_perplexity`, of the words of the texts, is None unless all tokens were masked.

    Args:
        segment_length: tokens that see each other, the tokenizer's first and last included.
        batch_size: rows of a call, each with one token masked. The result does not depend on it.
        max_tokens, seed: how many tokens are masked, and which.

    ```python
    >>> evaluate_pseudo_perplexity(model, store, tokenizer, max_tokens=2000)["pseudo_perplexity"]
    ```"""
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"`max_tokens` must be at least 1, got {max_tokens}.")
    if tokenizer.mask_token_id is None:
        raise ValueError(f"`tokenizer` must have a mask token, got {type(tokenizer).__name__} without.")
    check_finite(model)
    check_tokens(model, tokens)
    segments = MaskedSegments(tokens, tokenizer, segment_length)
    sizes = segments.pieces[:, 2] - segments.pieces[:, 1]
    places = [(number, place) for number in np.argsort(-sizes, kind="stable") for place in range(1, sizes[number] + 1)]
    if max_tokens is not None and max_tokens < len(places):
        chosen = np.random.default_rng(seed).choice(len(places), max_tokens, replace=False)
        places = [places[index] for index in np.sort(chosen)]
    nats, start = 0.0, time.monotonic()
    training = model.training
    model.eval()
    try:
        for first in tqdm(range(0, len(places), batch_size), unit="batch", disable=not progress):
            batch = places[first : first + batch_size]
            rows = [torch.from_numpy(segments[int(number)]["input_ids"]) for number, _ in batch]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
            index = torch.arange(len(batch)), torch.tensor([int(place) for _, place in batch])
            targets = ids[index].to(model.device)
            ids[index] = tokenizer.mask_token_id
            logits = model(ids.to(model.device), attention_mask=mask.long().to(model.device), return_dict=True).logits
            nats += F.cross_entropy(at_least_float32(logits[index]), targets, reduction="none").double().sum().item()
    finally:
        model.train(training)
    seconds, count, words = time.monotonic() - start, len(places), int(tokens.num_words.sum())
    whole = count == int(sizes.sum())
    return {
        "model_type": model.config.model_type,
        "segment_length": segment_length,
        "loss": nats / count,
        "pseudo_perplexity": math.exp(min(nats / count, 700)),
        "word_perplexity": math.exp(min(nats / words, 700)) if whole and words else None,
        "bits_per_token": nats / count / math.log(2),
        "tokens": count,
        "words": words,
        "documents": len(tokens.lengths),
        "flops_per_token": flops_per_token(model.config, segment_length),
        "seconds": seconds,
    }


__all__ = ["evaluate_pseudo_perplexity"]
