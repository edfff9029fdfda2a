"""From texts to batches: each token once, in order, in its lane."""

import gzip
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hf_recurrence.data import Lanes, TokenStore, collate_lanes, documents, token_store
from tests.lanes import ListTokens
from tests.test_readme import make_gpt2


TEXTS = ["One two three.", "", "Vier fünf sechs sieben, acht.", " nine\n ten\n", "eleven " * 40]


# -- documents -------------------------------------------------------------------------------------------------------
def write_sources(folder: Path) -> dict[str, object]:
    """The same documents in every form."""
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    for split, texts in (("train", TEXTS), ("validation", ["other"])):
        (folder / "txt" / split).mkdir(parents=True)
        for number, text in enumerate(texts):
            (folder / "txt" / split / f"{number:03d}.txt").write_text(text)
    (folder / "txt" / "metadata.csv").write_text("ignored")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    for name in ("lines", "zipped", "parquet"):
        (folder / name).mkdir()
    (folder / "lines" / "train.jsonl").write_text(lines)
    (folder / "lines" / "test.jsonl").write_text('{"text": "other"}\n')
    with gzip.open(folder / "zipped" / "all.jsonl.gz", "wt") as file:
        file.write(lines)
    rows.select(range(2)).to_parquet(folder / "parquet" / "train-00000-of-00002.parquet")
    rows.select(range(2, 5)).to_parquet(folder / "parquet" / "train-00001-of-00002.parquet")
    datasets.DatasetDict({"train": rows}).save_to_disk(folder / "saved")
    return {
        **{name: folder / name for name in ("txt", "lines", "zipped", "parquet", "saved")},
        "file": str(folder / "lines" / "train.jsonl"),
        "data set": rows,
        "streamed": rows.to_iterable_dataset(),
        "parts": datasets.DatasetDict({"train": rows}),
    }


def test_every_source_gives_the_same_documents(tmp_path) -> None:
    for name, source in write_sources(tmp_path).items():
        assert list(documents(source)) == TEXTS, name
    assert list(documents(tmp_path / "txt", "validation")) == ["other"]
    assert list(documents(tmp_path / "lines", "test")) == ["other"]


def test_wikitext_is_parted_at_titles_only(tmp_path) -> None:
    articles = [
        " \n = Robert <unk> = \n \n Text . \n \n = = Career = = \n \n x \n = y = \n",
        " \n = M @-@ 82 ( a = b ) = \n \n = = = Deep = = = \n More . \n",
    ]
    articles[1] = articles[1].removeprefix(" \n")
    articles[0] += " \n"
    (tmp_path / "wiki.train.tokens").write_text("".join(articles))
    (tmp_path / "wiki.valid.tokens").write_text(" = A = \n b \n")
    assert list(documents(tmp_path)) == articles
    assert list(documents(tmp_path, "validation")) == [" = A = \n b \n"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.txt").write_text("".join(articles))
    assert list(documents(tmp_path / "other")) == articles


def test_enwik8_has_its_customary_parts(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(documents.__globals__["ENWIK8_PARTS"], "validation", (3, 5))
    (tmp_path / "enwik8").write_bytes(b"abcdefg")
    assert list(documents(tmp_path, "validation")) == ["de"]


def test_bad_sources_are_told_of(tmp_path) -> None:
    with pytest.raises(ValueError, match="`split` must be one of train, validation, test, got 'dev'"):
        documents(tmp_path, "dev")
    with pytest.raises(ValueError, match="`source` must be a file, a folder"):
        documents(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="`source` must have .txt"):
        documents(tmp_path)
    rows = datasets.Dataset.from_dict({"content": ["x"]})
    with pytest.raises(
        ValueError, match="`column` must name a text of every row, got 'text' for row 0, which has cont"
    ):
        list(documents(rows))


# -- the store -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("gpt2")
    make_gpt2(folder, "It was the best of times, it was the worst of times. " * 20)
    return AutoTokenizer.from_pretrained(folder)


def test_the_store_holds_each_text_and_its_counts(tokenizer, tmp_path) -> None:
    store = TokenStore.build(tmp_path, TEXTS, tokenizer, shard_characters=40)
    assert len(store.manifest["shards"]) == 3
    assert len(store) == len(TEXTS)
    for number, text in enumerate(TEXTS):
        ids = tokenizer(text).input_ids
        assert store.read(number, 0, 10**6).tolist() == ids
        assert store.read(number, 1, 3).tolist() == ids[1:3]
        assert store.dataset[number]["input_ids"] == ids
    assert store.num_words.tolist() == [len(text.split()) for text in TEXTS]
    assert store.num_bytes.tolist() == [len(text.encode()) for text in TEXTS]
    assert store.num_tokens == store.manifest["tokens"] == sum(store.lengths)
    assert store.manifest["words"] == sum(len(text.split()) for text in TEXTS)
    assert not list(tmp_path.glob("*.partial"))
    raw = TokenStore.build(tmp_path / "bytes", TEXTS)
    assert bytes(raw.read(2, 0, 99).astype(np.uint8)).decode() == TEXTS[2]


def test_texts_are_tokenised_once(tokenizer, tmp_path) -> None:
    TokenStore.build(tmp_path, TEXTS, tokenizer)

    def never() -> None:
        raise AssertionError("read again")
        yield

    assert len(TokenStore.build(tmp_path, never(), tokenizer)) == len(TEXTS)
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)  # leaves settings behind in the tokenizer
    assert len(TokenStore.build(tmp_path, never(), tokenizer)) == len(TEXTS)
    with pytest.raises(ValueError, match="`folder` must be new or hold tokens of the same tokenizer"):
        TokenStore.build(tmp_path, TEXTS)


def test_an_interrupted_store_goes_on_and_equals_one_never_interrupted(tokenizer, tmp_path) -> None:
    texts = [f"text {number} " * (number % 7) for number in range(60)]
    whole = TokenStore.build(tmp_path / "whole", texts, tokenizer, shard_characters=200)
    assert len(whole.manifest["shards"]) > 5

    def interrupted(after: int):
        yield from texts[:after]
        raise KeyboardInterrupt

    calls = []

    class Counting:
        is_fast, backend_tokenizer = True, tokenizer.backend_tokenizer
        get_vocab = tokenizer.get_vocab

        def __call__(self, rows: list[str], **kwargs):
            calls.extend(rows)
            return tokenizer(rows, **kwargs)

    for after in (20, 20, 45):
        with pytest.raises(KeyboardInterrupt):
            TokenStore.build(tmp_path / "parts", interrupted(after), Counting(), shard_characters=200)
        with pytest.raises(ValueError, match="`folder` must be a store that `TokenStore.build` has ended"):
            TokenStore(tmp_path / "parts")
    with pytest.raises(ValueError, match="`texts` must be those that were tokenised before the interruption"):
        TokenStore.build(tmp_path / "parts", ["x", *texts], tokenizer, shard_characters=200)
    with pytest.raises(ValueError, match="`texts` must be those"):
        TokenStore.build(tmp_path / "parts", texts[:3], tokenizer, shard_characters=200)
    store = TokenStore.build(tmp_path / "parts", texts, Counting(), shard_characters=200)
    assert store.manifest == whole.manifest
    for number in range(len(texts)):
        assert np.array_equal(store.read(number, 0, 999), whole.read(number, 0, 999))
    assert calls.count(texts[2]) == 1
    assert len(calls) < 2 * len(texts)


def test_long_texts_are_tokenised_in_pieces_as_in_one_go(tokenizer, tmp_path, monkeypatch) -> None:
    text = "It was the best  of times,\n it was the worst of 1859 -- fünf times. " * 30
    whole = tokenizer(text).input_ids
    monkeypatch.setattr(token_store, "PIECE_CHARACTERS", 50)
    assert len(list(token_store.in_pieces(text))) > 20
    assert "".join(token_store.in_pieces(text)) == text
    assert TokenStore.build(tmp_path, [text, "", text], tokenizer).read(2, 0, 10**6).tolist() == whole


# -- lanes -----------------------------------------------------------------------------------------------------------
LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=12)


def numbered(lengths: list[int]) -> ListTokens:
    """Documents in which every token is another number, from 1 on."""
    ends = np.cumsum([1, *lengths])
    return ListTokens([list(range(first, first + length)) for first, length in zip(ends[:-1], lengths, strict=True)])


def read_batches(lanes: Lanes) -> list[dict[str, torch.Tensor]]:
    return list(DataLoader(lanes, batch_size=lanes.num_lanes, collate_fn=collate_lanes))


@settings(deadline=None, max_examples=150)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 9), st.none() | st.integers(1, 3), st.integers(0, 3), st.booleans())
def test_each_token_is_read_once_in_order_and_in_its_lane(lengths, num_lanes, length, most, epoch, shuffle) -> None:
    tokens = numbered(lengths)
    num_pieces = sum(1 if most is None else -(-n // (most * length)) for n in lengths if n)
    if num_pieces < num_lanes:
        with pytest.raises(ValueError, match="`num_lanes` must be at most the number of documents"):
            Lanes(tokens, num_lanes, length, max_segments=most, shuffle=shuffle)
        return
    lanes = Lanes(tokens, num_lanes, length, max_segments=most, shuffle=shuffle)
    lanes.set_epoch(epoch)
    batches = read_batches(lanes)
    assert len(batches) == lanes.num_steps == len(lanes) / num_lanes
    inputs, targets = [], []
    owner = np.repeat(np.arange(len(lengths)), lengths)  # of token n + 1
    for row in range(num_lanes):
        before = None
        for batch in batches:
            mask = batch["attention_mask"][row].bool()
            ids, follow = batch["input_ids"][row][mask].tolist(), batch["shift_labels"][row]
            assert (follow[~mask] == -100).all()
            labels = batch["labels"][row]
            assert labels[mask].tolist()[1:] == ids[1:]
            assert (labels != -100).sum() == (follow != -100).sum()
            assert (batch["labels"][row][~mask] == -100).all()
            if not ids:
                assert batch["reset"][row]
                before = None
                continue
            assert ids == list(range(ids[0], ids[0] + len(ids)))
            assert len(set(owner[np.array(ids) - 1])) == 1
            if not batch["reset"][row]:
                assert ids[0] == before + 1  # goes on where the row ended
                assert owner[ids[0] - 1] == owner[before - 1]
            elif most is None:
                assert ids[0] == 1 or owner[ids[0] - 1] != owner[ids[0] - 2]
            for token, target in zip(ids, follow[mask].tolist(), strict=True):
                last = token == len(owner) or owner[token] != owner[token - 1]
                assert target == (-100 if last else token + 1)
                targets += [] if last else [target]
            inputs += ids
            before = ids[-1]
    assert sorted(inputs) == list(range(1, sum(lengths) + 1))
    starts = {sum(lengths[:number]) + 1 for number in range(len(lengths)) if lengths[number]}
    assert sorted(targets) == [n for n in range(1, sum(lengths) + 1) if n not in starts]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=4, max_size=15), st.integers(1, 4), st.integers(1, 9), st.integers(1, 5))
def test_epochs_are_equally_long_and_in_another_order(lengths, num_lanes, length, epoch) -> None:
    lanes = Lanes(numbered(lengths), num_lanes, length)
    loads = []
    for number in (0, epoch):
        lanes.set_epoch(number)
        loads.append([int(lanes.num_segments[lane].sum()) for lane in lanes.lanes()])
    assert loads[0] == loads[1]
    # The lanes end at about the same time: giving the longest first is at most a third from the best there is.
    counts = lanes.num_segments
    best = max(counts.max(), -(-counts.sum() // num_lanes))
    if len(counts) > num_lanes:
        best = max(best, sum(sorted(counts)[-num_lanes - 1 : -num_lanes + 1]) if num_lanes > 1 else counts.sum())
    assert lanes.num_steps <= 4 / 3 * best


def test_documents_are_shuffled_by_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        lanes = Lanes(numbered([5] * 20), 2, 5, seed=seed)
        lanes.set_epoch(epoch)
        return torch.cat([batch["input_ids"][:, 0] for batch in read_batches(lanes)]).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("processes", [2, 4])
def test_each_row_stays_on_its_process(processes: int, workers: int) -> None:
    """As accelerate parts the data where each process reads for itself."""
    lanes = Lanes(numbered([9, 4, 17, 3, 22, 8, 1, 13]), 4, 5)
    whole = read_batches(lanes)
    size = 4 // processes
    parts = []
    for process in range(processes):
        shard = IterableDatasetShard(lanes, size, num_processes=processes, process_index=process)
        shard.set_epoch(0)
        parts.append(list(DataLoader(shard, batch_size=size, collate_fn=collate_lanes, num_workers=workers)))
    assert {len(part) for part in parts} == {len(whole)}
    for number, batch in enumerate(whole):
        for name, value in batch.items():
            assert torch.equal(torch.cat([part[number][name] for part in parts]), value)


def test_bad_lanes_are_told_of() -> None:
    tokens = numbered([4, 0, 9])
    with pytest.raises(ValueError, match=r"`num_lanes` must be at most .* \(2\), got 3"):
        Lanes(tokens, 3, 5)
    assert Lanes(tokens, 3, 5, max_segments=1).num_steps == 1
    with pytest.raises(ValueError, match="`segment_length` must be at least 1, got 0"):
        Lanes(tokens, 1, 0)
    with pytest.raises(ValueError, match="`dataloader_num_workers` must be 0 or 1 for Lanes, got 2"):
        next(iter(DataLoader(Lanes(tokens, 1, 5), batch_size=1, collate_fn=collate_lanes, num_workers=2)))


def test_the_share_of_pads_is_known() -> None:
    lanes = Lanes(numbered([4, 7, 11]), 2, 5)
    masks = torch.cat([batch["attention_mask"] for batch in read_batches(lanes)])
    assert lanes.padding == pytest.approx(1 - masks.double().mean().item())
