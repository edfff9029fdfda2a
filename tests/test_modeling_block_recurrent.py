"""The block-recurrent transformer against its slow twin, and the tests of its specification's section 11."""

import copy
import itertools
from typing import Any

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from hf_recurrence import (
    BlockRecurrentCache,
    BlockRecurrentConfig,
    BlockRecurrentForCausalLM,
    RecurrentCache,
    attention,
    modeling_block_recurrent,
)
from hf_recurrence.recurrence import bucket_table, fixed_gate, lstm_gate, normalise, relative_buckets
from tests import reference
from tests.common import EXACT, assert_same_gradients, block_model, random_ids, read_in_pieces, tiny_model


ALL = [
    {"gate_type": a, "gate_config": b, "feedback": c, "attend_to_self": d, "empty_cache": e, "recurrent_layers": f}
    for a, b, c, d, e, f in itertools.product(
        ("fixed", "lstm"), ("skip", "dual", "single"), (False, True), (False, True), ("zeros", "mask"), ([1], [0, 2])
    )
]
GATES = [{"gate_type": a, "gate_config": b} for a in ("fixed", "lstm") for b in ("skip", "dual", "single")]


def slide(model: BlockRecurrentForCausalLM, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return model(ids, use_cache=False, **kwargs).logits


# -- the twin --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", ALL, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_outputs_states_and_gradients_equal_the_twin(changes: dict) -> None:
    model = block_model(**changes)
    ids = random_ids(1, 10)
    parameters = dict(model.named_parameters())
    parameters.setdefault("lm_head.weight", model.lm_head.weight)

    def expected() -> torch.Tensor:
        logits, _ = reference.block_recurrent(parameters, model.config, ids[0].tolist())
        loss = reference.cross_entropy(logits[:-1], ids[0, 1:].tolist())
        return loss + 0 * sum(parameter.sum() for parameter in parameters.values())

    assert_same_gradients(model, expected, lambda: model.train()(ids, labels=ids).loss)
    out = model.eval()(ids, use_cache=True)
    with torch.no_grad():
        logits, states = reference.block_recurrent(parameters, model.config, ids[0].tolist())
    torch.testing.assert_close(out.logits[0], logits, **EXACT)
    for layer, state in out.past_key_values.states.items():
        torch.testing.assert_close(state[0], states[layer], **EXACT)


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": False},
        {"norm_type": "layer"},
        {"gate_z_bias": False},
        {"gate_z_tanh": "single", "gate_config": "single"},
        {"recurrent_layers": []},
        {"tie_word_embeddings": False, "logit_scale": 0.5},
    ],
    ids=str,
)
def test_switches_equal_the_twin(changes: dict) -> None:
    model = block_model(**changes)
    ids = random_ids(1, 9)
    parameters = {"lm_head.weight": model.lm_head.weight, **dict(model.named_parameters())}
    with torch.no_grad():
        logits, _ = reference.block_recurrent(parameters, model.config, ids[0].tolist())
        torch.testing.assert_close(model(ids).logits[0], logits, **EXACT)


# -- splits and rows -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", ALL[::3], ids=lambda c: "-".join(str(v) for v in c.values()))
def test_any_split_and_any_padding_give_the_same(changes: dict) -> None:
    model = block_model(**changes)
    ids = random_ids(3, 14)
    with torch.no_grad():
        full = slide(model, ids)
        for sizes in ([1] * 13, [3, 7, 1], [4], [8], [13]):
            torch.testing.assert_close(read_in_pieces(model, ids, sizes)[0], full, **EXACT)
        mask = torch.rand(3, 14) > 0.35
        padded = slide(model, ids, attention_mask=mask.long())
        for row in range(3):
            alone = slide(model, ids[row : row + 1, mask[row]])
            torch.testing.assert_close(padded[row, mask[row]], alone[0], **EXACT)
        torch.testing.assert_close(read_in_pieces(model, ids, [3, 5, 1, 1], mask.long())[0], padded, **EXACT)


@pytest.mark.parametrize("changes", [{}, {"empty_cache": "mask"}, {"feedback": True}], ids=str)
def test_reset_starts_single_rows_afresh(changes: dict) -> None:
    model = block_model(**changes)
    first, second = random_ids(3, 9), random_ids(3, 11)
    cache = model(first, use_cache=True).past_key_values
    reset = torch.tensor([False, True, False])
    out = model(second, past_key_values=cache, reset=reset)
    fresh, continued = model(second).logits, model(torch.cat([first, second], 1)).logits[:, 9:]
    torch.testing.assert_close(out.logits, torch.where(reset[:, None, None], fresh, continued), **EXACT)
    after = model(second, past_key_values=out.past_key_values).logits
    long, short = torch.cat([first, second, second], 1), torch.cat([second, second], 1)
    expected = torch.where(reset[:, None, None], model(short).logits[:, 11:], model(long).logits[:, 20:])
    torch.testing.assert_close(after, expected, **EXACT)


# -- what a token sees -----------------------------------------------------------------------------------------------
def test_blocked_attention_is_dense_attention_with_a_band() -> None:
    """Without recurrence, by its reach: exactly `num_hidden_layers * window_size` tokens back."""
    model = block_model(recurrent_layers=[], empty_cache="mask", num_hidden_layers=2)
    embeds = model.model.embed_tokens(random_ids(1, 20)).detach().requires_grad_()
    logits = model(inputs_embeds=embeds).logits
    for position in range(20):
        (gradient,) = torch.autograd.grad(logits[0, position].sum(), embeds, retain_graph=True)
        seen = [i for i in range(20) if gradient[0, i].abs().max() > 0]
        assert seen == list(range(max(0, position - 8), position + 1))


def test_causality_and_reach_with_recurrence() -> None:
    for changes in ({}, {"feedback": True}, {"attend_to_self": True}):
        model = block_model(**changes)
        embeds = model.model.embed_tokens(random_ids(1, 30)).detach().requires_grad_()
        logits = model(inputs_embeds=embeds).logits
        for position in (3, 4, 11, 29):
            (gradient,) = torch.autograd.grad(logits[0, position].sum(), embeds, retain_graph=True)
            size = gradient[0].abs().amax(-1)
            assert (size[position + 1 :] == 0).all()
            assert size[0] > 0


def test_zeros_and_mask_differ_only_while_the_start_is_in_reach() -> None:
    ids = random_ids(1, 40)
    zeros, mask = (slide(block_model(recurrent_layers=[], empty_cache=kind), ids) for kind in ("zeros", "mask"))
    difference = (zeros - mask).abs().amax(-1)[0]
    assert (difference[:4] > 0).any()
    torch.testing.assert_close(zeros[:, 12:], mask[:, 12:], **EXACT)


def test_a_token_that_sees_nothing_is_finite_in_every_precision() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        model = block_model(dtype, empty_cache="mask").train()
        ids = random_ids(2, 9)
        mask = torch.ones_like(ids)
        mask[1] = 0
        loss = model(ids, labels=ids, attention_mask=mask).loss
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    for dtype in (torch.bfloat16, torch.float16):
        for changes in ({}, {"empty_cache": "mask"}, {"feedback": True, "attention_dropout": 0.1}):
            model = block_model(torch.float32, **changes).train()
            ids = random_ids(2, 9)
            with torch.autocast("cpu", dtype=dtype):
                loss = model(ids, labels=ids).loss
            loss.backward()
            assert torch.isfinite(loss)
            assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("changes", [{}, {"attend_to_self": True}, {"empty_cache": "mask"}], ids=str)
def test_bands_of_queries_give_what_whole_tiles_give(changes: dict, monkeypatch) -> None:
    model, ids = block_model(window_size=7, **changes).train(), random_ids(2, 25)

    def loss(band: int) -> torch.Tensor:
        monkeypatch.setattr(attention, "BAND", band)
        return model(ids, labels=ids).loss

    assert_same_gradients(model, lambda: loss(7), lambda: loss(3))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_banded_attention_has_the_gradients_of_its_definition(dropout: float) -> None:
    query, key, value = (torch.randn(2, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 9, 9))
    bias = torch.randn(1, 2, 2, 6, dtype=torch.float64, requires_grad=True)
    ranges = [(0, 2, 1, 7), (2, 4, 3, 9)]

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return attention.BandedAttention.apply(*inputs, ranges, dropout)

    torch.manual_seed(7)
    expected = []
    for first, last, first_key, last_key in ranges:
        scores = query[:, :, first:last] @ key[:, :, first_key:last_key].transpose(-1, -2) + bias
        kept = torch.ones_like(scores)
        if dropout:
            kept = torch.empty_like(scores, dtype=torch.bool).bernoulli_(1 - dropout).double() / (1 - dropout)
        expected.append(scores.softmax(-1) * kept @ value[:, :, first_key:last_key])
    torch.testing.assert_close(run(query, key, value, bias), torch.cat(expected, 2), **EXACT)
    assert torch.autograd.gradcheck(run, (query, key, value, bias))


# -- the state -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", GATES, ids=str)
def test_a_gate_that_remembers_keeps_the_initial_state(changes: dict) -> None:
    model = block_model(**changes)
    cell = model.model.layers[1].cell
    with torch.no_grad():
        for gate in (cell.attention_gate, cell.mlp_gate):
            if gate is not None and gate.bias is not None:
                gate.bias.fill_(1e4)
            elif gate is not None:
                gate.f_proj.bias.fill_(1e4)
                gate.i_proj.bias.fill_(-1e4)
        state = model(random_ids(2, 17), use_cache=True).past_key_values.states[1]
    assert torch.equal(state, cell.initial.expand_as(state))


def test_equal_states_stay_equal_and_permuted_ones_change_nothing() -> None:
    model = block_model()
    cell, ids = model.model.layers[1].cell, random_ids(1, 17)
    with torch.no_grad():
        before = slide(model, ids)
        order = torch.tensor([2, 0, 1])
        cell.ids.copy_(cell.ids[order])
        cell.initial.copy_(cell.initial[order])
        torch.testing.assert_close(slide(model, ids), before, **EXACT)
        cell.initial.copy_(cell.initial[:1].expand_as(cell.initial))
        distinct = model(ids, use_cache=True).past_key_values.states[1][0]
        assert (distinct[0] - distinct[1]).abs().max() > 1e-3
        cell.ids.copy_(cell.ids[:1].expand_as(cell.ids))
        equal = model(ids, use_cache=True).past_key_values.states[1][0]
        torch.testing.assert_close(equal, equal[:1].expand_as(equal), **EXACT)


@pytest.mark.parametrize("changes", GATES, ids=str)
def test_gates_reach_the_second_block_and_not_the_first(changes: dict) -> None:
    model = block_model(**changes)
    ids = random_ids(1, 8)
    before = slide(model, ids)
    with torch.no_grad():
        for name, parameter in model.model.layers[1].cell.named_parameters():
            if "gate" in name or "up_proj" in name or "_q_proj" in name:
                parameter.add_(torch.randn_like(parameter))
    after = slide(model, ids)
    assert torch.equal(after[:, :4], before[:, :4])
    assert (after[:, 4:] - before[:, 4:]).abs().max() > 1e-6


def test_without_its_half_of_the_output_map_the_state_has_no_path_to_tokens() -> None:
    for changes in ({}, {"feedback": True}):
        model = block_model(**changes)
        plain = block_model(recurrent_layers=[])
        weights = model.state_dict()
        for layer in range(3):
            name = f"model.layers.{layer}.o_proj.weight"
            if weights[name].shape[1] == 16:
                weights[name][:, 8:] = 0
        model.load_state_dict(weights)
        own = {name: tensor for name, tensor in weights.items() if name in plain.state_dict()}
        own = {name: tensor[:, :8] if name.endswith("o_proj.weight") else tensor for name, tensor in own.items()}
        for name, tensor in own.items():
            if name.endswith("qkv_proj.weight"):  # without the rows that ask states
                own[name] = torch.cat([tensor[:8], tensor[-16:]])
        plain.load_state_dict(own)
        ids = random_ids(1, 17)
        torch.testing.assert_close(slide(model, ids), slide(plain, ids), **EXACT)


def test_every_part_of_the_cell_learns_from_two_blocks_and_the_start_only_from_new_documents() -> None:
    for changes in GATES:
        model = block_model(**changes).train()
        ids = random_ids(2, 8)
        model(ids, labels=ids).loss.backward()
        for name, parameter in model.model.layers[1].cell.named_parameters():
            assert parameter.grad.abs().max() > 0, name
        cache = model(ids, use_cache=True).past_key_values
        model.zero_grad()
        model(ids, labels=ids, past_key_values=copy.deepcopy(cache)).loss.backward()
        assert (model.model.layers[1].cell.initial.grad == 0).all()
        model.zero_grad()
        model(ids, labels=ids, past_key_values=cache, reset=torch.tensor([True, False])).loss.backward()
        assert model.model.layers[1].cell.initial.grad.abs().max() > 0


def test_no_gradient_flows_into_the_segment_before() -> None:
    model = block_model().train()
    before = model.model.embed_tokens(random_ids(2, 8)).detach().requires_grad_()
    cache = model(inputs_embeds=before, use_cache=True).past_key_values
    assert not any(tensor.requires_grad for tensor in cache.tensors.values())
    model(random_ids(2, 8), labels=random_ids(2, 8), past_key_values=cache).loss.backward()
    assert before.grad is None


# -- details ---------------------------------------------------------------------------------------------------------
def test_buckets_are_t5s() -> None:
    distances = torch.arange(300)
    found = relative_buckets(distances, bucket_table(32, 128))
    firsts = [int((found == number).nonzero()[0]) for number in range(16, 32)]
    assert firsts == [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    theirs = T5Attention._relative_position_bucket(-distances, bidirectional=False, num_buckets=32, max_distance=128)
    assert torch.equal(found, theirs)


def test_gate_algebra() -> None:
    carried, bias = torch.randn(2, 3, 4).double(), torch.randn(4).double()
    new = [torch.randn(2, 3, 4).double() for _ in range(5)]
    state, g = carried, torch.sigmoid(bias)
    for z in new:
        state = fixed_gate(state, z, bias)
    expected = g**5 * carried + (1 - g) * sum(g ** (4 - t) * z for t, z in enumerate(new))
    torch.testing.assert_close(state, expected, **EXACT)
    zero = torch.zeros_like(carried)
    torch.testing.assert_close(lstm_gate(carried, zero, zero, zero) / carried, torch.full_like(carried, 0.7310585786))


def test_scales_have_no_sign_and_projections_no_length() -> None:
    model = block_model()
    ids = random_ids(1, 13)
    before = slide(model, ids)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.scale.neg_()
        torch.testing.assert_close(slide(model, ids), before, **EXACT)
        model.model.layers[0].qkv_proj.weight[:8].mul_(10)
        model.model.layers[1].cell.k_proj.weight.mul_(10)
        torch.testing.assert_close(slide(model, ids), before, rtol=1e-3, atol=1e-4)  # but for the epsilon of 1e-6


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"recurrent_layers": []}, 151_023_712),
        ({"recurrent_layers": [], "num_hidden_layers": 13}, 163_608_936),
        ({}, 160_462_968),
        ({"gate_config": "dual"}, 168_853_624),
        ({"gate_config": "single"}, 170_948_728),
        ({"gate_type": "lstm"}, 164_658_296),
        ({"gate_type": "lstm", "gate_config": "dual"}, 181_438_584),
        ({"gate_type": "lstm", "gate_config": "single"}, 179_338_360),
        ({"feedback": True}, 183_531_728),
        ({"feedback": True, "gate_type": "lstm", "gate_config": "single"}, 202_407_120),
        (
            {"recurrent_layers": [], "num_hidden_layers": 13, "num_attention_heads": 16, "intermediate_size": 8192},
            327_190_224,
        ),
        ({"num_attention_heads": 16, "intermediate_size": 8192}, 319_849_712),
    ],
    ids=str,
)
def test_parameter_counts(changes: dict, count: int) -> None:
    with torch.device("meta"):
        model = BlockRecurrentForCausalLM(BlockRecurrentConfig(gate_z_bias=False, **changes))
    assert sum(parameter.numel() for parameter in model.parameters()) == count + 32128 * 1024


# -- decoding --------------------------------------------------------------------------------------------------------
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("changes", [{}, {"feedback": True, "empty_cache": "mask"}, {"recurrent_layers": []}], ids=str)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
def test_greedy_decoding_equals_full_passes(length: int, changes: dict) -> None:
    model = block_model(**changes)
    ids = text = random_ids(2, length)
    for _ in range(19):
        text = torch.cat([text, slide(model, text)[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(ids, max_new_tokens=19, **GREEDY), text)
    for settings in ({"num_beams": 3}, {"do_sample": True, "top_k": 5}):
        both = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            both.append(model.generate(ids, max_new_tokens=9, use_cache=use_cache, **{**GREEDY, **settings}))
        assert torch.equal(*both)


def test_assisted_and_prompt_lookup_decoding_give_exactly_greedys_text() -> None:
    model, other = block_model(window_size=16), block_model(window_size=16, num_hidden_layers=2)
    ids = random_ids(1, 7).repeat(1, 3)
    expected = model.generate(ids, max_new_tokens=30, **GREEDY)
    settings = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
    for more in ({"assistant_model": other, **settings}, {"prompt_lookup_num_tokens": 4}):
        assert torch.equal(model.generate(ids, max_new_tokens=30, **GREEDY, **more), expected)


@pytest.mark.parametrize("changes", [{}, {"empty_cache": "mask"}], ids=str)
def test_crop_goes_back_over_the_block_under_way_and_the_one_before(changes: dict) -> None:
    model = block_model(**changes)
    ids, more = random_ids(1, 22), random_ids(1, 9)
    cache = model(ids, use_cache=True).past_key_values
    for length in range(22, 15, -1):
        cropped = copy.deepcopy(cache)
        cropped.crop(length - 22)
        expected = model(torch.cat([ids[:, :length], more], 1)).logits[:, length:]
        torch.testing.assert_close(model(more, past_key_values=cropped).logits, expected, **EXACT)
    with pytest.raises(ValueError, match="`max_length` must not reach further back than the block before"):
        cache.crop(15)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 0]])
    ids, more = random_ids(2, 5), random_ids(2, 6)
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    cache.crop(3)
    full = torch.cat([mask[:, :3], torch.ones_like(more)], 1)
    expected = model(torch.cat([ids[:, :3], more], 1), attention_mask=full).logits[:, 3:]
    torch.testing.assert_close(model(more, past_key_values=cache).logits, expected, **EXACT)


def test_the_cache_is_of_constant_size_and_survives_its_file(tmp_path) -> None:
    model = block_model()
    cache, sizes = None, []
    with torch.no_grad():
        for token in random_ids(2, 60).unbind(1):
            cache = model(token[:, None], past_key_values=cache, use_cache=True).past_key_values
            sizes.append(cache.nbytes())
    assert sizes[40:44] == sizes[8:12] == sizes[:4]
    cache.save(tmp_path / "book.safetensors")
    loaded = BlockRecurrentCache.load(tmp_path / "book.safetensors")
    for _ in range(3):
        more = random_ids(2, 3)
        assert torch.equal(model(more, past_key_values=loaded).logits, model(more, past_key_values=cache).logits)


def test_a_cache_of_another_model_is_refused(tmp_path) -> None:
    model, other = block_model(), tiny_model()
    ids = random_ids(1, 6)
    cache = model(ids, use_cache=True).past_key_values
    cache.save(tmp_path / "cache.st")
    with pytest.raises(ValueError, match="written by `RecurrentCache.save`, got .* of type 'block_recurrent'"):
        RecurrentCache.load(tmp_path / "cache.st")
    with pytest.raises(ValueError, match="`past_key_values` must be a RecurrentCache, got BlockRecurrentCache"):
        other(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="`window_size` = 8, got a cache with 4"):
        block_model(window_size=8)(ids, past_key_values=cache)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recurrent_layers": 4}, "`recurrent_layers` must be a list of layers, got 4"),
        ({"recurrent_layers": [3]}, r"`recurrent_layers` must be layers counted from 0 .* at most 2 .* got \[3\]"),
        ({"gate_type": "gru"}, "`gate_type` must be one of fixed, lstm, got 'gru'"),
        ({"segment_length": 6}, r"`segment_length` must be a multiple of `window_size` \(4\), got 6"),
        ({"feedback": True, "recurrent_layers": []}, "`feedback` must be False where `recurrent_layers` are none"),
        ({"rel_pos_buckets": 3}, "`rel_pos_buckets` must be an even integer, got 3"),
        ({"num_states": 0}, "`num_states` must be an integer of at least 1, got 0"),
    ],
    ids=str,
)
def test_broken_rules_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_model(**changes)


# -- training --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("changes", [{}, {"feedback": True}, {"dropout": 0.2, "attention_dropout": 0.1}], ids=str)
def test_checkpointing_gives_the_same_gradients(changes: dict, reentrant: bool) -> None:
    model = block_model(**changes).train()
    ids = random_ids(2, 14)

    def run(checkpointing: bool) -> torch.Tensor:
        model.gradient_checkpointing_disable()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if changes.get("dropout"):  # falls on the same places only where blocks are run one by one
            model.model.gradient_checkpointing = True
        torch.manual_seed(5)
        return model(ids, labels=ids).loss

    assert_same_gradients(model, lambda: run(False), lambda: run(True))


def test_the_unpadded_forward_compiles_in_one_graph() -> None:
    for changes in ({}, {"feedback": True}, {"recurrent_layers": []}):
        model = block_model(torch.float32, **changes)
        compiled = torch.compile(lambda ids, model=model: slide(model, ids), fullgraph=True, backend="aot_eager")
        ids = random_ids(2, 17)
        torch.testing.assert_close(compiled(ids), slide(model, ids))
        torch._dynamo.reset()


def test_the_loss_makes_no_logits_of_all_positions() -> None:
    model = block_model().train()
    sizes, ids = [], random_ids(2, 17)
    expected = model(ids, labels=ids, skip_logits=False).loss
    model.lm_head.register_forward_hook(lambda module, args, output: sizes.append(output.shape[1]))
    out = model(ids, labels=ids)
    torch.testing.assert_close(out.loss, expected, **EXACT)
    assert out.logits is None
    assert max(sizes) <= 4


def test_a_long_text_is_read_in_runs_that_give_the_same(monkeypatch) -> None:
    for changes in ({}, {"feedback": True}, {"empty_cache": "mask"}):
        model, ids = block_model(**changes), random_ids(2, 47)
        for length in (40, 47):
            with torch.no_grad():
                whole = model(ids[:, :length], use_cache=True)
                monkeypatch.setattr(modeling_block_recurrent, "RUN", 8)
                runs = model(ids[:, :length], use_cache=True)
                following = [model(ids[:, :9], past_key_values=out.past_key_values).logits for out in (whole, runs)]
                monkeypatch.undo()
            torch.testing.assert_close(runs.logits, whole.logits, **EXACT)
            torch.testing.assert_close(*following, **EXACT)
        model.train()

        def loss(run: int, model=model, ids=ids) -> torch.Tensor:
            monkeypatch.setattr(modeling_block_recurrent, "RUN", run)
            return model(ids, labels=ids).loss

        assert_same_gradients(model, lambda loss=loss: loss(4096), lambda loss=loss: loss(8))
        monkeypatch.undo()


def test_reading_keeps_keys_values_and_states_of_the_last_blocks_only(monkeypatch) -> None:
    monkeypatch.setattr(modeling_block_recurrent, "RUN", 4)
    kept = []
    store = modeling_block_recurrent.BlockSegment.store

    def look(segment: Any, cache: Any, found: Any) -> None:
        tokens = [sum(pair[0].shape[2] for pair in layer) for layer in found.keys_values]
        kept.append((max(tokens), max(map(len, segment.states.values()))))
        store(segment, cache, found)

    monkeypatch.setattr(modeling_block_recurrent.BlockSegment, "store", look)
    with torch.no_grad():
        for length in (40, 400):
            block_model()(random_ids(1, length), use_cache=True)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_normalisation_has_the_gradients_of_its_definition(dtype: torch.dtype) -> None:
    vectors = torch.randn(3, 5, dtype=dtype, requires_grad=True)
    for mean in (False, True):
        if dtype == torch.float64:
            assert torch.autograd.gradcheck(lambda x, mean=mean: normalise(x, mean, 1e-6), vectors)
        squares = (vectors.double() ** 2).sum(-1, keepdim=True) / (5 if mean else 1)
        torch.testing.assert_close(
            normalise(vectors, mean, 1e-6), (vectors.double() / (squares + 1e-6).sqrt()).to(dtype)
        )
