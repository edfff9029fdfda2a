# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Documents in lanes: row b of every batch goes on where row b of the batch before ended.

Axes: B batch, T tokens of a segment.
"""

import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from transformers.utils import logging


logger = logging.get_logger(__name__)

# those who carry states from batch to batch at this moment; weak, as a run may end with an error
carrying: WeakSet[Any] = WeakSet()


class Tokens(Protocol):
    """Documents as token ids."""

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document."""

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """The tokens of a document from `start` up to `stop`, or to its end where that comes first."""


class LaneSegment(NamedTuple):
    """What a row gets in one step. Not a dict, of which Trainer would drop what forward has no argument for."""

    input_ids: np.ndarray  # [T], 0 behind the end of the document
    targets: np.ndarray  # [T], the token after each, -100 where there is none
    num_tokens: int
    reset: bool


class Lanes(IterableDataset[LaneSegment]):
    """The segments of all documents, in the order in which batches of `num_lanes` rows are made of them.

    Each row of a batch reads its documents one after the other over the steps, a segment a step. In an epoch every
    token is read exactly once and every token but a document's first is a target exactly once: the last token of a
    segment predicts the first of the next. Documents are shuffled by seed and epoch, and never inside. A document's
    last segment is padded. Lanes get documents such that they are about equally long; a lane that ends before the
    others gets empty rows. All epochs have the same number of steps.

    With N processes `num_lanes` is N times the batch size of one, and each lane stays on its process.

    Args:
        tokens: the documents, mostly a `TokenStore`.
        num_lanes: rows of a batch, over all processes.
        segment_length: tokens of a row in one step, mostly a number of windows times (`window_size` - `overlap`).
        max_segments: longer documents are read as several, the state reset in between (texts such as enwik8, which are
            one document, need it for more than one lane).
        shuffle, seed: whether and how the documents' order changes from epoch to epoch.

    ```python
    >>> lanes = Lanes(store, num_lanes=8, segment_length=6000)
    >>> Trainer(model, arguments, train_dataset=lanes, data_collator=collate_lanes, callbacks=[CarryState()])
    ```"""

    def __init__(
        self,
        tokens: Tokens,
        num_lanes: int,
        segment_length: int,
        max_segments: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        for name, value in (
            ("num_lanes", num_lanes),
            ("segment_length", segment_length),
            ("max_segments", max_segments),
        ):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        self.tokens, self.num_lanes, self.segment_length = tokens, num_lanes, segment_length
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.pieces = cut(tokens.lengths, segment_length, max_segments)  # [pieces, 3]
        if len(self.pieces) < num_lanes:
            raise ValueError(
                f"`num_lanes` must be at most the number of documents that are not empty ({len(self.pieces)}), got "
                f"{num_lanes}. `max_segments` reads long documents as several."
            )
        # [pieces]
        self.num_segments = -(-(self.pieces[:, 2] - self.pieces[:, 1]) // segment_length)
        # The lanes' lengths come from the pieces' alone, and are the same in every epoch.
        self.num_steps = max(int(self.num_segments[lane].sum()) for lane in self.lanes())

    def __len__(self) -> int:
        return self.num_steps * self.num_lanes

    def set_epoch(self, epoch: int) -> None:
        """Shuffles the documents for this epoch; Trainer calls it."""
        self.epoch = epoch

    @property
    def padding(self) -> float:
        """The share of the places of all batches that no token fills."""
        real = int((self.pieces[:, 2] - self.pieces[:, 1]).sum())
        return 1 - real / (len(self) * self.segment_length)

    def lanes(self) -> list[np.ndarray]:
        """The numbers of the pieces that each lane reads in this epoch, in order."""
        random = np.random.default_rng([self.seed, self.epoch])
        order = random.permutation(len(self.pieces)) if self.shuffle else np.arange(len(self.pieces))
        # The longest first, each to the lane with the least: so the lanes end together. Pieces of the same length
        # change places from epoch to epoch, which leaves the lanes' lengths as they are.
        order = order[np.argsort(-self.num_segments[order], kind="stable")]
        lanes: list[list[int]] = [[] for _ in range(self.num_lanes)]
        loads = [(0, lane) for lane in range(self.num_lanes)]
        for piece in order.tolist():
            load, lane = loads[0]
            lanes[lane].append(piece)
            heapq.heapreplace(loads, (load + int(self.num_segments[piece]), lane))
        numbers = [np.array(lane) for lane in lanes]
        return [random.permutation(lane) if self.shuffle else np.sort(lane) for lane in numbers]

    def __iter__(self) -> Iterator[LaneSegment]:
        worker = get_worker_info()
        if worker is None and not carrying:
            logger.warning(
                "Lanes are read while no CarryState is in use: every segment begins without what was read before it. "
                "Give Trainer callbacks=[CarryState()]; outside of training, use CarryState().attached(model)."
            )
        if worker is not None and worker.num_workers > 1:
            raise ValueError(f"`dataloader_num_workers` must be 0 or 1 for Lanes, got {worker.num_workers}.")
        lanes = [self._read_lane(lane) for lane in self.lanes()]
        for _ in range(self.num_steps):
            for lane in lanes:
                yield next(lane)

    def _read_lane(self, numbers: np.ndarray) -> Iterator[LaneSegment]:
        """The segments of the pieces one after the other, and then empty ones."""
        length = self.segment_length
        for number in numbers:
            document, first, last = (int(value) for value in self.pieces[number])
            for start in range(first, last, length):
                stop = min(start + length, last)
                ids = self.tokens.read(document, start, stop + 1)  # with the token after it, if there is one
                input_ids, targets = np.zeros(length, np.int64), np.full(length, -100, np.int64)
                input_ids[: stop - start], targets[: len(ids) - 1] = ids[: stop - start], ids[1:]
                yield LaneSegment(input_ids, targets, stop - start, start == first)
        while True:
            yield LaneSegment(np.zeros(length, np.int64), np.full(length, -100, np.int64), 0, True)


def cut(lengths: np.ndarray, segment_length: int, max_segments: int | None) -> np.ndarray:
    """Document, start and stop of the pieces that all documents consist of. [pieces, 3]"""
    documents = np.flatnonzero(lengths)
    if max_segments is None:
        return np.stack([documents, np.zeros_like(documents), lengths[documents]], 1)
    size = max_segments * segment_length
    pieces = [(n, start, min(start + size, lengths[n])) for n in documents for start in range(0, lengths[n], size)]
    return np.array(pieces, np.int64).reshape(-1, 3)


def collate_lanes(segments: list[LaneSegment]) -> dict[str, torch.Tensor]:
    """The batch of a causal language model: ids, mask, labels [B, T], and `reset` [B], the rows that begin a document.

    `shift_labels` are what the tokens predict. `labels` are the tokens themselves, as everywhere in transformers, and
    as many as there are targets: that is what Trainer divides by where it does not look at `shift_labels`. For that
    the first one, which nothing in the row predicts, is left out where a document ends.
    """
    input_ids = torch.from_numpy(np.stack([segment.input_ids for segment in segments]))
    num_tokens = torch.tensor([segment.num_tokens for segment in segments])
    mask = torch.arange(input_ids.shape[1]) < num_tokens[:, None]
    targets = torch.from_numpy(np.stack([segment.targets for segment in segments]))
    labels = input_ids.masked_fill(~mask, -100)
    ends = (targets != -100).sum(1) < num_tokens
    labels[:, 0] = labels[:, 0].masked_fill(ends, -100)
    return {
        "input_ids": input_ids,
        "attention_mask": mask.long(),
        "labels": labels,
        "shift_labels": targets,
        "reset": torch.tensor([segment.reset for segment in segments]),
    }


__all__ = ["LaneSegment", "Lanes", "Tokens", "collate_lanes"]
