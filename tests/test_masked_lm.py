"""Segments and masks for masked language models."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_recurrence.data import MaskedSegments, masked_lm_collator
from tests.lanes import ListTokens


SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]


def make_tokenizer(pieces: list[str]) -> PreTrainedTokenizerFast:
    vocabulary = {name: number for number, name in enumerate(SPECIAL + pieces)}
    core = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


WORDPIECE = make_tokenizer([f"{'##' if number % 2 else ''}p{number}" for number in range(40)])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 30), max_size=8), st.integers(3, 12))
def test_each_token_is_in_one_segment(lengths: list[int], length: int) -> None:
    documents = [[100 * number + place for place in range(size)] for number, size in enumerate(lengths)]
    segments = MaskedSegments(ListTokens(documents), WORDPIECE, length)
    found = [segments[number]["input_ids"].tolist() for number in range(len(segments))]
    assert all(row[0] == 1 and row[-1] == 2 and len(row) <= length for row in found)
    assert [token for row in found for token in row[1:-1]] == [token for row in documents for token in row]
    assert all(len({token // 100 for token in row[1:-1]}) == 1 for row in found)


@pytest.mark.parametrize("whole_words", [False, True])
def test_masks_fall_on_15_of_100_and_of_ten_8_are_the_mask_1_another_1_the_same(whole_words: bool) -> None:
    ids = torch.randint(len(SPECIAL), len(WORDPIECE), (60, 1000))
    rows = [{"input_ids": torch.cat([torch.tensor([1]), row, torch.tensor([2])])} for row in ids]
    rows[0] = {"input_ids": torch.tensor([1, *range(5, 15), 2])}  # padded
    batch = masked_lm_collator(WORDPIECE, whole_words=whole_words, seed=0)(rows)
    original = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    masked = batch["labels"] != -100
    real = original >= len(SPECIAL)
    assert not masked[~real].any()
    assert torch.equal(batch["labels"][masked], original[masked])
    assert torch.equal(batch["input_ids"][~masked], original[~masked])
    # four standard deviations of a share, of words of two tokens on average
    assert masked[real].double().mean() == pytest.approx(0.15, abs=4 * (2 * 0.15 * 0.85 / 59_000) ** 0.5)
    inputs = batch["input_ids"][masked]
    share = (inputs == WORDPIECE.mask_token_id).double().mean().item()
    assert share == pytest.approx(0.8, abs=0.03)
    assert (inputs == original[masked]).double().mean().item() == pytest.approx(0.1, abs=0.02)


def test_words_are_masked_as_wholes() -> None:
    ids = torch.randint(len(SPECIAL), len(WORDPIECE), (8, 50))
    ids[:, 0], ids[:, -1] = 1, 2
    batch = masked_lm_collator(WORDPIECE, mlm_probability=0.5, whole_words=True)([{"input_ids": row} for row in ids])
    names = [WORDPIECE.convert_ids_to_tokens(row) for row in ids.tolist()]
    for row, masked in zip(names, (batch["labels"] != -100).tolist(), strict=True):
        for place in range(2, 49):
            assert not row[place].startswith("##") or masked[place] == masked[place - 1]
    spaced = make_tokenizer(["Ġone", "two"])
    rows = [{"input_ids": torch.tensor([1, 6, 5, 6, 6, 5, 2])}] * 50
    masks = masked_lm_collator(spaced, mlm_probability=0.5, whole_words=True)(rows)["labels"] != -100
    assert torch.equal(masks[:, 2], masks[:, 3])
    assert torch.equal(masks[:, 2], masks[:, 4])
    assert not torch.equal(masks[:, 1], masks[:, 2])
    assert not torch.equal(masks[:, 4], masks[:, 5])


def test_bad_input_is_told_of() -> None:
    with pytest.raises(ValueError, match="`tokenizer` must mark words by ##"):
        masked_lm_collator(make_tokenizer(["a", "b"]), whole_words=True)
    with pytest.raises(ValueError, match="`segment_length` must be at least 3, special tokens included, got 2"):
        MaskedSegments(ListTokens([[5]]), WORDPIECE, 2)
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordPiece({"a": 0})))
    with pytest.raises(ValueError, match="`tokenizer` must have a cls and a sep token"):
        MaskedSegments(ListTokens([[5]]), bare, 8)
