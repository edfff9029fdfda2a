"""FLOPs against the paper's table and the counter; the gain from the state."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from hf_recurrence import BlockRecurrentConfig
from hf_recurrence.evaluation import block_recurrent_flops, state_gain
from tests.common import block_model, random_ids, tiny_model


CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("slide_12l", 352.3),
        ("slide_13l", 381.7),
        ("rec_fixed_skip", 377.5),
        ("rec_fixed_dual", 394.3),
        ("rec_fixed_single", 398.5),
        ("rec_lstm_skip", 385.9),
        ("rec_lstm_single", 415.2),
        ("rec_lstm_dual", 419.4),
        ("feedback_fixed_skip", 446.7),
        ("feedback_lstm_single", 484.4),
    ],
)
def test_flops_of_the_papers_models(name: str, millions: float) -> None:
    config = AutoConfig.from_pretrained(CONFIGS / f"block_recurrent_{name}.json")
    assert block_recurrent_flops(config) / 1e6 == pytest.approx(millions, abs=0.06)
    assert block_recurrent_flops(config, logits=True) - block_recurrent_flops(config) == 2 * 1024 * 32128


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("gates", [("fixed", "skip"), ("fixed", "dual"), ("lstm", "single"), ("lstm", "dual")])
def test_flops_are_those_that_the_counter_counts(gates: tuple[str, str], feedback: bool) -> None:
    model = block_model(
        torch.float32, gate_type=gates[0], gate_config=gates[1], feedback=feedback, recurrent_layers=[1]
    )
    ids = random_ids(1, 12)
    # the counter does not know the CPU's fused attention
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, use_cache=True)
    assert counter.get_total_flops() == pytest.approx(12 * block_recurrent_flops(model.config, logits=True))


def test_every_row_of_the_papers_tables_is_a_config() -> None:
    names = {path.stem.removeprefix("block_recurrent_") for path in CONFIGS.glob("block_recurrent_*.json")}
    table = {"xl_512", "xl_1024", "xl_2048", "slide_12l", "slide_13l", "feedback_lstm_single", "feedback_fixed_skip"}
    table |= {f"rec_{kind}_{gate}" for kind in ("fixed", "lstm") for gate in ("dual", "single", "skip")}
    table |= {"slide_13l_large", "rec_fixed_skip_large", "rec_lstm_single_large"}
    assert table <= names
    for name in names:
        assert type(AutoConfig.from_pretrained(CONFIGS / f"block_recurrent_{name}.json")) is BlockRecurrentConfig


def test_state_gain_is_the_difference_of_losses() -> None:
    model = tiny_model(torch.float64)
    ids = random_ids(2, 23)
    found = state_gain(model, ids)
    logits = model(ids).logits.log_softmax(-1)
    with_state, without, count = 0.0, 0.0, 0
    for row in range(2):
        for position in range(5, 20):
            target, start = ids[row, position + 1], position // 5 * 5
            alone = model(ids[row : row + 1, start : position + 1]).logits[0, -1].log_softmax(-1)
            with_state, without = with_state - logits[row, position, target], without - alone[target]
            count += 1
    assert found["tokens"] == count
    assert found["gain"] == pytest.approx(((without - with_state) / count).item(), abs=1e-5)
    assert len(found["gain_by_position"]) == 5
    with pytest.raises(ValueError, match="`input_ids` must hold at least two windows"):
        state_gain(model, ids[:, :5])
    with pytest.raises(ValueError, match="`overlap` must be 0"):
        state_gain(tiny_model(overlap=1), ids)


def test_state_gain_counts_only_the_state_of_a_block_recurrent_model() -> None:
    model = block_model(torch.float64)
    ids = random_ids(2, 24)
    assert state_gain(model, ids)["gain"] != 0
    with torch.no_grad():
        model.model.layers[1].o_proj.weight[:, 8:].zero_()  # the state's only path to the tokens
    assert abs(state_gain(model, ids)["gain"]) < 1e-6
