"""The cards in `model_cards/` are what their sources give."""

import json

import pytest
from benchmarks.cards import differing, keep
from huggingface_hub import ModelCard

from hf_recurrence.publishing import render_card
from tests.checkpoints import make_checkpoint


def test_the_cards_of_this_repository_are_what_their_sources_give() -> None:
    assert differing() == [], "run python -m benchmarks.cards"


def test_a_kept_card_is_the_published_one_and_a_change_of_either_side_is_found(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "model", "recurrent_gpt2")
    cards = tmp_path / "cards"
    card = keep(folder, "ann/small-gpt2", base_model="gpt2", cards=cards)
    assert card.name == "small-gpt2.md"
    assert card.read_text() == render_card(folder, "ann/small-gpt2", base_model="gpt2")
    assert ModelCard.load(card).data.eval_results[0].metric_value == 21.375
    kept = {path.name for path in (cards / "sources" / "small-gpt2").iterdir()}
    assert kept == {"card.json", "config.json", "metrics.json", "recipe.yaml", "tokenizer_config.json"}
    assert differing(cards) == []
    text = card.read_text()
    card.write_text(text.replace("21.375", "20.375"))
    assert differing(cards) == ["small-gpt2"]
    card.write_text(text)
    metrics = cards / "sources" / "small-gpt2" / "metrics.json"
    assert "/srv" not in metrics.read_text()
    metrics.write_text(metrics.read_text().replace("21.375", "19.5"))
    assert differing(cards) == ["small-gpt2"]
    card.unlink()
    (cards / "other.md").write_text("by hand")
    assert differing(cards) == ["other", "small-gpt2"]


def test_a_checkpoint_without_metrics_is_not_kept(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "model", "sru_bert", metrics=False)
    with pytest.raises(ValueError, match="must have a metrics.json with what was measured"):
        keep(folder, "ann/bert", cards=tmp_path / "cards")
    assert not (tmp_path / "cards").exists()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "sru_bert"
