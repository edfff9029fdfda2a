"""The configuration of RecurrentRoberta: its rules, its files, and what it takes over from a plain RoBERTa."""

from pathlib import Path

import pytest
from transformers import AutoConfig, RobertaConfig

from hf_recurrence import RecurrentRobertaConfig
from tests.common import roberta_model


def test_the_defaults_are_the_papers() -> None:
    config = RecurrentRobertaConfig()
    assert (config.window_size, config.overlap, config.insertion_layer) == (512, 0, 1)  # the paper counts from 1
    assert (config.pooling, config.pooling_layers, config.num_recurrent_embeddings) == ("mean", "last", 1)
    assert (config.recurrence_hidden_size, config.recurrence_num_hidden_layers) == (768, 1)
    assert (config.num_answer_classes, config.hidden_size, config.max_position_embeddings) == (3, 768, 514)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": 17}, r"`window_size` must be at most `max_position_embeddings` - .* \(16\), .* got 17"),
        ({"pad_token_id": None}, "`pad_token_id` must be an integer of at least 0, got None"),
        ({"overlap": 5}, r"`overlap` must be smaller than `window_size` \(5\), got 5"),
        ({"insertion_layer": 3}, r"`insertion_layer` .* at most 2 \(`num_hidden_layers` is 3\), got 3"),
        ({"pooling": "sum"}, "`pooling` must be one of mean, max, attention, got 'sum'"),
        ({"num_answer_classes": 2}, r"`num_answer_classes` must be 3 \(span, yes, no\) or 4 \(and none\), got 2"),
        ({"is_decoder": True}, "`is_decoder` must be False"),
        ({"add_cross_attention": True}, "`add_cross_attention` must be False"),
        ({"hidden_size": 15}, r"`hidden_size` must be a multiple of `num_attention_heads` \(2\), got 15"),
    ],
)
def test_broken_rules_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        roberta_model(**changes)


def test_it_survives_its_own_file_and_auto_config(tmp_path) -> None:
    config = roberta_model(overlap=2, insertion_layer="all", pooling="attention", num_answer_classes=4).config
    config.save_pretrained(tmp_path)
    for loaded in (RecurrentRobertaConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is RecurrentRobertaConfig
        for name in ("overlap", "insertion_layer", "pooling", "num_answer_classes", "max_position_embeddings"):
            assert getattr(loaded, name) == getattr(config, name)
    assert AutoConfig.from_pretrained(tmp_path, window_size=7, overlap=6).overlap == 6


def test_a_plain_roberta_configuration_becomes_ours(tmp_path) -> None:
    RobertaConfig(max_position_embeddings=66, hidden_size=48).save_pretrained(tmp_path)
    config = RecurrentRobertaConfig.from_pretrained(tmp_path, window_size=64)
    assert (config.model_type, config.window_size, config.hidden_size) == ("recurrent_roberta", 64, 48)
    with pytest.raises(ValueError, match=r"`window_size` must be at most .* \(64\), .* got 512"):
        RecurrentRobertaConfig.from_pretrained(tmp_path)


def test_the_stored_sizes_load() -> None:
    folder = Path(__file__).parent.parent / "configs"
    base, tiny = (AutoConfig.from_pretrained(folder / f"recurrent_roberta_{size}.json") for size in ("base", "tiny"))
    assert type(base) is type(tiny) is RecurrentRobertaConfig
    assert (base.num_hidden_layers, base.hidden_size, base.window_size) == (12, 768, 512)
