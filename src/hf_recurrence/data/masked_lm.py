# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Documents for masked language models: segments with special tokens, and words or tokens masked.

Axes: B batch, T tokens.
"""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import DataCollatorForLanguageModeling

from .lanes import Tokens, cut


class MaskedSegments(Dataset[dict[str, Any]]):
    """The segments of all documents, each with the tokenizer's first and last token around it.

    Every token of every document is in exactly one segment. Segments have nothing to do with each other: Trainer
    shuffles them.

    ```python
    >>> segments = MaskedSegments(store, tokenizer, segment_length=128)
    >>> Trainer(model, arguments, train_dataset=segments, data_collator=masked_lm_collator(tokenizer))
    ```"""

    def __init__(self, tokens: Tokens, tokenizer: Any, segment_length: int) -> None:
        self.tokens, self.first, self.last = tokens, tokenizer.cls_token_id, tokenizer.sep_token_id
        if self.first is None or self.last is None:
            raise ValueError(f"`tokenizer` must have a cls and a sep token, got {type(tokenizer).__name__} without.")
        if segment_length < 3:
            raise ValueError(f"`segment_length` must be at least 3, special tokens included, got {segment_length}.")
        self.pieces = cut(tokens.lengths, segment_length - 2, 1)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, number: int) -> dict[str, Any]:
        document, start, stop = (int(value) for value in self.pieces[number])
        ids = np.concatenate([[self.first], self.tokens.read(document, start, stop), [self.last]])
        return {"input_ids": ids.astype(np.int64)}


class WholeWordCollator(DataCollatorForLanguageModeling):
    """Masks whole words, each with `mlm_probability`; their tokens are replaced one by one as in the parent.

    The parent's own whole words are masked the likelier the more tokens they have, and never replaced by others.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        vocabulary = self.tokenizer.get_vocab()
        names = [""] * (max(vocabulary.values()) + 1)
        for name, number in vocabulary.items():
            names[number] = name
        if any(name.startswith("##") for name in names):
            inside = [name.startswith("##") for name in names]
        elif any(name.startswith(("Ġ", "▁")) for name in names):
            inside = [not name.startswith(("Ġ", "▁", "Ċ")) for name in names]
        else:
            kind = type(self.tokenizer).__name__
            raise ValueError(f"`tokenizer` must mark words by ##, Ġ or ▁ for `whole_words`, got {kind}.")
        self.inside = torch.tensor(inside)  # [vocabulary], tokens that go on with the word before them

    def torch_mask_tokens(
        self, inputs: Any, special_tokens_mask: Any = None, offset_mapping: Any = None
    ) -> tuple[Any, Any]:
        if special_tokens_mask is None:
            special_tokens_mask = [
                self.tokenizer.get_special_tokens_mask(row, already_has_special_tokens=True) for row in inputs.tolist()
            ]
        special = torch.as_tensor(special_tokens_mask).bool()
        after_special = torch.nn.functional.pad(special[:, :-1], (1, 0), value=True)
        starts = ~self.inside[inputs] | special | after_special
        words = starts.long().cumsum(1) - 1  # [B, T], the number of each token's word
        drawn = torch.rand(inputs.shape, generator=self.generator) < (self.mlm_probability or 0.0)
        masked = drawn.gather(1, words) & ~special
        labels = inputs.masked_fill(~masked, -100)
        chance = torch.rand(inputs.shape, generator=self.generator)
        others = torch.randint(len(self.tokenizer), inputs.shape, generator=self.generator)
        replaced = masked & (chance < self.mask_replace_prob)
        random = masked & ~replaced & (chance < self.mask_replace_prob + self.random_replace_prob)
        inputs = torch.where(random, others, inputs.masked_fill(replaced, self.tokenizer.mask_token_id))
        return inputs, labels


def masked_lm_collator(
    tokenizer: Any, mlm_probability: float = 0.15, whole_words: bool = False, seed: int | None = None
) -> DataCollatorForLanguageModeling:
    """A collator that masks tokens, or whole words: of 10, 8 become the mask, 1 another token, 1 stays."""
    collator = WholeWordCollator if whole_words else DataCollatorForLanguageModeling
    return collator(tokenizer, mlm_probability=mlm_probability, seed=seed)


__all__ = ["MaskedSegments", "masked_lm_collator"]
