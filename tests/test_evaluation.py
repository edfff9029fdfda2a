"""FLOPs against the paper's table and the counter; the gain from the state."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from hf_recurrence import BlockRecurrentConfig
from hf_recurrence.evaluation import answer_state_gain, block_recurrent_flops, state_gain
from tests.common import block_model, random_ids, roberta_model, sru_model, tiny_model


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


@pytest.mark.parametrize("overlap", [0, 2, 4])
def test_state_gain_is_the_difference_of_losses(overlap: int) -> None:
    model, stride = tiny_model(torch.float64, overlap=overlap), 5 - overlap
    ids = random_ids(2, 5 + 4 * stride)
    found = state_gain(model, ids, max_distance=3)
    losses = {}
    for row in range(2):
        for position in range(5, ids.shape[1] - 1):
            window = (position - 5) // stride + 1
            for memory in (0, 1, 2, window):  # the windows before it that the model has read
                start = max(0, window - memory) * stride
                logits = model(ids[row : row + 1, start : position + 1]).logits[0, -1].log_softmax(-1)
                losses[row, window, position, memory] = -logits[ids[row, position + 1]].item()
    gains = [
        (row, window, position, losses[row, window, position, memory] - losses[row, window, position, window], memory)
        for row, window, position, memory in losses
    ]

    def mean(chosen: list[float]) -> float:
        return sum(chosen) / len(chosen)

    assert found["windows"] == 5
    assert found["tokens"] == len([gain for *_, gain, memory in gains if memory == 0])
    assert found["gain"] == pytest.approx(mean([gain for *_, gain, memory in gains if memory == 0]), abs=1e-10)
    assert found["loss_without_state"] - found["loss_with_state"] == pytest.approx(found["gain"])
    assert found["first_position"] == overlap
    for slot, value in enumerate(found["gain_by_position"]):
        of_slot = [gain for _, _, place, gain, memory in gains if memory == 0 and (place - 5) % stride == slot]
        assert value == pytest.approx(mean(of_slot), abs=1e-10)
    for distance, value in enumerate(found["gain_by_distance"], 1):
        far = [gain for _, window, _, gain, memory in gains if window >= 3 and memory == distance - 1]
        assert value == pytest.approx(mean(far), abs=1e-10)
    assert len(found["gain_by_distance"]) == 3


def test_what_has_no_state_between_windows_is_told() -> None:
    model, ids = tiny_model(), random_ids(2, 23)
    with pytest.raises(
        ValueError, match="`input_ids` must hold at least two windows of 5 tokens with an overlap of 0"
    ):
        state_gain(model, ids[:, :9])
    with pytest.raises(ValueError, match="`max_distance` must be at least 1, got 0"):
        state_gain(model, ids, max_distance=0)
    with pytest.raises(ValueError, match="`model` must be of type recurrent_gpt2 or block_recurrent, got 'sru_bert'"):
        state_gain(sru_model(), ids)
    with pytest.raises(ValueError, match="`model` must be of type 'recurrent_roberta', got 'recurrent_gpt2'"):
        answer_state_gain(model, [])
    with pytest.raises(ValueError, match="an example of at least two windows, got none"):
        answer_state_gain(roberta_model(), [])


def test_state_gain_counts_only_the_state_of_a_block_recurrent_model() -> None:
    model = block_model(torch.float64)
    ids = random_ids(2, 24)
    found = state_gain(model, ids)
    assert found["gain"] != 0
    # reset after every block: the cache holds the keys of the block before, and no state
    cache, without = None, []
    for start in range(0, 24, 4):
        if cache is not None:
            states = cache.tensors["states.1"]
            cache.tensors["states.1"] = model.model.layers[1].cell.initial.expand_as(states)
        out = model(ids[:, start : start + 4], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        without.append(out.logits)
    logits = [torch.cat(without, 1), model(ids).logits]
    losses = [
        torch.nn.functional.cross_entropy(part[:, 4:-1].transpose(1, 2), ids[:, 5:], reduction="mean").item()
        for part in logits
    ]
    assert found["gain"] == pytest.approx(losses[0] - losses[1], abs=1e-10)
    with torch.no_grad():
        model.model.layers[1].o_proj.weight[:, 8:].zero_()  # the state's only path to the tokens
    found = state_gain(model, ids)
    assert abs(found["gain"]) < 1e-6
    assert max(map(abs, found["gain_by_distance"])) < 1e-6


def test_the_gain_of_answers_is_the_difference_of_losses() -> None:
    model = roberta_model(torch.float64)
    ids = torch.randint(3, 61, (3, 4, 5))
    mask = torch.ones_like(ids)
    mask[1, 2:], mask[2, 1:] = 0, 0  # two windows, and one
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "context_mask": mask,
        "start_positions": torch.tensor([[2, 1], [1, 0], [0, 3]]),
        "end_positions": torch.tensor([[2, 3], [1, 2], [0, 4]]),
        "answer_classes": torch.tensor([0, 0, 0]),
    }
    found = answer_state_gain(model, [batch, {**batch, "answer_classes": torch.tensor([1, 2, 0])}])
    assert found["examples"] == 4
    assert found["examples_by_distance"] == {"1": 1, "2": 1}
    assert "run_window" not in vars(model.roberta)
    row = {name: values[:1] for name, values in batch.items()}
    with_state = model(**row).loss.item()
    alone = model.roberta(ids[0][:, None], head=model.qa_outputs)
    logits = alone.head_outputs.reshape(20, 2)
    classes = model.class_outputs(alone.window_embeddings.amax((0, 1)))
    expected = -logits.log_softmax(0)[11, 0] - logits.log_softmax(0)[13, 1] - classes.log_softmax(0)[0]
    assert found["gain_by_distance"]["2"] == pytest.approx(expected.item() - with_state, abs=1e-10)
