"""What the diagonal layers start with, and their numbers at extremes and in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from assocscan.nn import DiagonalGRU, DiagonalLSTM, DiagonalSLSTM
from assocscan.nn.diagonal.slstm import NOTHING, SLSTMState

F64 = torch.float64
MAKE: dict[str, Callable[[int, int], nn.Module]] = {
    "DiagonalGRU": DiagonalGRU,
    "DiagonalLSTM": DiagonalLSTM,
    "DiagonalSLSTM": DiagonalSLSTM,
}


def test_starts() -> None:
    torch.manual_seed(0)
    for make, gates in ((DiagonalGRU, 3), (DiagonalLSTM, 4), (DiagonalSLSTM, 4)):
        layer = make(5, 4096)
        assert layer.input.weight.shape == (gates * 4096, 5)
        u = layer.recurrent
        assert u.shape == (gates, 4096) and u.abs().max() <= 1
        # The variance of a matrix [width, width] drawn between ±1/√width, times a vector of ones.
        torch.testing.assert_close(u.var(1), torch.full((gates,), 1 / 3), rtol=0.05, atol=0.0)
    biases = DiagonalLSTM(3, 5).input.bias.view(4, 5)
    assert (biases[1] == 1).all() and (biases[0].abs() < 1).all()
    biases = DiagonalSLSTM(3, 5).input.bias.view(4, 5)
    assert biases[1].tolist() == [3, 3.75, 4.5, 5.25, 6] and (biases[0].abs() < 1).all()


def test_a_gru_without_recurrent_weights_is_torchs() -> None:
    """And so is one of a single channel, with weights: a matrix [1, 1] is diagonal."""
    torch.manual_seed(0)
    other = nn.GRU(3, 1, batch_first=True).to(F64)
    layer = DiagonalGRU(3, 1).to(F64)
    order = [1, 0, 2]  # torch has the reset gate first
    with torch.no_grad():
        layer.input.weight.copy_(other.weight_ih_l0[order])
        layer.input.bias.copy_(other.bias_ih_l0[order])
        layer.recurrent.copy_(other.weight_hh_l0[order])
        other.bias_hh_l0.zero_()
        x, state = torch.randn(2, 30, 3, dtype=F64), torch.randn(2, 1, dtype=F64)
        torch.testing.assert_close(layer(x, state)[0], other(x, state[None])[0])


def test_an_lstm_of_one_channel_is_torchs() -> None:
    torch.manual_seed(0)
    other = nn.LSTM(3, 1, batch_first=True).to(F64)
    layer = DiagonalLSTM(3, 1).to(F64)
    with torch.no_grad():
        layer.input.weight.copy_(other.weight_ih_l0)
        layer.input.bias.copy_(other.bias_ih_l0 + other.bias_hh_l0)
        layer.recurrent.copy_(other.weight_hh_l0)
        x = torch.randn(2, 30, 3, dtype=F64)
        y, state = layer(x)
        want, (h, c) = other(x)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(state, type(state)(h[0], c[0]))


def slstm_of_gates(i: float, f: float) -> DiagonalSLSTM:
    """A layer of one channel whose x is z̃ (and enters nothing else), with these gates."""
    layer = DiagonalSLSTM(1, 1)
    with torch.no_grad():
        layer.input.weight.copy_(torch.tensor([[0.0], [0.0], [1.0], [0.0]]))
        layer.input.bias.copy_(torch.tensor([i, f, 0.0, 100.0]))
        layer.recurrent.zero_()
    return layer


@pytest.mark.thinned(4)
@pytest.mark.parametrize("i", [-1e4, -200.0, 0.0, 200.0, 1e4])
@pytest.mark.parametrize("f", [-300.0, 2.0])
def test_slstm_at_extremes(i: float, f: float) -> None:
    """With constant gates h is a mean of tanh(x), weighted by powers of σ(f), whatever exp(i) is:
    were it not for the stabiliser, 0/0 or ∞/∞."""
    layer = slstm_of_gates(i, f)
    x = torch.randn(1, 40, 1, generator=torch.Generator().manual_seed(0), requires_grad=True)
    h, state = layer(x)
    decay = torch.sigmoid(torch.tensor(f, dtype=F64))
    powers = torch.arange(40)[:, None] - torch.arange(40)
    weights = torch.where(powers >= 0, decay ** powers.clamp(min=0), 0)
    want = (weights @ torch.tanh(x[0].double())) / weights.sum(1, keepdim=True)
    # m is added to and subtracted from exponents in float32.
    tolerance = 1e-5 + 1e-7 * abs(i)
    torch.testing.assert_close(h[0].double(), want, rtol=0.0, atol=tolerance)
    gradients = torch.autograd.grad(h.sum(), [x, *layer.parameters()])
    assert all(g.isfinite().all() for g in gradients)
    assert state.normaliser >= 1 and math.isclose(state.stabiliser.item(), i, abs_tol=1e-3)


def test_slstm_does_not_depend_on_the_scale_of_its_state() -> None:
    """(c, n, m) and (c e, n e, m − 1) are the same memory; and m of an empty one is nothing."""
    torch.manual_seed(0)
    layer, x = DiagonalSLSTM(3, 4).to(F64), torch.randn(2, 20, 3, dtype=F64)
    with torch.no_grad():
        h, c, n, m = layer(x)[1]
        first = layer(x, SLSTMState(h, c, n, m))[0]
        torch.testing.assert_close(layer(x, SLSTMState(h, c * math.e, n * math.e, m - 1))[0], first)
        zero = torch.zeros_like(c)
        empty = SLSTMState(zero, zero, zero, torch.full_like(m, NOTHING))
        torch.testing.assert_close(layer(x, empty), layer(x))
        without = SLSTMState(zero, zero, zero, torch.full_like(m, -math.inf))
        torch.testing.assert_close(layer(x, without), layer(x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MAKE)
def test_16_bits(name: str, dtype: torch.dtype) -> None:
    """Outputs are those of float64, rounded, over a long sequence; gradients have the error of
    what is saved; steps give the same."""
    torch.manual_seed(0)
    layer: Any = MAKE[name](4, 6).to(dtype)
    x = torch.randn(2, 1000, 4).to(dtype)
    y, state = layer(x)
    wide: Any = MAKE[name](4, 6).to(F64)
    wide.load_state_dict({k: v.to(F64) for k, v in layer.state_dict().items()})
    gates = layer.input(x).detach()  # rounded by the product, as in any layer of 16 bits
    wide.input.forward = lambda _, g=gates: g.to(F64).requires_grad_()
    want, last = wide(x.to(F64))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.to(F64), want, rtol=eps, atol=eps)
    for got, wanted in zip(tree_leaves(state), tree_leaves(last), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.to(F64), wanted, rtol=1e-4, atol=1e-4)
    (g,) = torch.autograd.grad(y.float().square().sum(), layer.recurrent)
    (w,) = torch.autograd.grad(want.square().sum(), wide.recurrent)
    assert (g.to(F64) - w).abs().max() < 4 * eps * w.abs().max()
    steps, after = [], None
    with torch.no_grad():
        for t in range(50):
            h, after = layer.step(x[:, t], after)
            assert h.dtype == dtype
            steps.append(h)
    torch.testing.assert_close(torch.stack(steps, 1), y[:, :50], rtol=2 * eps, atol=2 * eps)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MAKE)
def test_second_derivatives(name: str) -> None:
    torch.manual_seed(0)
    layer: Any = MAKE[name](2, 3).to(F64)
    x = torch.randn(1, 4, 2, dtype=F64, requires_grad=True)
    u = layer.recurrent.detach().clone().requires_grad_()

    def f(x: Tensor, u: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(layer, {"recurrent": u}, (x,))[0]
        return y

    assert torch.autograd.gradcheck(f, (x, u))
    assert torch.autograd.gradgradcheck(f, (x, u))
