"""The cache: its size, going back, files, rows; and what does not fit it."""

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_recurrence import RecurrentCache
from tests.common import EXACT, random_ids, read_in_pieces, tiny_config, tiny_model


def test_the_size_is_the_same_from_the_second_window_on() -> None:
    model = tiny_model(window_size=4, overlap=1, n_positions=4)
    sizes, cache = [], None
    with torch.no_grad():
        for token in random_ids(2, 700).unbind(1):
            cache = model(token[:, None], past_key_values=cache, use_cache=True).past_key_values
            sizes.append(cache.nbytes())
    assert sizes[600:] == sizes[300:400]
    assert max(sizes) == max(sizes[:20])


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("length", [3, 5, 13])
def test_a_saved_cache_continues_bit_for_bit(length: int, overlap: int, tmp_path) -> None:
    model = tiny_model(torch.float32, overlap=overlap)
    ids = random_ids(3, length)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    cache.save(tmp_path / "book.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["book.safetensors"]
    loaded = RecurrentCache.load(tmp_path / "book.safetensors")
    assert loaded.rows == cache.rows
    for piece in (random_ids(3, 1), random_ids(3, 9), random_ids(3, 1)):
        expected, found = model(piece, past_key_values=cache), model(piece, past_key_values=loaded)
        assert torch.equal(expected.logits, found.logits)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    prompt = random_ids(3, 2)
    cache.save(tmp_path / "book.safetensors")
    texts = [
        model.generate(prompt, past_key_values=kept, **settings)
        for kept in (cache, RecurrentCache.load(tmp_path / "book.safetensors"))
    ]
    assert torch.equal(*texts)


def test_files_that_are_no_cache_are_refused(tmp_path) -> None:
    model = tiny_model(torch.float32)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`path` must be a file written by `RecurrentCache.save`"):
        RecurrentCache.load(tmp_path / "model.safetensors")
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:200])
    with pytest.raises(ValueError, match="`path` must be a whole safetensors file, got .*torn"):
        RecurrentCache.load(tmp_path / "torn.safetensors")
    with pytest.raises(ValueError, match="`max_length` must be an integer, got 2.5"):
        RecurrentCache(model.config).crop(2.5)
    with pytest.raises(ValueError, match="The cache is empty"):
        RecurrentCache(model.config).save(tmp_path / "empty.safetensors")


@pytest.mark.parametrize("overlap", [0, 2, 4])
def test_crop_goes_back_to_any_place_in_the_windows_it_keeps(overlap: int) -> None:
    model = tiny_model(overlap=overlap)
    ids, more = random_ids(1, 33), random_ids(1, 8)
    cache = model(ids, use_cache=True).past_key_values
    for length in range(33, 22, -1):
        expected = model(torch.cat([ids[:, :length], more], 1)).logits[:, length:]
        for argument in (length, length - 33):
            cropped = copy.deepcopy(cache)
            cropped.crop(argument)
            assert cropped.get_seq_length() == length
            torch.testing.assert_close(model(more, past_key_values=cropped).logits, expected, **EXACT)


@pytest.mark.parametrize("overlap", [0, 2])
def test_crop_of_ragged_rows_and_twice(overlap: int) -> None:
    model = tiny_model(overlap=overlap)
    ids, mask = random_ids(3, 20), torch.ones(3, 20, dtype=torch.long)
    mask[1, 3:9], mask[2, :6] = 0, 0
    more = random_ids(3, 7)
    _, cache = read_in_pieces(model, ids, [11, 4], mask)
    cache.crop(-3)
    cache.crop(13)
    kept = torch.cat([mask[:, :13], torch.ones(3, 7, dtype=torch.long)], 1)
    expected = model(torch.cat([ids[:, :13], more], 1), attention_mask=kept).logits[:, 13:]
    torch.testing.assert_close(model(more, past_key_values=cache).logits, expected, **EXACT)


@pytest.mark.parametrize("num_rows", [2, 3])  # with two, nothing is left in any window before the crop
def test_crop_where_one_row_goes_back_a_window_and_another_does_not(num_rows: int) -> None:
    model = tiny_model(window_size=3)
    mask = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 1]])[:num_rows]
    ids, more = random_ids(num_rows, 3), random_ids(num_rows, 5)
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    cache.crop(2)
    full = torch.cat([mask[:, :2], torch.ones_like(more)], 1)
    expected = model(torch.cat([ids[:, :2], more], 1), attention_mask=full, output_attentions=True)
    found = model(more, past_key_values=cache, output_attentions=True)
    torch.testing.assert_close(found.logits, expected.logits[:, 2:], **EXACT)
    torch.testing.assert_close(found.attentions[0], expected.attentions[0][:, :, 2:], **EXACT)


@pytest.mark.parametrize("overlap", [0, 3, 50, 60])
def test_the_whole_previous_window_can_be_gone_back_to(overlap: int) -> None:
    model = tiny_model(window_size=64, n_positions=64, overlap=overlap)
    stride = 64 - overlap
    windows = 4 + 64 // stride
    ids, more = random_ids(1, windows * stride + overlap + 2), random_ids(1, 3)
    cache = model(ids, use_cache=True).past_key_values
    assert cache.rows["windows"] == [windows]
    for length in ((windows - 1) * stride, (windows - 1) * stride + 1, windows * stride + overlap):
        cropped = copy.deepcopy(cache)
        cropped.crop(length)
        expected = model(torch.cat([ids[:, :length], more], 1)).logits[:, length:]
        torch.testing.assert_close(model(more, past_key_values=cropped).logits, expected, **EXACT)


def test_crop_says_when_it_cannot_go_back_so_far_and_changes_nothing() -> None:
    model = tiny_model(window_size=16, n_positions=16)
    cache = model(random_ids(1, 200), use_cache=True).past_key_values
    before = copy.deepcopy(cache)
    with pytest.raises(
        ValueError, match="`max_length` must not reach further back than the 4 windows .* got 40 in row 0"
    ):
        cache.crop(40)
    assert cache.rows == before.rows
    assert cache.get_seq_length() == 200
    more = random_ids(1, 5)
    assert torch.equal(model(more, past_key_values=cache).logits, model(more, past_key_values=before).logits)
    cache = model(random_ids(1, 9), past_key_values=cache, reset=torch.tensor([True])).past_key_values
    with pytest.raises(ValueError, match="nor before a reset"):
        cache.crop(-10)
    cache.crop(-9)
    assert torch.equal(model(more, past_key_values=cache).logits, model(more).logits)


def test_a_window_of_300_is_gone_back_to_as_well() -> None:
    model = tiny_model(torch.float64, window_size=30, n_positions=30)
    ids, more = random_ids(1, 100), random_ids(1, 3)
    cache = model(ids, use_cache=True).past_key_values
    cache.crop(61)
    expected = model(torch.cat([ids[:, :61], more], 1)).logits[:, 61:]
    torch.testing.assert_close(model(more, past_key_values=cache).logits, expected, **EXACT)


def test_rows_are_reordered_repeated_and_selected_with_all_of_their_state() -> None:
    model = tiny_model(overlap=2)
    ids, mask = random_ids(3, 13), torch.ones(3, 13, dtype=torch.long)
    mask[1, :4], mask[2, 5:7] = 0, 0
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    for change, rows in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    ):
        changed = copy.deepcopy(cache)
        change(changed)
        more = random_ids(len(rows), 8)
        full = torch.cat([mask[rows], torch.ones_like(more)], 1)
        expected = model(torch.cat([ids[rows], more], 1), attention_mask=full).logits[:, 13:]
        torch.testing.assert_close(model(more, past_key_values=changed).logits, expected, **EXACT)


def test_a_copy_leaves_the_original_as_it_was() -> None:
    model = tiny_model(overlap=2)
    cache = model(random_ids(2, 13), use_cache=True).past_key_values
    more = random_ids(2, 8)
    first = model(more, past_key_values=copy.deepcopy(cache)).logits
    model(random_ids(2, 4), past_key_values=copy.copy(cache), use_cache=False)
    assert torch.equal(model(more, past_key_values=cache).logits, first)


def test_a_call_that_fails_leaves_the_cache_as_it_was(monkeypatch) -> None:
    model = tiny_model()
    ids, more = random_ids(1, 8), random_ids(1, 14)
    cache = model(ids, use_cache=True).past_key_values
    calls = []

    def fail(module, args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    hook = model.transformer.ln_f.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(more, past_key_values=cache)
    hook.remove()
    expected = model(torch.cat([ids, more], 1)).logits[:, 8:]
    torch.testing.assert_close(model(more, past_key_values=cache).logits, expected, **EXACT)


def test_an_empty_cache_is_filled_and_emptied() -> None:
    model = tiny_model()
    ids = random_ids(2, 8)
    cache = RecurrentCache(model.config)
    assert cache.get_seq_length() == 0
    out = model(ids, past_key_values=cache)
    assert out.past_key_values is cache
    assert cache.get_seq_length() == 8
    cache.reset()
    assert torch.equal(model(ids, past_key_values=cache).logits, out.logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": 6}, "`past_key_values` must come from a model with `window_size` = 5, got a cache with 6"),
        ({"overlap": 1}, "`overlap` = 0, got a cache with 1"),
        ({"n_layer": 2}, "`num_hidden_layers` = 3, got a cache with 2"),
        ({"pooling": "max"}, "`pooling` = 'mean', got a cache with 'max'"),
    ],
)
def test_a_cache_of_another_config_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model()(random_ids(1, 3), past_key_values=RecurrentCache(tiny_config(**changes)))


def test_a_cache_of_another_class_or_batch_size_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="`past_key_values` must be a RecurrentCache, got DynamicCache"):
        model(random_ids(1, 3), past_key_values=DynamicCache())
    cache = model(random_ids(2, 3), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"as many rows as `input_ids` \(3\), got 2"):
        model(random_ids(3, 3), past_key_values=cache)
