"""generate() and the text-generation pipeline, through transformers' own loop."""

import copy

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TextStreamer, pipeline

from tests.common import MODELS, random_ids, tiny_model


GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def by_full_passes(model, ids: torch.Tensor, new: int) -> torch.Tensor:
    """Greedy decoding that reads the whole text again for every token."""
    for _ in range(new):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("length", [1, 4, 5, 6, 13])
def test_greedy_decoding_equals_full_passes(length: int, overlap: int) -> None:
    model = tiny_model(overlap=overlap)
    ids = random_ids(2, length)
    assert torch.equal(model.generate(ids, max_new_tokens=19, **GREEDY), by_full_passes(model, ids, 19))


def test_decoding_goes_far_past_the_positions_by_default_too() -> None:
    model = tiny_model()
    with pytest.warns(UserWarning, match="model-agnostic default `max_length`"):
        assert model.generate(random_ids(1, 30), **GREEDY).shape[1] == 50  # prompt and 20; positions end at 16
    assert model.generate(random_ids(1, 3), max_new_tokens=200, **GREEDY).shape[1] == 203


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 5},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_every_strategy_gives_the_same_with_and_without_cache(settings: dict, overlap: int) -> None:
    model = tiny_model(overlap=overlap)
    ids = random_ids(2, 7)
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        texts.append(model.generate(ids, max_new_tokens=17, use_cache=use_cache, **{**GREEDY, **settings}))
    assert torch.equal(*texts)


@pytest.mark.parametrize("overlap", [0, 2])
def test_rows_of_a_padded_batch_are_continued_as_alone(overlap: int) -> None:
    model = tiny_model(overlap=overlap)
    lengths = (1, 5, 8, 13)
    ids, mask = torch.zeros(4, 13, dtype=torch.long), torch.zeros(4, 13, dtype=torch.long)
    rows = [random_ids(1, length) for length in lengths]
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids[number, 13 - length :], mask[number, 13 - length :] = row[0], 1
    for settings in (GREEDY, {**GREEDY, "num_beams": 3}):
        batch = model.generate(ids, attention_mask=mask, max_new_tokens=14, **settings)[:, 13:]
        for number, row in enumerate(rows):
            alone = model.generate(row, max_new_tokens=14, **settings)[0, lengths[number] :]
            assert torch.equal(batch[number], alone)


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_returned_cache_is_continued_with_all_ids_or_only_the_new_ones(overlap: int) -> None:
    model = tiny_model(overlap=overlap)
    prompt, more = random_ids(2, 6), random_ids(2, 3)
    settings = {**GREEDY, "return_dict_in_generate": True}

    def first():
        return model.generate(prompt, max_new_tokens=9, **settings)

    whole = torch.cat([first().sequences, more], 1)
    expected = by_full_passes(model, whole, 11)
    with_all = model.generate(whole, past_key_values=first().past_key_values, max_new_tokens=11, **settings)
    assert torch.equal(with_all.sequences, expected)
    # the last token that was generated has not been read yet
    unread = whole[:, first().past_key_values.get_seq_length() :]
    only_new = model.generate(unread, past_key_values=first().past_key_values, max_new_tokens=11, **settings)
    assert torch.equal(only_new.sequences[:, unread.shape[1] :], expected[:, whole.shape[1] :])
    mask = torch.ones_like(whole)
    only_new = model.generate(
        unread, attention_mask=mask, past_key_values=first().past_key_values, max_new_tokens=11, **settings
    )
    assert torch.equal(only_new.sequences[:, unread.shape[1] :], expected[:, whole.shape[1] :])


def test_reset_is_done_once_at_the_start() -> None:
    model = tiny_model(overlap=1)
    cache, more = model(random_ids(2, 8), use_cache=True).past_key_values, random_ids(2, 3)
    reset = torch.tensor([True, False])
    text = model.generate(more, past_key_values=copy.deepcopy(cache), reset=reset, max_new_tokens=12, **GREEDY)
    fresh = model.generate(more, max_new_tokens=12, **GREEDY)
    continued = model.generate(more, past_key_values=copy.deepcopy(cache), max_new_tokens=12, **GREEDY)
    assert torch.equal(text, torch.where(reset[:, None], fresh, continued))


def test_generation_from_embeddings() -> None:
    model = tiny_model(overlap=2)
    ids = random_ids(2, 8)
    expected = by_full_passes(model, ids, 12)[:, 8:]
    embeds = model.transformer.wte(ids)
    assert torch.equal(model.generate(inputs_embeds=embeds, max_new_tokens=12, **GREEDY), expected)
    both = model.generate(ids, inputs_embeds=embeds, max_new_tokens=12, **GREEDY)
    assert torch.equal(both[:, 8:], expected)


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("window_size", [5, 16])
def test_assisted_and_prompt_lookup_decoding_give_exactly_greedys_text(window_size: int, overlap: int) -> None:
    model = tiny_model(window_size=window_size, overlap=overlap)
    other = tiny_model(window_size=4, n_layer=2, insertion_layer=0)
    ids = random_ids(1, 7).repeat(1, 3)
    expected = model.generate(ids, max_new_tokens=40, **GREEDY)
    for settings in ({"assistant_model": other}, {"assistant_model": model}, {"prompt_lookup_num_tokens": 4}):
        assert torch.equal(model.generate(ids, max_new_tokens=40, **GREEDY, **settings), expected)


def words() -> PreTrainedTokenizerFast:
    names = ["[PAD]", "[BOS]", "[EOS]", *(f"w{number}" for number in range(58))]
    core = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[PAD]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]", padding_side="left"
    )


def test_text_is_streamed_as_it_comes(capsys) -> None:
    model, tokenizer = tiny_model(), words()
    ids = random_ids(1, 6)
    text = model.generate(ids, max_new_tokens=11, streamer=TextStreamer(tokenizer, skip_prompt=True), **GREEDY)
    assert capsys.readouterr().out.split() == tokenizer.decode(text[0, 6:]).split()


@pytest.mark.parametrize("kind", MODELS)
def test_the_pipeline_continues_batches(kind: str) -> None:
    model, tokenizer = MODELS[kind](), words()
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    prompts = ["w1 w2 w3", "w4 w5 w6 w7 w8 w9 w10 w11", "w12"]
    settings = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False, "eos_token_id": None}
    together = generator(prompts, batch_size=3, **settings)
    alone = [generator(prompt, **settings)[0] for prompt in prompts]
    assert [row[0]["generated_text"] for row in together] == [row["generated_text"] for row in alone]


def test_other_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="`cache_implementation` must be left out.*got 'static'"):
        tiny_model().generate(random_ids(1, 3), max_new_tokens=3, cache_implementation="static")
