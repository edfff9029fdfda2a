"""The configuration: its rules, its files, and what it takes over from a plain GPT-2."""

from pathlib import Path

import pytest
from transformers import AutoConfig, BertConfig, GPT2Config

from hf_recurrence import RecurrentGPT2Config, RecurrentGPT2LMHeadModel
from tests.common import random_ids, tiny_config, tiny_model


def test_the_defaults_are_the_papers() -> None:
    config = RecurrentGPT2Config()
    assert (config.window_size, config.overlap, config.insertion_layer) == (
        300,
        0,
        1,
    )  # the paper counts layers from 1
    assert (config.pooling, config.pooling_layers, config.num_recurrent_embeddings) == ("mean", "weighted", 1)
    assert (config.recurrence_hidden_size, config.recurrence_num_hidden_layers) == (200, 3)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (768, 12, 12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": 0}, "`window_size` must be an integer of at least 1, got 0"),
        ({"window_size": 4.0}, "`window_size` must be an integer of at least 1, got 4.0"),
        ({"window_size": True}, "`window_size` must be an integer of at least 1, got True"),
        ({"window_size": 17}, r"`window_size` must be at most `n_positions` \(16\), .* got 17"),
        ({"overlap": 5}, r"`overlap` must be smaller than `window_size` \(5\), got 5"),
        ({"overlap": -1}, "`overlap` must be an integer of at least 0, got -1"),
        ({"insertion_layer": 3}, r"`insertion_layer` must be 'all' or a layer .* at most 2 .* got 3"),
        ({"insertion_layer": -1}, "`insertion_layer` .* got -1"),
        ({"insertion_layer": "last"}, "`insertion_layer` .* got 'last'"),
        ({"pooling": "sum"}, "`pooling` must be one of mean, max, attention, got 'sum'"),
        ({"pooling_layers": "first"}, "`pooling_layers` must be one of weighted, last, got 'first'"),
        ({"recurrence_activation": "step"}, "`recurrence_activation` must be one of .* got 'step'"),
        ({"recurrence_hidden_size": 0}, "`recurrence_hidden_size` must be an integer of at least 1, got 0"),
        ({"recurrence_num_hidden_layers": -1}, "`recurrence_num_hidden_layers` must be .* at least 0, got -1"),
        ({"num_recurrent_embeddings": 0}, "`num_recurrent_embeddings` must be an integer of at least 1, got 0"),
        ({"add_cross_attention": True}, "`add_cross_attention` must be False"),
    ],
)
def test_broken_rules_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


def test_a_field_changed_afterwards_is_checked_by_the_model() -> None:
    config = tiny_config()
    config.overlap = 9
    with pytest.raises(ValueError, match="`overlap` must be smaller"):
        RecurrentGPT2LMHeadModel(config)


def test_it_survives_its_own_file_and_auto_config(tmp_path) -> None:
    config = tiny_config(overlap=2, insertion_layer="all", pooling="attention")
    config.save_pretrained(tmp_path)
    for loaded in (RecurrentGPT2Config.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is RecurrentGPT2Config
        assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}
    changed = AutoConfig.from_pretrained(tmp_path, window_size=7, overlap=6)
    assert (changed.window_size, changed.overlap) == (7, 6)
    with pytest.raises(ValueError, match="`overlap` must be smaller"):
        AutoConfig.from_pretrained(tmp_path, window_size=2)


def test_a_plain_gpt2_configuration_becomes_ours(tmp_path) -> None:
    GPT2Config(n_positions=64, n_layer=4, n_embd=48, n_head=3).save_pretrained(tmp_path)
    config = RecurrentGPT2Config.from_pretrained(tmp_path, window_size=32)
    assert (config.model_type, config.window_size, config.n_embd) == ("recurrent_gpt2", 32, 48)
    with pytest.raises(ValueError, match=r"`window_size` must be at most `n_positions` \(64\), .* got 300"):
        RecurrentGPT2Config.from_pretrained(tmp_path)
    assert RecurrentGPT2Config(max_position_embeddings=512).n_positions == 512


def test_another_type_of_model_is_refused(tmp_path) -> None:
    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must be a checkpoint of type 'recurrent_gpt2' or 'gpt2', got .* 'bert'"):
        RecurrentGPT2LMHeadModel.from_pretrained(tmp_path)
    for config in (GPT2Config(), BertConfig()):
        with pytest.raises(ValueError, match="`config` must be a RecurrentGPT2Config, got .*leave `config` out"):
            RecurrentGPT2LMHeadModel(config)


def test_the_stored_sizes_load(tmp_path) -> None:
    folder = Path(__file__).parent.parent / "configs"
    files = sorted(folder.glob("recurrent_gpt2_*.json"))
    assert files
    for file in files:
        config = AutoConfig.from_pretrained(file)
        assert type(config) is RecurrentGPT2Config
    small = AutoConfig.from_pretrained(folder / "recurrent_gpt2_small.json")
    assert (small.n_layer, small.n_embd, small.window_size) == (12, 768, 300)


def test_generation_reads_its_end_from_no_position() -> None:
    assert getattr(tiny_model().config, "max_position_embeddings", None) is None
    assert tiny_model()(random_ids(1, 100)).logits.shape[1] == 100
