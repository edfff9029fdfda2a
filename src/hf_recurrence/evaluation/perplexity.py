"""How well a language model predicts documents, window by window: every token but a document's first, once.

Axes: B rows, T tokens, W window, D width, V vocabulary.
"""

import contextlib
import hashlib
import inspect
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional as F
from tqdm.auto import tqdm

from ..data.lanes import Tokens
from ..data.token_store import write_json
from ..segment import check_finite
from ..windowing import plan_windows
from .flops import flops_per_token


RECURRENT = ("recurrent_gpt2", "block_recurrent")
# logits are made of no more numbers than these at a time: from hidden states, and of whole windows of other models
MAX_LOGITS, MAX_WINDOW_LOGITS = 1 << 24, 1 << 26
# block-recurrent models run whole blocks together, this many tokens of a row in a call
BLOCK_TOKENS = 2048


class CountedTokens(Tokens, Protocol):
    """Documents as token ids, with the words and bytes of their texts: mostly a `TokenStore`."""

    @property
    def num_words(self) -> np.ndarray:
        """The number of words of each document."""

    @property
    def num_bytes(self) -> np.ndarray:
        """The number of bytes of each document."""


@contextlib.contextmanager
def changed_windows(model: Any, window_size: int | None, overlap: int | None) -> Iterator[tuple[int, int]]:
    """The window and overlap that the model is run with meanwhile; None leaves what it has."""
    config = model.config
    if config.model_type == "recurrent_gpt2":
        before = (config.window_size, config.overlap)
        config.window_size = before[0] if window_size is None else window_size
        config.overlap = before[1] if overlap is None else overlap
        try:
            config.check_recurrence()
            yield config.window_size, config.overlap
        finally:
            config.window_size, config.overlap = before
    elif config.model_type == "block_recurrent":
        if overlap:
            raise ValueError(f"`overlap` must be 0 for a model of type 'block_recurrent', got {overlap}.")
        width = config.window_size
        config.window_size = width if window_size is None else window_size
        try:
            if config.window_size < 1:
                raise ValueError(f"`window_size` must be at least 1, got {window_size}.")
            yield config.window_size, 0
        finally:
            config.window_size = width
    else:
        most = getattr(config, "max_position_embeddings", None)
        size = most if window_size is None else window_size
        if size is None:
            raise ValueError("`window_size` must be given for a model whose config has no largest one, got None.")
        if most is not None and size > most:
            raise ValueError(
                f"`window_size` must be at most `max_position_embeddings` ({most}), the positions that the model "
                f"knows, got {size}."
            )
        plan_windows(0, size, overlap or 0)  # the rules of both
        yield size, overlap or 0


def check_tokens(model: Any, tokens: Tokens) -> None:
    """Raises a `ValueError` for documents that cannot be scored by this model."""
    lengths = np.asarray(tokens.lengths)
    if not len(lengths):
        raise ValueError("`tokens` must hold at least one document, got none.")
    short = np.flatnonzero(lengths < 2)
    if len(short):
        raise ValueError(
            f"`tokens` must be documents of at least 2 tokens, one to read and one to predict, got "
            f"{int(lengths[short[0]])} in document {int(short[0])}."
        )
    vocab_size = model.config.vocab_size
    for document, length in enumerate(lengths.tolist()):
        most = int(tokens.read(document, 0, length).max())
        if most >= vocab_size:
            raise ValueError(
                f"`tokens` must be ids below the model's `vocab_size` ({vocab_size}), got {most} in document "
                f"{document}: they are another tokenizer's."
            )


def data_digest(tokens: Tokens) -> str:
    """The sha256 of all documents' tokens, each with its length."""
    digest = hashlib.sha256()
    for document, length in enumerate(np.asarray(tokens.lengths).tolist()):
        digest.update(length.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(tokens.read(document, 0, length), np.int32).tobytes())
    return digest.hexdigest()


class Partial:
    """What has been scored so far, in a file: a run that was ended goes on from it.

    Without a file nothing is kept. `facts` say what is measured; a file with others is refused.
    """

    def __init__(self, path: Path | None, facts: dict[str, Any], every: float, num_documents: int) -> None:
        self.path, self.facts, self.every = path, facts, every
        self.losses, self.counts = np.zeros(num_documents), np.zeros(num_documents, np.int64)
        self.place: dict[str, Any] = {}
        self.seconds, self.saves = 0.0, 0
        if path is not None and path.is_file():
            content = json.loads(path.read_text())
            if content["facts"] != facts:
                wrong = next(name for name in facts if content["facts"].get(name) != facts[name])
                raise ValueError(
                    f"`resume` must be a file of the same evaluation, got {str(path)!r}, whose `{wrong}` is another."
                )
            self.losses, self.counts = np.array(content["losses"]), np.array(content["counts"], np.int64)
            self.place, self.seconds, self.saves = content["place"], content["seconds"], content["saves"]
        self.start = self.saved = time.monotonic()

    @property
    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.start

    def cache_path(self, number: int) -> Path:
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.{number}.safetensors")

    def keep(self, place: dict[str, Any], cache: Any = None) -> None:
        """Writes all, if it is time; the file names the cache that belongs to it."""
        if self.path is None or time.monotonic() - self.saved < self.every:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.saves += 1
        if cache is not None:
            cache.save(self.cache_path(self.saves))
        content = {
            "facts": self.facts,
            "losses": self.losses.tolist(),
            "counts": self.counts.tolist(),
            "place": place,
            "seconds": self.elapsed,
            "saves": self.saves,
        }
        write_json(self.path, content)
        self.cache_path(self.saves - 1).unlink(missing_ok=True)
        self.saved = time.monotonic()

    def load_cache(self, model: Any) -> Any:
        return model.cache_class.load(self.cache_path(self.saves), device=model.device)

    def end(self) -> None:
        """Takes the files away."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.cache_path(self.saves).unlink(missing_ok=True)


def token_losses(hidden: torch.Tensor, head: Any, targets: torch.Tensor) -> torch.Tensor:
    """The losses of hidden states [tokens, D], 0 where the target is -100, logits made of few at a time. [tokens]"""
    found = []
    size = max(1, MAX_LOGITS // head.weight.shape[0])
    for part, expected in zip(hidden.split(size), targets.split(size), strict=True):
        found.append(F.cross_entropy(at_least_float32(head(part)), expected, reduction="none"))
    return torch.cat(found)


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def hidden_states(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The outputs of a recurrent model without its head; its hidden states are what the head takes. [B, T, D]"""
    outputs = model.base_model(*args, return_dict=True, **kwargs)
    if model.config.model_type == "block_recurrent":
        outputs.last_hidden_state = outputs.last_hidden_state * model.config.logit_scale
    return outputs


def score_recurrent(model: Any, tokens: Tokens, batch_size: int, partial: Partial, bar: Any) -> None:
    """Adds the losses of all documents. Each row reads one after the other, whole windows in a call.

    A row that has ended its document begins the next, the longest first; once there is none left, it is dropped.
    """
    config = model.config
    width, stride = config.window_size, config.window_size - getattr(config, "overlap", 0)
    if config.model_type == "block_recurrent":  # runs blocks together; windows are run one by one in any case
        width = stride = width * max(1, BLOCK_TOKENS // width)
    lengths = np.asarray(tokens.lengths)
    queue = np.argsort(-lengths, kind="stable").tolist()
    rows: list[list[int]] = partial.place.get("rows", [])  # document and position of each
    following: int = partial.place.get("following", 0)
    cache = partial.load_cache(model) if rows else model.cache_class(config)
    while True:
        while len(rows) < batch_size and following < len(queue) and not cache.num_rows:
            rows.append([queue[following], 0])
            following += 1
        if not rows:
            return
        pieces = [tokens.read(n, at, min(at + (stride if at else width), int(lengths[n]) - 1) + 1) for n, at in rows]
        counts = [len(piece) - 1 for piece in pieces]
        ids = torch.zeros(len(rows), max(counts), dtype=torch.long)
        targets = torch.full_like(ids, -100)
        for row, piece in enumerate(pieces):
            whole = torch.from_numpy(piece.astype(np.int64))
            ids[row, : counts[row]], targets[row, : counts[row]] = whole[:-1], whole[1:]
        real = targets != -100
        outputs = hidden_states(
            model,
            ids.to(model.device),
            attention_mask=None if real.all() else real.to(model.device),
            past_key_values=cache,
            reset=torch.tensor([at == 0 for _, at in rows], device=model.device) if cache.num_rows else None,
            use_cache=True,
        )
        hidden = outputs.last_hidden_state.flatten(0, 1)
        if not real.all():
            hidden = hidden[real.flatten().to(hidden.device)]
        losses = token_losses(hidden, model.get_output_embeddings(), targets[real].to(hidden.device))
        for row, part in enumerate(losses.double().split(counts)):
            rows[row][1] += counts[row]
            partial.losses[rows[row][0]] += part.sum().item()
            partial.counts[rows[row][0]] += counts[row]
        bar.update(sum(counts))
        ended = [row for row, (document, at) in enumerate(rows) if at == lengths[document] - 1]
        for row in ended[: len(queue) - following]:
            rows[row] = [queue[following], 0]
            following += 1
        left = [row for row, (document, at) in enumerate(rows) if at < lengths[document] - 1]
        if len(left) < len(rows):
            rows = [rows[row] for row in left]
            if rows:
                cache.batch_select_indices(torch.tensor(left))
            else:
                cache.reset()
        partial.keep({"rows": rows, "following": following}, cache if rows else None)


def score_windows(
    model: Any, tokens: Tokens, window_size: int, overlap: int, batch_size: int, partial: Partial, bar: Any
) -> None:
    """Adds the losses of all documents, each window a row that knows nothing of the others."""
    found = []
    for document, length in enumerate(np.asarray(tokens.lengths).tolist()):
        for start, stop, scored in plan_windows(length - 1, window_size, overlap):
            found.append((document, start, stop, scored - start))
    # Windows of the same shape side by side: no pads, and no logits but those that are scored.
    windows = np.array(found, np.int64)
    windows = windows[np.lexsort((windows[:, 1] - windows[:, 2], windows[:, 3]))]
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    done: int = partial.place.get("windows", 0)
    while done < len(windows):
        first = windows[done]
        kept = int(first[2] - first[1] - first[3]) if keeps else int(first[2] - first[1])
        size = max(1, min(batch_size, MAX_WINDOW_LOGITS // (kept * model.config.vocab_size)))
        batch = windows[done : done + size]
        batch = batch[batch[:, 3] == first[3]].tolist()
        length = max(stop - start for _, start, stop, _ in batch)
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        targets = torch.full_like(ids, -100)
        for row, (document, start, stop, scored) in enumerate(batch):
            whole = torch.from_numpy(tokens.read(document, start, stop + 1).astype(np.int64))
            ids[row, : stop - start], targets[row, scored : stop - start] = whole[:-1], whole[scored + 1 :]
        scored = int(first[3])
        targets = targets[:, scored:].to(model.device)
        # pads stand behind all tokens, which do not see them
        only = {"logits_to_keep": length - scored} if keeps else {}
        logits = model(ids.to(model.device), use_cache=False, return_dict=True, **only).logits[:, scored - length :]
        losses = F.cross_entropy(at_least_float32(logits).flatten(0, 1), targets.flatten(), reduction="none")
        losses = losses.double().view_as(targets)
        counts = (targets != -100).sum(1).tolist()
        for (document, *_), loss, count in zip(batch, losses.sum(1).tolist(), counts, strict=True):
            partial.losses[document] += loss
            partial.counts[document] += count
        done += len(batch)
        bar.update(sum(counts))
        partial.keep({"windows": done})


@torch.no_grad()
def evaluate_perplexity(
    model: Any,
    tokens: CountedTokens,
    window_size: int | None = None,
    overlap: int | None = None,
    batch_size: int = 8,
    resume: str | Path | None = None,
    save_seconds: float = 60,
    progress: bool = True,
) -> dict[str, Any]:
    """How well a causal model predicts all documents: perplexities, bits, what was counted, and what it cost.

    Windows and what is scored in them are those of `plan_windows`: every token but a document's first is predicted
    once, in the earliest window that can. A recurrent model hands its state on inside a document; any other model of
    `AutoModelForCausalLM` reads each window alone. `losses` and `counts` are of each document, in nats and tokens.

    Args:
        window_size, overlap: other than the model's own; an overlap of `window_size` - 1 is one token a window.
        batch_size: rows of a call, which read documents side by side. The result does not depend on it.
        resume: a file for what has been scored so far, written every `save_seconds`. A run that was ended goes on from
            there with the same numbers; at its end the file is taken away.
        progress: whether a bar is drawn, on stderr.

    ```python
    >>> store = TokenStore.build("test-tokens", documents("books", "test"), tokenizer)
    >>> evaluate_perplexity(model, store, overlap=50)["word_perplexity"]
    ```"""
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
    check_finite(model)
    check_tokens(model, tokens)
    total = int(np.asarray(tokens.lengths).sum()) - len(tokens.lengths)
    training = model.training
    model.eval()
    try:
        with changed_windows(model, window_size, overlap) as (width, shared):
            facts = {
                "data": data_digest(tokens),
                "model": f"{sum(p.detach().double().abs().sum().item() for p in model.parameters())!r}",
                "window_size": width,
                "overlap": shared,
                "batch_size": batch_size,
            }
            partial = Partial(None if resume is None else Path(resume), facts, save_seconds, len(tokens.lengths))
            initial = int(partial.counts.sum())
            bar = tqdm(total=total, initial=initial, unit="token", unit_scale=True, disable=not progress)
            with bar:
                if model.config.model_type in RECURRENT:
                    score_recurrent(model, tokens, batch_size, partial, bar)
                else:
                    score_windows(model, tokens, width, shared, batch_size, partial, bar)
    finally:
        model.train(training)
    seconds = partial.elapsed
    partial.end()
    nats, words, size = float(partial.losses.sum()), int(tokens.num_words.sum()), int(tokens.num_bytes.sum())
    if not math.isfinite(nats):
        raise ValueError(f"The loss of the documents must be finite, got {nats}: the model's values overflow.")
    return {
        "model_type": model.config.model_type,
        "window_size": width,
        "overlap": shared,
        "loss": nats / total,
        "perplexity": math.exp(min(nats / total, 700)),
        "word_perplexity": math.exp(min(nats / words, 700)) if words else None,
        "bits_per_token": nats / total / math.log(2),
        "bits_per_byte": nats / size / math.log(2) if size else None,
        "tokens": int(partial.counts.sum()),
        "words": words,
        "bytes": size,
        "documents": len(tokens.lengths),
        "flops_per_token": flops_per_token(model.config, width, shared),
        "seconds": seconds,
        "tokens_per_second": total / seconds,
        "losses": partial.losses.tolist(),
        "counts": partial.counts.tolist(),
    }


__all__ = ["evaluate_perplexity"]
