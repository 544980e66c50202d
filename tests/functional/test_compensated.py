"""`cumsum(compensated=True)`, and the layer that takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import cumsum
from assocscan.nn import AdaptiveRankSemiseparable
from assocscan.nn.ar_ssm import SemiseparableState, cumulative, fused

LENGTH = 1 << 15


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.thinned(7)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("inclusive", [False, True])
def test_long_sums_are_as_exact_as_one_rounding(reverse: bool, inclusive: bool) -> None:
    """The bound of the compensated sum, where the plain one is far outside."""
    x = torch.rand(2, LENGTH, 3)
    want = cumsum(x.double(), 1, reverse, inclusive)
    eps = torch.finfo(torch.float32).eps
    bound = eps / 2 + LENGTH * eps**2
    assert error(cumsum(x, 1, reverse, inclusive, compensated=True), want) <= bound
    assert error(cumsum(x, 1, reverse, inclusive), want) > 4 * bound


def test_what_cancels_is_kept() -> None:
    x = torch.tensor([1.0, 1e8, 1.0, -1e8])
    assert cumsum(x, compensated=True).tolist() == [1.0, 1e8, 1e8, 2.0]
    complex_x = torch.complex(x, -x)
    assert cumsum(complex_x, compensated=True)[-1] == 2 - 2j


@pytest.mark.thinned(11)
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (torch.float16, None), (torch.bfloat16, None), (torch.float32, None),
        (torch.float64, None), (torch.complex64, None), (torch.int8, None), (torch.bool, None),
        (torch.int32, torch.float32), (torch.bfloat16, torch.float64), (torch.float32, torch.int64),
    ],
)  # fmt: skip
def test_dtypes_are_those_of_the_plain_sum(
    given: torch.dtype, dtype: torch.dtype | None, backend: str
) -> None:
    x = (torch.rand(3, 40) * 3).to(given)
    plain = cumsum(x, 1, dtype=dtype, backend=backend)
    got = cumsum(x, 1, dtype=dtype, compensated=True, backend=backend)
    assert got.dtype == plain.dtype
    if got.is_floating_point() or got.is_complex():
        torch.testing.assert_close(got, plain)
    else:
        assert torch.equal(got, plain)


def test_gradients_are_those_of_the_plain_sum() -> None:
    x = torch.rand(3, 50, dtype=torch.float64, requires_grad=True)
    for cotangent in (torch.rand(3, 50), torch.rand(3, 50) * torch.tensor([[1.0], [0.0], [1.0]])):
        grads = [
            torch.autograd.grad(cumsum(x, 1, compensated=flag), x, cotangent.double())[0]
            for flag in (True, False)
        ]
        torch.testing.assert_close(*grads)
    assert torch.autograd.gradgradcheck(lambda t: cumsum(t.square(), compensated=True), x[0, :5])


def test_compiled_and_mapped() -> None:
    x = torch.rand(3, 60)

    def scan(t: Tensor) -> Tensor:
        return cumsum(t, compensated=True)

    torch.testing.assert_close(torch.compile(scan, fullgraph=True, backend="eager")(x), scan(x))
    torch.testing.assert_close(torch.vmap(scan)(x), scan(x))


def test_other_words_are_refused() -> None:
    wrong: Any = "yes"
    with pytest.raises(TypeError, match="compensated is 'yes', expected True or False"):
        cumsum(torch.rand(3), compensated=wrong)
    x = torch.rand(())
    assert torch.equal(cumsum(x, compensated=True), x)


def test_the_layer_is_as_exact_as_a_sum_in_float64() -> None:
    """But for the roundings of the three products and of the sum; the plain scan is not."""
    torch.manual_seed(0)
    parts = (torch.randn(1, LENGTH, 4) + 1, torch.randn(1, LENGTH, 4), torch.rand(1, LENGTH, 4))
    a, b, c = (t.double() for t in parts)
    want, total = cumulative((a, b, c), None, False)
    got, last = fused(parts, None, False, True, None)
    plain, _ = fused(parts, None, False, False, None)
    eps = torch.finfo(torch.float32).eps
    assert error(got, want) <= 2.5 * eps < error(plain, want)
    assert error(last, total) <= eps


@pytest.mark.parametrize("reverse", [False, True])
def test_layer_and_state(reverse: bool) -> None:
    """The same values and gradients as without, with a state that enters; in parts as in one."""
    torch.manual_seed(0)
    layer = AdaptiveRankSemiseparable(4, rank=3, compensated=True).double()
    plain = AdaptiveRankSemiseparable(4, rank=3).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True)
    total = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    state = SemiseparableState(torch.randn(2, 2, 4, dtype=torch.float64), total)
    got, diagnostics = layer(x, state, reverse)
    want, others = plain(x, state, reverse)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(diagnostics["state"], others["state"])
    assert diagnostics["compensated"] is True and others["compensated"] is False
    assert diagnostics["engine"] == others["engine"]
    weight = torch.randn_like(got)
    for g, w in zip(torch.autograd.grad(got, (x, total), weight),
                    torch.autograd.grad(want, (x, total), weight), strict=True):  # fmt: skip
        torch.testing.assert_close(g, w)
    if not reverse:
        head, left = layer(x[:, :4])
        tail, _ = layer(x[:, 4:], left["state"])
        torch.testing.assert_close(torch.cat([head, tail], 1), layer(x)[0])


def test_layer_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="compensated=True is a fused scan, but use_fused_scan"):
        AdaptiveRankSemiseparable(4, use_fused_scan=False, compensated=True)
    layer = AdaptiveRankSemiseparable(4, rank=2, compensated=True)
    layer.use_fused_scan = False
    assert layer(torch.rand(1, 3, 4))[1]["compensated"] is False
