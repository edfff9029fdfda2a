"""The scans against their twins and their properties: sections 3 and 4 of their specification."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from hf_recurrence import scan_loops
from hf_recurrence.scan import SRUScan, SwishScan, sru_scan, swish_scan
from tests import reference
from tests.common import EXACT


LENGTHS = [1, 2, 31, 32, 33, 63]  # about one and two chunks


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_loops, "SCRATCH", 0)  # the lengths are about those of short chunks


def tensors(length: int, steps: int = 1, rows: int = 3, width: int = 4) -> dict[str, torch.Tensor]:
    shapes = {
        "x": (rows, length, width),
        "forget": (rows, length, width),
        "slope": (width,),
        "offset": (width,),
        "weight": (width,),
        "state": (rows, steps, width),
    }
    return {name: (2 * torch.randn(shape)).double().requires_grad_() for name, shape in shapes.items()}


def swish_twin(t: dict, mask: torch.Tensor, reverse: bool, trained: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin on the real tokens of each row, in the order of the scan; 0 at the others."""
    slope, offset = (t["slope"], t["offset"]) if trained else (1.0, 0.0)
    outputs, finals = [], []
    for x, row, state in zip(t["x"], mask, t["state"], strict=True):
        turn = (lambda tensor: tensor.flip(0)) if reverse else (lambda tensor: tensor)
        states, final = reference.swish_rnn(turn(x[row]), slope, offset, turn(state))
        outputs.append(torch.zeros_like(x).index_put((row.nonzero()[:, 0],), turn(states)))
        finals.append(turn(final))
    return torch.stack(outputs), torch.stack(finals)


def sru_twin(t: dict, mask: torch.Tensor, reverse: bool) -> tuple[torch.Tensor, ...]:
    found = []
    for x, forget, row, state in zip(t["x"], t["forget"], mask, t["state"], strict=True):
        turn = (lambda tensor: tensor.flip(0)) if reverse else (lambda tensor: tensor)
        *states, final = reference.sru(turn(x[row]), turn(forget[row]), t["weight"], turn(state))
        place = (row.nonzero()[:, 0],)
        found.append([*(torch.zeros_like(x).index_put(place, turn(part)) for part in states), turn(final)])
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True))


def assert_same(found: tuple, expected: tuple, inputs: list[torch.Tensor]) -> None:
    """Outputs, final states, and the gradients of a random sum of both."""
    gradients = []
    for outputs in (found, expected):
        generator = torch.Generator().manual_seed(7)
        loss = sum((part * torch.randn(part.shape, generator=generator).double()).sum() for part in outputs)
        gradients.append(torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True))
    for first, second in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(first, second, **EXACT)


def test_chunks_of_narrow_tensors_have_twice_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(2, 100, 64)
    assert [scan_loops.spans(x, False)[0], scan_loops.spans(x, True)[0]] == [slice(0, 32), slice(96, 100)]
    monkeypatch.setattr(scan_loops, "SCRATCH", 64 * 128)
    assert scan_loops.spans(x, True) == [slice(64, 100), slice(0, 64)]
    monkeypatch.setattr(scan_loops, "SCRATCH", 64 * 128 - 1)
    assert len(scan_loops.spans(x, False)) == 4


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("masked", [False, True])
def test_outputs_final_states_and_gradients_equal_the_twins(
    masked: bool, length: int, steps: int, reverse: bool
) -> None:
    t = tensors(length, steps)
    mask = torch.rand(3, length) > 0.4 if masked else torch.ones(3, length, dtype=torch.bool)
    mask[0] &= not masked  # a row of pads only
    options = {"initial_state": t["state"], "mask": mask if masked else None, "steps": steps, "reverse": reverse}
    inputs = [t["x"], t["state"]]
    assert_same(swish_scan(t["x"], **options), swish_twin(t, mask, reverse, trained=False), inputs)
    inputs = [t[name] for name in ("x", "slope", "offset", "state")]
    assert_same(swish_scan(t["x"], t["slope"], t["offset"], **options), swish_twin(t, mask, reverse), inputs)
    inputs = [t[name] for name in ("x", "forget", "weight", "state")]
    assert_same(sru_scan(t["x"], t["forget"], t["weight"], **options), sru_twin(t, mask, reverse), inputs)


def test_gradients_equal_numerical_ones() -> None:
    t = tensors(35, rows=1, width=2)
    state = t["state"][:, 0]
    for reverse in (False, True):
        assert torch.autograd.gradcheck(lambda x, s, r=reverse: SwishScan.apply(x, s, None, None, r), (t["x"], state))
        found = (t["x"], state, t["slope"], t["offset"])
        assert torch.autograd.gradcheck(lambda *inputs, r=reverse: SwishScan.apply(*inputs, r), found)
        found = (t["x"], t["forget"], t["weight"], state)
        assert torch.autograd.gradcheck(lambda *inputs, r=reverse: SRUScan.apply(*inputs, r), found)


def test_it_is_a_gate_without_weights() -> None:
    """c[i] = g * c[i - 1] + (1 - g) * x[i] with g = sigmoid(c[i - 1] - x[i]), so it never leaves what it has seen."""
    x = 3 * torch.randn(2, 40, 5).double()
    c, _ = swish_scan(x)
    before = torch.cat([torch.zeros(2, 1, 5).double(), c[:, :-1]], 1)
    gate = torch.sigmoid(before - x)
    torch.testing.assert_close(c, gate * before + (1 - gate) * x, **EXACT)
    assert (c <= x.cummax(1).values.clamp(min=0) + 1e-12).all()
    assert (c >= x.cummin(1).values.clamp(max=0) - 1e-12).all()


def test_a_steep_slope_is_a_running_maximum_and_none_a_moving_average() -> None:
    x = torch.randn(2, 40, 5).double()
    slope, offset = torch.full((5,), 1e6).double(), torch.zeros(5).double()
    torch.testing.assert_close(swish_scan(x, slope, offset)[0], x.cummax(1).values.clamp(min=0), **EXACT)
    c, average = swish_scan(x, 0 * slope, offset)[0], torch.zeros(2, 5).double()
    for i in range(40):
        average = (average + x[:, i]) / 2
        torch.testing.assert_close(c[:, i], average, **EXACT)


def test_a_constant_input_is_approached_from_below() -> None:
    c, _ = swish_scan(torch.full((1, 60, 1), 1.5).double())
    assert (c.diff(dim=1) >= 0).all()
    assert (c[:, :30].diff(dim=1) > 0).all()  # until float64 has no numbers left in between
    assert 1.5 - 1e-9 < c[0, -1, 0] <= 1.5


def test_the_derivative_stays_within_its_bounds() -> None:
    state = torch.linspace(-40, 40, 4001).double()[:, None].requires_grad_()
    x = torch.zeros(4001, 1, 1).double().requires_grad_()
    of_state, of_x = torch.autograd.grad(SwishScan.apply(x, state, None, None, False).sum(), (state, x))
    torch.testing.assert_close(of_state[:, 0] + of_x[:, 0, 0], torch.ones(4001).double(), **EXACT)
    assert -0.0999 < of_state.min() < -0.0997
    assert 1.0997 < of_state.max() < 1.0999
    assert abs(state[of_state.argmax()].item() - 2.4) < 0.05


@pytest.mark.parametrize("length", [6, 7, 64])
def test_steps_are_interleaved_recurrences(length: int) -> None:
    x = torch.randn(2, length, 3)
    for steps in (2, 3):
        c, _ = swish_scan(x, steps=steps)
        for lane in range(steps):
            assert torch.equal(c[:, lane::steps], swish_scan(x[:, lane::steps])[0])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_pieces_with_the_state_carried_equal_the_whole(steps: int, reverse: bool) -> None:
    t = tensors(40, steps)
    whole, final = swish_scan(t["x"], steps=steps, reverse=reverse)
    whole_sru = sru_scan(t["x"], t["forget"], t["weight"], steps=steps, reverse=reverse)
    for sizes in ([1] * 40, [13, 0, 2, 25], [40]):
        parts: dict[str, list] = {"swish": [], "sru": []}
        state, sru_state = None, None
        pieces = [*zip(t["x"].split(sizes, 1), t["forget"].split(sizes, 1), strict=True)]
        for x, forget in reversed(pieces) if reverse else pieces:
            c, state = swish_scan(x, initial_state=state, steps=steps, reverse=reverse)
            h, _, sru_state = sru_scan(x, forget, t["weight"], initial_state=sru_state, steps=steps, reverse=reverse)
            parts["swish"].append(c)
            parts["sru"].append(h)
        joined = [torch.cat(found[::-1] if reverse else found, 1) for found in parts.values()]
        expected = [whole, whole_sru[0], final, whole_sru[2]]
        for found, wanted in zip([*joined, state, sru_state], expected, strict=True):
            torch.testing.assert_close(found, wanted, **EXACT)


def test_reverse_is_flipped_forward() -> None:
    t = tensors(45)
    found = swish_scan(t["x"], t["slope"], t["offset"], reverse=True)[0]
    torch.testing.assert_close(found, swish_scan(t["x"].flip(1), t["slope"], t["offset"])[0].flip(1), **EXACT)


def test_a_token_sees_only_those_before_it() -> None:
    t = tensors(40)
    for reverse in (False, True):
        c = swish_scan(t["x"], reverse=reverse)[0]
        (gradient,) = torch.autograd.grad(c[:, 20].sum(), t["x"])
        seen = (gradient.abs().amax((0, 2)) > 0).nonzero()[:, 0]
        assert seen.min() == (20 if reverse else 0)
        assert seen.max() == (39 if reverse else 20)


def test_what_stands_at_pads_reaches_nothing() -> None:
    t, mask = tensors(9, 2), torch.rand(3, 9) > 0.5
    for reverse in (False, True):
        outputs = [*swish_scan(t["x"], mask=mask, steps=2, reverse=reverse)]
        outputs += sru_scan(t["x"], t["forget"], t["weight"], mask=mask, steps=2, reverse=reverse)
        gradients = torch.autograd.grad(sum(part.square().sum() for part in outputs), (t["x"], t["forget"]))
        assert all((gradient[~mask] == 0).all() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(2, 200, 3).to(dtype)
    c, final = swish_scan(x)
    assert c.dtype == final.dtype == dtype
    assert torch.equal(c, swish_scan(x.float())[0].to(dtype))


def test_only_inputs_and_states_are_kept() -> None:
    kept = []
    x = torch.randn(2, 100, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        swish_scan(x)
    assert sorted(kept)[-2:] == [1600, 1600]
    assert sum(kept) < 2 * 1600 + 100


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of torch's own forward mode
def test_a_second_derivative_and_forward_mode_are_refused_clearly() -> None:
    t = tensors(5)
    runs: list[Any] = [lambda x: swish_scan(x)[0], lambda x: sru_scan(x, t["forget"], t["weight"])[0]]
    for run in runs:
        (gradient,) = torch.autograd.grad(run(t["x"]).square().sum(), t["x"], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.sum().backward()
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward AD|jvp"):
            run(forward_ad.make_dual(t["x"].detach(), torch.ones_like(t["x"])))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_state": torch.zeros(2, 1, 3)}, r"`initial_state` must be \[2, 2, 3\].* got \[2, 1, 3\]"),
        ({"mask": torch.ones(2, 4)}, r"`mask` must be \[2, 5\], .* got \[2, 4\]"),
        ({"slope": torch.ones(3)}, "`slope` and `offset` must be given both"),
    ],
)
def test_bad_input_is_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swish_scan(torch.zeros(2, 5, 3), steps=2, **options)


@pytest.mark.parametrize("masked", [False, True])
def test_it_compiles_into_one_graph(masked: bool) -> None:
    t = tensors(40, 2)
    mask = torch.rand(3, 40) > 0.4 if masked else None

    def run(x: torch.Tensor, forget: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        first = swish_scan(x, mask=mask, steps=2)[0] + swish_scan(x, weight, weight, reverse=True)[0]
        return (first * sru_scan(x, forget, weight, mask=mask)[0]).sum()

    inputs = [t["x"], t["forget"], t["weight"]]
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_same((compiled(*inputs),), (run(*inputs),), inputs)


KERNELS = """
import torch
from hf_recurrence import scan_loops, scan_triton

assert scan_triton.swish_forward_kernel.__class__.__name__ == "InterpretedFunction"
torch.manual_seed(0)
for dtype in (torch.float64, torch.float32):
    close = {} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    for length in (1, 2, 33):
        for reverse in (False, True):
            x, forget, gradient = torch.randn(3, 2, length, 70, dtype=dtype).unbind(0)
            state, slope, offset = torch.randn(2, 70, dtype=dtype), *torch.randn(2, 70, dtype=dtype).unbind(0)
            for weights in ((None, None), (slope, offset)):
                c = scan_loops.swish_forward(x, state, *weights, reverse)
                pairs = [(scan_triton.KERNELS["swish_forward"](x, state, *weights, reverse), c)]
                inputs = (gradient.transpose(0, 1).contiguous().transpose(0, 1), x, c, state, *weights, reverse)
                found = scan_triton.KERNELS["swish_backward"](*inputs)
                pairs += zip(found, scan_loops.swish_backward(*inputs), strict=True)
                for first, second in pairs:
                    torch.testing.assert_close(first, second, **close)
            c = scan_loops.sru_forward(x, forget, slope, state, reverse)
            pairs = [(scan_triton.KERNELS["sru_forward"](x, forget, slope, state, reverse), c)]
            inputs = (gradient, x, forget, slope, c, state, reverse)
            pairs += zip(scan_triton.KERNELS["sru_backward"](*inputs), scan_loops.sru_backward(*inputs), strict=True)
            for first, second in pairs:
                torch.testing.assert_close(first, second, **close)
print("the same")
"""


@pytest.mark.slow
def test_the_triton_kernels_give_the_same_in_tritons_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", KERNELS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["the", "same"]


def test_without_triton_the_loops_run(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "hf_recurrence.scan_triton", raising=False)
    scan_loops.fused_kernels.cache_clear()
    assert scan_loops.fused_kernels() == {}
    scan_loops.fused_kernels.cache_clear()
