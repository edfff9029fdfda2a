"""RecurrentGPT2 against its slow twin, and what must not change its outputs: splits, pads, batches, caches."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_recurrence import RecurrentGPT2LMHeadModel, RecurrentGPT2Model
from hf_recurrence.windowing import plan_windows
from tests import reference
from tests.common import EXACT, assert_same_gradients, random_ids, read_in_pieces, tiny_config, tiny_model


LENGTHS = (1, 4, 5, 6, 10, 11, 17)  # windows of 5: part of one, one, one and a bit, whole ones, several
VARIANTS = [
    {},
    {"overlap": 2},
    {"overlap": 4},
    {"pooling": "max"},
    {"pooling": "attention", "overlap": 1},
    {"pooling_layers": "last"},
    {"num_recurrent_embeddings": 3, "overlap": 2},
    {"insertion_layer": "all"},
    {"insertion_layer": 0},
    {"insertion_layer": 2, "recurrence_num_hidden_layers": 0},
    {"tie_word_embeddings": False},
    {"window_size": 1},
]


def twin(model: RecurrentGPT2LMHeadModel, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and states of one row by the reference, with the model's own parameters in its graph."""
    parameters = dict(model.named_parameters())
    parameters.setdefault("lm_head.weight", model.lm_head.weight)
    return reference.recurrent_gpt2(parameters, model.config, ids.tolist())


# -- the twin --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_outputs_states_and_gradients_equal_the_twin(changes: dict) -> None:
    model = tiny_model(**changes)
    for length in (3, 5, 12):
        ids = random_ids(1, length)

        def expected(ids=ids) -> torch.Tensor:
            logits, _ = twin(model, ids[0])
            return reference.cross_entropy(logits[:-1], ids[0, 1:].tolist()) + 0 * sum(
                p.sum() for p in model.parameters()
            )

        def found(ids=ids) -> torch.Tensor:
            return model.train()(ids, labels=ids).loss

        assert_same_gradients(model, expected, found)
        model.eval()
        out = model(ids, use_cache=True)
        logits, states = twin(model, ids[0])
        torch.testing.assert_close(out.logits[0], logits, **EXACT)
        if states:
            torch.testing.assert_close(out.past_key_values.state[0], states[-1].detach(), **EXACT)
        else:
            assert out.past_key_values.state is None


def test_the_state_matters() -> None:
    """Otherwise nothing that is shown here of the recurrence would mean anything."""
    model = tiny_model()
    ids, other = random_ids(1, 15), random_ids(1, 15)
    other[:, 5:] = ids[:, 5:]
    difference = (model(ids).logits - model(other).logits).abs().amax(-1)[0]
    assert (difference[5:] > 1e-4).all()


# -- plain GPT-2 -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_first_window_is_plain_gpt2_to_the_last_bit(attention: str, dtype: torch.dtype, tmp_path) -> None:
    plain = GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_positions=32, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2)
    )
    plain.save_pretrained(tmp_path)
    settings = {"attn_implementation": attention, "dtype": dtype}
    plain = GPT2LMHeadModel.from_pretrained(tmp_path, **settings).eval()
    model = RecurrentGPT2LMHeadModel.from_pretrained(tmp_path, window_size=20, overlap=3, **settings).eval()
    ids = random_ids(2, 33)
    with torch.no_grad():
        found, expected = model(ids).logits[:, :20], plain(ids[:, :20]).logits
    if dtype == torch.float64:  # the matrix kernel gives other last bits for other memory layouts
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-15)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "changes",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"reorder_and_upcast_attn": True},
        {"n_inner": 24},
        {"activation_function": "relu"},
    ],
    ids=str,
)
def test_gpt2s_own_options_keep_their_meaning(changes: dict, attention: str) -> None:
    model = tiny_model(torch.float32, attn_implementation=attention, **changes)
    config = GPT2Config(**{k: v for k, v in model.config.to_dict().items() if k in GPT2Config().to_dict()})
    config._attn_implementation = attention
    plain = GPT2LMHeadModel(config).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    ids = random_ids(2, 5)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)


def test_token_types_are_added_as_in_gpt2() -> None:
    model = tiny_model(overlap=2)
    ids, types = random_ids(2, 13), random_ids(2, 13)
    embeds = model.transformer.wte(ids) + model.transformer.wte(types)
    torch.testing.assert_close(model(ids, token_type_ids=types).logits, model(inputs_embeds=embeds).logits, **EXACT)


# -- splits ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_any_split_into_calls_gives_the_full_pass(changes: dict) -> None:
    model = tiny_model(**changes)
    ids = random_ids(2, 17)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        for sizes in ([1] * 16, [4], [5], [6], [10], [2, 3, 4], [5, 5], [7, 1, 1], [16]):
            logits, cache = read_in_pieces(model, ids, sizes)
            torch.testing.assert_close(logits, full, **EXACT)
            assert cache.get_seq_length() == 17


def test_a_text_far_longer_than_the_positions_is_read_in_pieces_as_in_one() -> None:
    model = tiny_model(overlap=1)
    ids = random_ids(1, 300)
    with torch.no_grad():
        logits, _ = read_in_pieces(model, ids, [1] * 40 + [63, 64, 100])
        torch.testing.assert_close(logits, model(ids).logits, **EXACT)


# -- what a position sees --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("overlap", [0, 1, 2, 4])
def test_no_prediction_sees_its_target(overlap: int) -> None:
    """By gradient and by change: the logits at a position depend on no later token, not through the state either."""
    model = tiny_model(overlap=overlap)
    ids = random_ids(1, 14)
    embeds = model.transformer.wte(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds).logits
    for position in range(14):
        (gradient,) = torch.autograd.grad(logits[0, position].sum(), embeds, retain_graph=True)
        size = gradient[0].abs().amax(-1)
        assert (size[position + 1 :] == 0).all(), position
        assert size[position] > 0
        changed = ids.clone()
        changed[:, position + 1 :] = random_ids(1, 13 - position)
        torch.testing.assert_close(model(changed).logits[:, : position + 1], logits[:, : position + 1], **EXACT)


def test_the_first_token_is_seen_from_the_last_window() -> None:
    model = tiny_model()
    embeds = model.transformer.wte(random_ids(1, 25)).detach().requires_grad_()
    model(inputs_embeds=embeds).logits[0, -1].sum().backward()
    assert embeds.grad[0, 0].abs().max() > 0


@pytest.mark.parametrize("overlap", [0, 2])
def test_every_token_but_the_first_is_scored_once(overlap: int) -> None:
    """The loss is the sum over the plan's scored positions of cross entropies of windows run one by one."""
    model = tiny_model(overlap=overlap)
    for length in LENGTHS[1:]:
        ids = random_ids(1, length)
        logits = model(ids).logits[0]
        scored = [p for w in plan_windows(length, 5, overlap) for p in range(w.scored, w.stop) if p + 1 < length]
        assert sorted(p + 1 for p in scored) == list(range(1, length))
        expected = sum(torch.nn.functional.cross_entropy(logits[p], ids[0, p + 1]) for p in scored) / len(scored)
        for mode in (model.train(), model.eval()):
            torch.testing.assert_close(mode(ids, labels=ids).loss, expected, **EXACT)


# -- rows ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_a_padded_row_gives_what_it_gives_alone(side: str, overlap: int) -> None:
    model = tiny_model(overlap=overlap)
    lengths = [1, 4, 5, 11, 17]
    mask = torch.zeros(5, 17, dtype=torch.bool)
    for row, length in enumerate(lengths):
        if side == "inside":
            mask[row, torch.randperm(17)[:length]] = True
        else:
            mask[row, slice(17 - length, 17) if side == "left" else slice(length)] = True
    ids = random_ids(5, 17)
    padded = model(ids, attention_mask=mask.long(), output_hidden_states=True)
    assert (padded.logits[~mask] == 0).all()
    logits, _ = read_in_pieces(model, ids, [3, 1, 1, 6, 2], mask.long())
    torch.testing.assert_close(logits, padded.logits, **EXACT)
    for row in range(5):
        alone = model(ids[row : row + 1, mask[row]], output_hidden_states=True)
        torch.testing.assert_close(padded.logits[row, mask[row]], alone.logits[0], **EXACT)
        for layer, expected in zip(padded.hidden_states, alone.hidden_states, strict=True):
            torch.testing.assert_close(layer[row, mask[row]], expected[0], **EXACT)


@pytest.mark.parametrize("overlap", [0, 2])
def test_pads_change_neither_loss_nor_gradients(overlap: int) -> None:
    model = tiny_model(overlap=overlap).train()
    mask = torch.rand(3, 17) > 0.4
    ids = random_ids(3, 17)
    rows = [ids[row : row + 1, mask[row]] for row in range(3)]
    count = sum(row.shape[1] - 1 for row in rows)

    def padded() -> torch.Tensor:
        return model(ids, attention_mask=mask.long(), labels=ids).loss

    def alone() -> torch.Tensor:
        return sum(model(row, labels=row, num_items_in_batch=count).loss for row in rows)

    assert_same_gradients(model, padded, alone)


@pytest.mark.parametrize("overlap", [0, 2])
def test_reset_starts_single_rows_afresh(overlap: int) -> None:
    model = tiny_model(overlap=overlap)
    first, second = random_ids(3, 8), random_ids(3, 12)
    cache = model(first, use_cache=True).past_key_values
    reset = torch.tensor([False, True, False])
    out = model(second, past_key_values=copy.deepcopy(cache), reset=reset)
    fresh, continued = model(second).logits, model(torch.cat([first, second], 1)).logits[:, 8:]
    torch.testing.assert_close(out.logits, torch.where(reset[:, None, None], fresh, continued), **EXACT)
    after = model(second, past_key_values=out.past_key_values).logits
    long, short = torch.cat([first, second, second], 1), torch.cat([second, second], 1)
    expected = torch.where(reset[:, None, None], model(short).logits[:, 12:], model(long).logits[:, 20:])
    torch.testing.assert_close(after, expected, **EXACT)


def test_packed_documents_give_what_they_give_apart() -> None:
    model = tiny_model(overlap=1).train()
    documents = [random_ids(1, length) for length in (7, 1, 12, 5)]
    packed = torch.cat(documents, 1)
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    with torch.no_grad():
        apart = torch.cat([model(document).logits for document in documents], 1)
        found = model(packed, position_ids=positions, output_hidden_states=True)
        torch.testing.assert_close(found.logits, apart, **EXACT)
        assert [tuple(layer.shape) for layer in found.hidden_states] == [(1, 25, 16)] * 4

    def together() -> torch.Tensor:
        return model(packed, position_ids=positions, labels=packed).loss

    def one_by_one() -> torch.Tensor:
        count = packed.shape[1] - len(documents)
        return sum(model(document, labels=document, num_items_in_batch=count).loss for document in documents)

    assert_same_gradients(model, together, one_by_one)


def test_no_gradient_flows_into_the_segment_before() -> None:
    model = tiny_model(overlap=2).train()
    before = model.transformer.wte(random_ids(2, 8)).detach().requires_grad_()
    ids = random_ids(2, 9)
    cache = model(inputs_embeds=before, use_cache=True).past_key_values
    assert not any(tensor.requires_grad for tensor in cache.tensors.values())
    model(ids, past_key_values=cache, labels=ids).loss.backward()
    assert before.grad is None


# -- training --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"overlap": 2},
        {"pooling": "attention"},
        {"insertion_layer": "all"},
        {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.1},
    ],
    ids=str,
)
def test_window_checkpointing_gives_the_same_gradients(changes: dict, padded: bool) -> None:
    model = tiny_model(**changes).train()
    ids = random_ids(2, 17)
    mask = (torch.rand(2, 17) > 0.3).long() if padded else None

    def run(checkpointing: bool, **kwargs) -> torch.Tensor:
        model.transformer._set_gradient_checkpointing(enable=checkpointing)
        torch.manual_seed(5)  # dropout falls on the same places
        loss = model(ids, attention_mask=mask, labels=ids, **kwargs).loss
        after.append(torch.rand(1).item())
        return loss

    after: list[float] = []
    assert_same_gradients(model, lambda: run(False), lambda: run(True))
    assert_same_gradients(model, lambda: run(False), lambda: run(True, skip_logits=False))
    assert len(set(after)) == 1, "random numbers go on in the same way"


def test_window_checkpointing_continues_a_cache_and_fills_it() -> None:
    model = tiny_model(overlap=2).train()
    first, ids = random_ids(2, 8), random_ids(2, 14)
    cache = model(first, use_cache=True).past_key_values
    kept = []

    def run(checkpointing: bool) -> torch.Tensor:
        model.transformer._set_gradient_checkpointing(enable=checkpointing)
        out = model(ids, labels=ids, past_key_values=copy.deepcopy(cache), use_cache=True)
        kept.append(out.past_key_values)
        return out.loss

    assert_same_gradients(model, lambda: run(False), lambda: run(True))
    assert kept[0].rows == kept[1].rows
    for name, tensor in kept[0].tensors.items():
        torch.testing.assert_close(kept[1].tensors[name], tensor, **EXACT)
    for one, two in zip(kept[0].layers, kept[1].layers, strict=True):
        torch.testing.assert_close(one.keys, two.keys, **EXACT)


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_loss_of_rows_at_different_places_in_their_windows(checkpointing: bool, overlap: int) -> None:
    model = tiny_model(overlap=overlap).train()
    model.transformer._set_gradient_checkpointing(enable=checkpointing)
    ids, mask = random_ids(3, 20), torch.ones(3, 20, dtype=torch.long)
    mask[1, :3], mask[2, 8:11] = 0, 0
    cache = model(ids[:, :7], attention_mask=mask[:, :7], use_cache=True).past_key_values

    def run(**kwargs) -> torch.Tensor:
        new, real = ids[:, 7:], mask[:, 7:]
        return model(new, attention_mask=real, labels=new, past_key_values=copy.deepcopy(cache), **kwargs).loss

    assert_same_gradients(model, run, lambda: run(skip_logits=False))


def test_a_state_is_projected_anew_in_training() -> None:
    """Its keys and values in the cache are of weights that a step has changed since."""
    model = tiny_model()
    cache = model(random_ids(1, 8), use_cache=True).past_key_values
    with torch.no_grad():
        cache = model(random_ids(1, 1), past_key_values=cache).past_key_values
        assert cache.projected
        model.transformer.h[1].attn.c_attn.weight.mul_(1.1)
    ids = random_ids(1, 4)
    kept = copy.deepcopy(cache)
    kept.projected = {}
    found, expected = (model.train()(ids, labels=ids, past_key_values=c).loss for c in (cache, kept))
    assert torch.equal(found, expected)


def test_window_checkpointing_differentiates_inputs_and_frozen_models() -> None:
    model = tiny_model().train()
    ids = random_ids(2, 17)
    gradients = []
    for checkpointing in (False, True):
        model.transformer._set_gradient_checkpointing(enable=checkpointing)
        embeds = model.transformer.wte(ids).detach().requires_grad_()
        model(inputs_embeds=embeds, labels=ids).loss.backward()
        gradients.append(embeds.grad)
    torch.testing.assert_close(gradients[0], gradients[1], **EXACT)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("recurrence" in name)
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_a_head_whose_forward_was_replaced_is_called() -> None:
    """As accelerate does to move weights; the loss must not go around it."""
    model = tiny_model()
    ids, old = random_ids(2, 9), model.lm_head.forward
    model.lm_head.forward = lambda hidden: 2 * old(hidden)
    losses = [model(ids, labels=ids, skip_logits=skip).loss for skip in (True, False)]
    torch.testing.assert_close(*losses, **EXACT)


def test_no_logits_of_all_positions_are_made_in_training(monkeypatch) -> None:
    model = tiny_model(overlap=1).train()
    ids = random_ids(2, 40)
    sizes = []
    model.lm_head.register_forward_hook(lambda module, args, output: sizes.append(output.shape[1]))
    for checkpointing in (False, True):
        model.transformer._set_gradient_checkpointing(enable=checkpointing)
        out = model(ids, labels=ids)
        out.loss.backward()
        assert out.logits is None
    assert max(sizes) <= model.config.window_size
    assert model(ids, labels=ids, skip_logits=False).logits.shape == (2, 40, 61)
    assert model.eval()(ids, labels=ids).logits.shape == (2, 40, 61)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("length", [3, 5, 12])
def test_every_parameter_gets_a_gradient_also_in_one_window(length: int, checkpointing: bool) -> None:
    for changes in ({}, {"pooling": "attention"}, {"pooling_layers": "last"}):
        model = tiny_model(**changes).train()
        model.transformer._set_gradient_checkpointing(enable=checkpointing)
        ids = random_ids(2, length)
        model(ids, labels=ids).loss.backward()
        without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        assert not without
        recurrence = [p.grad.abs().max() for n, p in model.named_parameters() if "recurrence.layers" in n]
        assert (max(recurrence) > 0) == (length > 5)


def test_number_of_items_and_given_targets() -> None:
    model = tiny_model()
    ids = random_ids(2, 13)
    labels = ids.masked_fill(torch.rand(2, 13) < 0.3, -100)
    logits = model(ids).logits
    total = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    count = (labels[:, 1:] != -100).sum()
    for mode in (model.train(), model.eval()):
        torch.testing.assert_close(mode(ids, labels=labels).loss, total / count, **EXACT)
        torch.testing.assert_close(mode(ids, labels=labels, num_items_in_batch=7).loss, total / 7, **EXACT)
        items = torch.tensor(7)
        torch.testing.assert_close(mode(ids, labels=labels, num_items_in_batch=items).loss, total / 7, **EXACT)
        following = torch.cat([ids[:, 1:], torch.tensor([[4], [5]])], 1)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        torch.testing.assert_close(mode(ids, shift_labels=following).loss, expected, **EXACT)
    nothing = torch.full_like(ids, -100)
    assert model.train()(ids, labels=nothing).loss == 0


# -- outputs ---------------------------------------------------------------------------------------------------------
def test_hidden_states_and_attentions_have_gpt2s_shapes() -> None:
    model = tiny_model(overlap=2)
    ids = random_ids(2, 13)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, :4] = 0
    out = model(ids, attention_mask=mask, output_hidden_states=True, output_attentions=True, use_cache=True)
    assert [tuple(layer.shape) for layer in out.hidden_states] == [(2, 13, 16)] * 4
    assert [tuple(maps.shape) for maps in out.attentions] == [(2, 2, 13, 13)] * 3
    torch.testing.assert_close(model.lm_head(out.hidden_states[-1]), out.logits, **EXACT)
    sums = out.attentions[0].sum(-1)  # no state is inserted into this layer
    torch.testing.assert_close(sums, mask[:, None].expand(2, 2, 13).double(), **EXACT)
    assert (out.attentions[0] * ~torch.ones(13, 13).tril().bool() == 0).all()
    assert (out.attentions[0][1, :, :, :4] == 0).all()
    assert (out.attentions[0][0, :, 12, :6] == 0).all()  # another window
    more = model(random_ids(2, 3), past_key_values=out.past_key_values, output_attentions=True)
    assert [tuple(maps.shape) for maps in more.attentions] == [(2, 2, 3, 16)] * 3


def test_attention_maps_are_those_of_the_windows() -> None:
    model = tiny_model()
    ids = random_ids(1, 12)
    maps = model(ids, output_attentions=True).attentions
    first = model(ids[:, :5], output_attentions=True).attentions
    for whole, window in zip(maps, first, strict=True):
        torch.testing.assert_close(whole[:, :, :5, :5], window, **EXACT)
    cache, parts = None, []
    for token in ids.unbind(1):
        out = model(token[:, None], past_key_values=cache, output_attentions=True, use_cache=True)
        cache = out.past_key_values
        parts.append(torch.nn.functional.pad(out.attentions[2], (0, 12 - out.attentions[2].shape[-1])))
    torch.testing.assert_close(torch.cat(parts, 2), maps[2], **EXACT)


def test_gradients_can_be_retained_on_hidden_states_of_several_windows() -> None:
    model = tiny_model()
    ids = random_ids(1, 12)
    out = model(ids, output_hidden_states=True, output_attentions=True)
    out.hidden_states[0].retain_grad()
    out.attentions[0].retain_grad()
    embeds = model.transformer.wte(ids).detach().requires_grad_()
    out.logits[0, -1].sum().backward()
    model(inputs_embeds=embeds).logits[0, -1].sum().backward()
    torch.testing.assert_close(out.hidden_states[0].grad, embeds.grad, **EXACT)
    assert out.attentions[0].grad.abs().max() > 0


def test_tuples_and_kept_logits() -> None:
    model = tiny_model()
    ids = random_ids(2, 13)
    out = model(ids)
    assert torch.equal(model(ids, return_dict=False)[0], out.logits)
    assert torch.equal(model(ids, logits_to_keep=3).logits, out.logits[:, -3:])
    for mode in (model.train(), model.eval()):
        torch.testing.assert_close(mode(ids, labels=ids, logits_to_keep=3).loss, mode(ids, labels=ids).loss, **EXACT)
    assert torch.equal(model(ids, logits_to_keep=torch.tensor([0, 7])).logits, out.logits[:, [0, 7]])
    base = RecurrentGPT2Model(model.config).double().eval()
    base.load_state_dict(model.transformer.state_dict())
    torch.testing.assert_close(model.lm_head(base(ids).last_hidden_state), out.logits, **EXACT)
    torch.testing.assert_close(model.lm_head(base(ids, return_dict=False)[0]), out.logits, **EXACT)


@pytest.mark.parametrize(
    "changes", [{}, {"overlap": 2}, {"insertion_layer": "all", "num_recurrent_embeddings": 2}], ids=str
)
def test_eager_equals_sdpa(changes: dict) -> None:
    eager = tiny_model(attn_implementation="eager", **changes)
    sdpa = tiny_model(attn_implementation="sdpa", **changes)
    ids = random_ids(3, 17)
    mask = (torch.rand(3, 17) > 0.3).long()
    for kwargs in ({}, {"attention_mask": mask}):
        torch.testing.assert_close(eager(ids, **kwargs).logits, sdpa(ids, **kwargs).logits, **EXACT)
        pieces = [read_in_pieces(model, ids, [4, 3, 1, 1], kwargs.get("attention_mask"))[0] for model in (eager, sdpa)]
        torch.testing.assert_close(*pieces, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite(dtype: torch.dtype) -> None:
    model = tiny_model(dtype, overlap=2).train()
    ids = random_ids(3, 17)
    mask = (torch.rand(3, 17) > 0.3).long()
    mask[0] = 0  # a row of pads only
    for checkpointing in (False, True):
        model.transformer._set_gradient_checkpointing(enable=checkpointing)
        model.zero_grad()
        loss = model(ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    logits, _ = read_in_pieces(model.eval(), ids, [3, 3], mask)
    assert torch.isfinite(logits).all()


def test_autocast_trains_the_same_with_and_without_window_checkpointing() -> None:
    model = tiny_model(torch.float32).train()
    ids = random_ids(2, 17)

    def run(checkpointing: bool) -> torch.Tensor:
        model.transformer._set_gradient_checkpointing(enable=checkpointing)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(ids, labels=ids).loss

    # sums of bfloat16 gradients in another order: a few units in their 8 bits
    assert_same_gradients(model, lambda: run(False), lambda: run(True), rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize("overlap", [0, 2])
def test_the_unpadded_forward_compiles_in_one_graph(overlap: int) -> None:
    model = tiny_model(torch.float32, overlap=overlap)
    compiled = torch.compile(lambda ids: model(ids, use_cache=False).logits, fullgraph=True, backend="aot_eager")
    for length in (5, 17):
        ids = random_ids(2, length)
        torch.testing.assert_close(compiled(ids), model(ids, use_cache=False).logits)
    torch._dynamo.reset()


def test_embeddings_are_resized_and_stay_tied() -> None:
    model = tiny_model(torch.float32)
    ids = random_ids(2, 12)
    before = model(ids).logits
    model.resize_token_embeddings(70, mean_resizing=False)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.config.vocab_size == 70
    torch.testing.assert_close(model(ids).logits[..., :61], before)
    assert model(torch.full((1, 3), 69)).logits.shape == (1, 3, 70)


def test_new_weights_have_gpt2s_scale() -> None:
    torch.manual_seed(0)
    model = RecurrentGPT2LMHeadModel(tiny_config(n_embd=128, n_layer=4, n_head=4, recurrence_hidden_size=200))
    scaled = 0.02 / (2 * 4) ** 0.5
    for block in model.transformer.h:
        for projection in (block.attn.c_proj, block.mlp.c_proj):
            assert projection.weight.std().item() == pytest.approx(scaled, rel=0.05)
        for projection in (block.attn.c_attn, block.mlp.c_fc):
            assert projection.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.transformer.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for layer in model.transformer.recurrence.layers:
        assert layer.weight.std().item() == pytest.approx((2 / layer.in_features) ** 0.5, rel=0.05)
        assert (layer.bias == 0).all()
    assert (model.transformer.recurrence.mix.logits == 0).all()
