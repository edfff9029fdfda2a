"""Plain GPT-2 checkpoints into our models, and ours into each other."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPT2Model

from hf_recurrence import RecurrentGPT2Config, RecurrentGPT2LMHeadModel, RecurrentGPT2Model
from tests.common import random_ids, tiny_model


SETTINGS = {
    "vocab_size": 61,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEW = ["mix.logits"] + [f"layers.{number}.{part}" for number in range(4) for part in ("weight", "bias")]


@pytest.fixture
def plain() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(**SETTINGS)).eval()


def save_with_names(folder, plain: GPT2LMHeadModel, rename) -> None:
    """The checkpoint with other names of its tensors, as older or converted ones have."""
    plain.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {rename(name): tensor for name, tensor in tensors.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()  # causal masks that used to be stored
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["head", "base", "old names"])
@pytest.mark.parametrize("cls", [RecurrentGPT2LMHeadModel, RecurrentGPT2Model])
def test_a_plain_checkpoint_loads_and_only_the_recurrence_is_new(kind: str, cls, plain, tmp_path) -> None:
    if kind == "head":
        plain.save_pretrained(tmp_path)
    elif kind == "base":
        plain.transformer.save_pretrained(tmp_path)
    else:
        save_with_names(tmp_path, plain, lambda name: name.removeprefix("transformer."))
    torch.manual_seed(7)
    model, report = cls.from_pretrained(tmp_path, window_size=20, overlap=4, output_loading_info=True)
    prefix = "transformer.recurrence." if cls is RecurrentGPT2LMHeadModel else "recurrence."
    assert sorted(report["missing_keys"]) == sorted(prefix + name for name in NEW)
    assert not [key for key in report["unexpected_keys"] if "lm_head" not in key]
    assert not report["mismatched_keys"]
    base = model if cls is RecurrentGPT2Model else model.transformer
    for name, parameter in plain.transformer.named_parameters():
        assert torch.equal(base.get_parameter(name), parameter), name
    for layer in base.recurrence.layers:  # initialised, and not at GPT-2's 0.02
        assert layer.weight.std().item() == pytest.approx((2 / layer.in_features) ** 0.5, rel=0.1)
        assert (layer.bias == 0).all()
    assert (base.recurrence.mix.logits == 0).all()
    ids = random_ids(2, 33)
    with torch.no_grad():
        hidden = base.eval()(ids).last_hidden_state
        assert torch.equal(hidden[:, :20], plain.transformer(ids[:, :20]).last_hidden_state)
    assert model.config.model_type == "recurrent_gpt2"
    assert torch.isfinite(hidden).all()


def test_the_new_parameters_are_reported_to_the_user(plain, tmp_path, caplog) -> None:
    plain.save_pretrained(tmp_path)
    logger = logging.getLogger("transformers")
    logger.propagate = True
    try:
        with caplog.at_level(logging.WARNING):
            RecurrentGPT2LMHeadModel.from_pretrained(tmp_path, window_size=20)
    finally:
        logger.propagate = False
    assert "recurrence" in caplog.text
    assert "model of type `gpt2`" not in caplog.text


def test_nan_weights_are_reported_by_the_load(plain, tmp_path) -> None:
    with torch.no_grad():
        plain.transformer.h[1].mlp.c_fc.weight[3, 4] = float("nan")
    plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`transformer.h.1.mlp.c_fc.weight` .* must be finite, got 1 values of NaN"):
        RecurrentGPT2LMHeadModel.from_pretrained(tmp_path, window_size=20)


def test_a_checkpoint_of_other_widths_is_refused(plain, tmp_path) -> None:
    plain.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="(?i)mismatch"):
        RecurrentGPT2LMHeadModel.from_pretrained(tmp_path, window_size=20, vocab_size=70)


@pytest.mark.parametrize("tie", [True, False])
def test_ours_load_into_each_other_and_into_auto_classes(tie: bool, tmp_path) -> None:
    model = tiny_model(torch.float32, overlap=2, pooling="attention", tie_word_embeddings=tie)
    ids = random_ids(2, 17)
    model.save_pretrained(tmp_path / "head")
    model.transformer.save_pretrained(tmp_path / "base")
    for cls in (RecurrentGPT2LMHeadModel, AutoModelForCausalLM):
        loaded = cls.from_pretrained(tmp_path / "head")
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
        assert (loaded.lm_head.weight is loaded.transformer.wte.weight) == tie
    for folder in ("head", "base"):
        for cls in (RecurrentGPT2Model, AutoModel):
            hidden = cls.from_pretrained(tmp_path / folder)(ids).last_hidden_state
            torch.testing.assert_close(hidden, model.transformer(ids).last_hidden_state)
    again = tmp_path / "again"
    AutoModelForCausalLM.from_pretrained(tmp_path / "head").save_pretrained(again)
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(again)(ids).logits, model(ids).logits)
    assert not [file for file in again.iterdir() if file.suffix in (".bin", ".pt", ".pkl")]


def test_a_sharded_checkpoint_loads(tmp_path) -> None:
    model = tiny_model(torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = random_ids(1, 12)
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_base_only_weights_of_another_type_are_refused_even_if_renamed(tmp_path) -> None:
    GPT2Model(GPT2Config(**SETTINGS)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "openai-gpt"}))
    with pytest.raises(ValueError, match="got .* of type 'openai-gpt'"):
        RecurrentGPT2Config.from_pretrained(tmp_path)
