"""Losses and gradients that are computed together, against plain autograd."""

import pytest
import torch
from torch.nn import functional as F

from hf_recurrence.losses import LinearCrossEntropy, TwoPassLoss, head_loss
from tests.common import EXACT


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_linear_cross_entropy_equals_autograd(chunk: int, dtype: torch.dtype) -> None:
    hidden = (3 * torch.randn(7, 5)).to(dtype).requires_grad_()
    weight = (3 * torch.randn(2000, 5)).to(dtype).requires_grad_()
    targets = torch.randint(2000, (7,))
    targets[2] = -100
    expected = F.cross_entropy(
        (hidden @ weight.T).to(torch.promote_types(dtype, torch.float32)), targets, reduction="sum"
    )
    wanted = torch.autograd.grad(2 * expected, (hidden, weight))
    found = LinearCrossEntropy.apply(hidden, weight, targets, chunk, None)
    gradients = torch.autograd.grad(2 * found, (hidden, weight))
    # bfloat16 keeps 8 bits; chunks are summed in another order
    close = {torch.float64: EXACT, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}.get(
        dtype, {"rtol": 4e-2, "atol": 4e-2}
    )
    torch.testing.assert_close(found, expected, **close)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, **close)


def test_linear_cross_entropy_of_extreme_logits_is_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    targets = torch.tensor([1, 0, 2])
    loss = LinearCrossEntropy.apply(hidden, weight, targets, 8, None)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, targets, reduction="sum"))
    loss.backward()
    assert torch.isfinite(weight.grad).all()


def test_a_head_with_a_bias_or_a_hook_is_called_as_a_module() -> None:
    hidden, targets = torch.randn(2, 7, 4), torch.randint(9, (2, 7))
    head = torch.nn.Linear(4, 9)
    expected = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(head_loss(head, hidden, targets, 3), expected)
    plain, sizes = torch.nn.Linear(4, 9, bias=False), []
    expected = F.cross_entropy(plain(hidden).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(head_loss(plain, hidden, targets, 3), expected)
    plain.register_forward_hook(lambda module, args, output: sizes.append(output.shape[1]))
    torch.testing.assert_close(head_loss(plain, hidden, targets, 3), expected)
    assert sizes == [3, 3, 1]


def test_two_pass_loss_equals_plain_backpropagation() -> None:
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(6, 4, dtype=torch.float64)

    def run(number: int, state: torch.Tensor | None, with_loss: bool) -> tuple:
        state = torch.tanh(inputs[number] @ weight + (0 if state is None else state @ weight.T))
        return (state**2).sum() if with_loss else None, state

    state, plain = None, 0
    for number in range(6):
        loss, state = run(number, state, True)
        plain = plain + loss
    (expected,) = torch.autograd.grad(3 * plain, weight)
    loss = TwoPassLoss.apply(run, 6, None, torch.device("cpu"), {}, weight)
    (found,) = torch.autograd.grad(3 * loss, weight)
    torch.testing.assert_close(loss, plain, **EXACT)
    torch.testing.assert_close(found, expected, **EXACT)


def test_two_pass_loss_says_that_it_can_be_differentiated_once() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = TwoPassLoss.apply(lambda n, s, w: ((weight**2).sum(), None), 1, None, torch.device("cpu"), {}, weight)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once only"):
        loss.backward()
