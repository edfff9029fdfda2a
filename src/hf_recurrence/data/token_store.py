# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Documents tokenised once, in memory-mapped Arrow files that `datasets` reads too."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from filelock import FileLock


FORMAT = "hf_recurrence.token_store.1"
# Texts longer than this are tokenised in pieces: a tokenizer needs many times the memory of its text, and is slower
# the longer it is.
PIECE_CHARACTERS = 1 << 16
# What one shard, and one batch inside it, holds at most of text and tokens, if it is more than one document.
SHARD_CHARACTERS = 1 << 26
BATCH_CHARACTERS = 1 << 22
# a space with a letter or figure on either side: no tokenizer that splits at spaces joins what it parts
SEAM = re.compile(r"(?<=\w)(?= \w)")
SCHEMA = pa.schema(
    {"input_ids": pa.large_list(pa.int32()), "num_words": pa.int64(), "num_bytes": pa.int64()},
)


class TokenStore:
    """Documents as token ids, read from disk as they are needed.

    `lengths`, `num_words` and `num_bytes` are of each document, [documents]. Words are what spaces part, counted
    before tokenising, for perplexities by word.

    ```python
    >>> store = TokenStore.build("store", documents("books", "train"), tokenizer)
    >>> store = TokenStore("store")  # from then on
    >>> store.read(0, 0, 100)  # the first tokens of the first document
    ```"""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not (self.folder / "store.json").is_file():
            raise ValueError(f"`folder` must be a store that `TokenStore.build` has ended, got {str(folder)!r}.")
        self.manifest = json.loads((self.folder / "store.json").read_text())
        shards = [
            datasets.Dataset.from_file(str(self.folder / f"{number:05d}.arrow"))
            for number in range(len(self.manifest["shards"]))
        ]
        self.dataset = datasets.concatenate_datasets(shards) if shards else None
        chunks = self.dataset.data.column("input_ids").chunks if self.dataset is not None else []
        # zero-copy: the pages of the files are read when their tokens are
        self._values = [chunk.values.to_numpy() for chunk in chunks]
        offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        empty = [np.zeros(0, np.int64)]
        self._chunks = np.concatenate(
            [*empty, *(np.full(len(o) - 1, n) for n, o in enumerate(offsets))]
        )  # [documents]
        self._starts = np.concatenate([*empty, *(o[:-1] for o in offsets)])
        self.lengths = np.concatenate([*empty, *(np.diff(o) for o in offsets)])

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.folder,)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_words(self) -> np.ndarray:
        return self._column("num_words")

    @property
    def num_bytes(self) -> np.ndarray:
        return self._column("num_bytes")

    @property
    def digest(self) -> str:
        """The sha256 over the shards' sha256 of their texts: the same for the same texts in the same order."""
        return hashlib.sha256("".join(shard["digest"] for shard in self.manifest["shards"]).encode()).hexdigest()

    def _column(self, name: str) -> np.ndarray:
        if self.dataset is None:
            return np.zeros(0, np.int64)
        return np.asarray(self.dataset.data.column(name))

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """The tokens of a document from `start` up to `stop`, or to its end where that comes first."""
        first = int(self._starts[document])
        stop = min(stop, int(self.lengths[document]))
        tokens: np.ndarray = self._values[self._chunks[document]][first + start : first + max(start, stop)]
        return tokens

    @classmethod
    def build(
        cls,
        folder: str | os.PathLike[str],
        texts: Iterable[str],
        tokenizer: Any = None,
        shard_characters: int = SHARD_CHARACTERS,
    ) -> "TokenStore":
        """The store of these texts, tokenised now unless the folder holds it already.

        The texts are tokenised shard by shard. After an interruption the shards that were written are kept: the texts
        are read again from the start, in the same order, and only the rest of them is tokenised. Of several processes
        one does the work and the others wait. Special tokens are not added.

        Args:
            folder: where the store is, or will be.
            texts: the documents, such as `documents(...)` gives.
            tokenizer: a tokenizer of transformers; None takes the bytes of the text in UTF-8 as its tokens. One that
                joins words over spaces may tokenise texts of more than 65,536 characters otherwise than in one go.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with FileLock(path / "lock"):
            name = tokenizer_digest(tokenizer)
            settings = path / "settings.json"
            if settings.is_file() and json.loads(settings.read_text()) != {"format": FORMAT, "tokenizer": name}:
                raise ValueError(f"`folder` must be new or hold tokens of the same tokenizer, got {str(folder)!r}.")
            write_json(settings, {"format": FORMAT, "tokenizer": name})
            if not (path / "store.json").is_file():
                shards = write_shards(path, texts, tokenizer, shard_characters)
                totals = {
                    key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "words", "bytes")
                }
                write_json(path / "store.json", {"format": FORMAT, "tokenizer": name, **totals, "shards": shards})
        return cls(path)


def write_shards(folder: Path, texts: Iterable[str], tokenizer: Any, shard_characters: int) -> list[dict[str, Any]]:
    """Writes the texts' tokens, each shard to a file of its own, and returns what the shards hold."""
    shards: list[dict[str, Any]] = []
    with datasets.utils.tqdm(desc="Tokenizing", unit="B", unit_scale=True) as bar:
        for number, batches in enumerate(in_shards(texts, shard_characters)):
            record = folder / f"{number:05d}.json"
            if record.is_file():
                shards.append(json.loads(record.read_text()))
                check_shard(shards[-1], batches, record, bar.update)
            else:
                shards.append(write_shard(folder / f"{number:05d}.arrow", batches, tokenizer, bar.update))
                write_json(record, shards[-1])  # the shard is whole once this is there
        left = folder / f"{len(shards):05d}.json"
        if left.is_file():
            raise ValueError(changed(left))
    return shards


def changed(record: Path) -> str:
    return (
        f"`texts` must be those that were tokenised before the interruption, got others than in {record.name}. For "
        f"other texts take another folder than {str(record.parent)!r}."
    )


def in_shards(texts: Iterable[str], shard_characters: int) -> Iterator[Iterator[list[str]]]:
    """The texts in shards, each of which is batches of whole texts; a shard must be read before the next."""
    source = iter(texts)
    following = next(source, None)

    def shard() -> Iterator[list[str]]:
        nonlocal following
        batch: list[str] = []
        size = total = 0
        while following is not None and (total == 0 or total + len(following) <= shard_characters):
            if batch and size + len(following) > BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
            batch.append(following)
            size, total = size + len(following), total + max(len(following), 1)
            following = next(source, None)
        if batch:
            yield batch

    while following is not None:
        yield shard()


def check_shard(
    shard: dict[str, Any], batches: Iterable[list[str]], record: Path, progress: Callable[[int], Any]
) -> None:
    """Raises a `ValueError` if the texts are not those that the shard was made of."""
    digest = hashlib.sha256()
    for texts in batches:
        for text in texts:
            add_text(digest, text.encode())
        progress(sum(len(text.encode()) for text in texts))
    if digest.hexdigest() != shard["digest"]:
        raise ValueError(changed(record))


def add_text(digest: Any, data: bytes) -> None:
    """Adds a text to the digest such that its end counts too."""
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)


def write_shard(
    path: Path, batches: Iterable[list[str]], tokenizer: Any, progress: Callable[[int], Any]
) -> dict[str, Any]:
    """Writes one Arrow file, and returns what it holds."""
    digest, partial = hashlib.sha256(), path.with_suffix(".partial")
    totals = {"documents": 0, "tokens": 0, "words": 0, "bytes": 0}
    with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
        for texts in batches:
            ids = tokenise(texts, tokenizer)
            encoded = [text.encode() for text in texts]
            words, sizes = [len(text.split()) for text in texts], [len(data) for data in encoded]
            for data in encoded:
                add_text(digest, data)
            offsets = np.cumsum([0, *(len(row) for row in ids)], dtype=np.int64)
            tokens = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(ids)))
            writer.write_batch(pa.record_batch([tokens, pa.array(words), pa.array(sizes)], schema=SCHEMA))
            totals["documents"] += len(texts)
            totals["tokens"] += int(offsets[-1])
            totals["words"] += sum(words)
            totals["bytes"] += sum(sizes)
            progress(sum(sizes))
    os.replace(partial, path)
    return {**totals, "digest": digest.hexdigest()}


def tokenise(texts: list[str], tokenizer: Any) -> list[np.ndarray]:
    """The token ids of each text."""
    if tokenizer is None:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
    pieces = [list(in_pieces(text)) for text in texts]
    found: list[list[np.ndarray]] = [[np.zeros(0, np.int32)] for _ in texts]
    group: list[tuple[int, str]] = []
    size = 0
    for number, parts in enumerate(pieces):
        for part in parts:
            if group and size + len(part) > BATCH_CHARACTERS:
                add_tokens(found, group, tokenizer)
                group, size = [], 0
            group.append((number, part))
            size += len(part)
    add_tokens(found, group, tokenizer)
    return [np.concatenate(rows) for rows in found]


def add_tokens(found: list[list[np.ndarray]], group: list[tuple[int, str]], tokenizer: Any) -> None:
    """Adds the tokens of numbered pieces to those of the texts with these numbers."""
    if group:
        texts = [text for _, text in group]
        rows = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        for (number, _), row in zip(group, rows, strict=True):
            found[number].append(np.array(row, np.int32))


def in_pieces(text: str) -> Iterator[str]:
    """The text in pieces that a tokenizer takes at once, parted before a space where there is one."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        seam = SEAM.search(text, start + PIECE_CHARACTERS)
        if seam is None:
            break
        yield text[start : seam.start()]
        start = seam.start()
    if start < len(text):
        yield text[start:]


def tokenizer_digest(tokenizer: Any) -> str:
    """A name for what the tokenizer does, the same in every process."""
    if tokenizer is None:
        return "bytes"
    rules: Any = sorted(tokenizer.get_vocab().items())
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        rules |= {"truncation": None, "padding": None}  # of the last call, not of the tokenizer
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Writes a file, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1))
    os.replace(partial, path)


__all__ = ["TokenStore"]
