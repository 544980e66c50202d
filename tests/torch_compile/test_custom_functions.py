"""Plain functions and steps that call a custom autograd.Function: its backward counts in compiled
calls too. Dynamo reads its forward as a plain formula, on which it is not seen any more."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import FallbackWarning, associative_scan, nonlinear_recurrence, reduce


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        yield
    torch._dynamo.reset()


class Spike(torch.autograd.Function):
    """1 above 1, with the derivative of a smooth function."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v > 1).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (1 + 3 * ctx.saved_tensors[0].abs()) ** 2  # type: ignore[no-any-return]


class Doubled(torch.autograd.Function):
    """The identity, whose gradient counts twice: in the newer form, with `setup_context`."""

    @staticmethod
    def forward(v: Tensor) -> Tensor:
        return v * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


STEPS = 12
X = torch.randn(2, STEPS, 3, generator=torch.Generator().manual_seed(0))


def spiking(h: Tensor, x: Tensor) -> Tensor:
    v = 0.5 * h + x
    return v - Spike.apply(v)  # type: ignore[no-any-return]


def spiking_loop(x: Tensor) -> Tensor:
    h, found = torch.zeros(2, 3), []
    for t in range(STEPS):
        h = spiking(h, x[:, t])
        found.append(h)
    return torch.stack(found, 1)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a step": (lambda x: nonlinear_recurrence(spiking, x, 0.0), spiking_loop),
    "a lower": (
        lambda x: nonlinear_recurrence(
            lambda h, x: 0.5 * h + x, x, 0.0, lower=lambda h: Spike.apply(h)
        ),
        lambda x: Spike.apply(nonlinear_recurrence(lambda h, x: 0.5 * h + x, x, 0.0)),
    ),
    "an operator": (
        lambda x: associative_scan(lambda a, b: a + Doubled.apply(b), x, axis=1, reverse=True),
        lambda x: associative_scan(
            lambda a, b: a + Doubled.apply(b), x, axis=1, reverse=True, backend="eager"
        ),
    ),
    "a reduction": (
        lambda x: reduce(lambda a, b: a + Doubled.apply(b), x, axis=1),
        lambda x: reduce(lambda a, b: a + Doubled.apply(b), x, axis=1, backend="eager"),
    ),
}


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = function(x)
    weights = torch.linspace(-1, 2, y.numel()).view(y.shape)
    return torch.autograd.grad((y * weights).sum(), x)[0]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.slow(2)
def test_its_backward_counts(name: str) -> None:
    function, wanted = CALLS[name]
    compiled = torch.compile(function, backend="aot_eager")
    for x in (X, X, X * 2):
        torch.testing.assert_close(compiled(x), wanted(x))
        torch.testing.assert_close(gradient(compiled, x), gradient(wanted, x))


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_where_no_gradient_is_wanted(name: str) -> None:
    """Else the graph breaks, and says why."""
    function, wanted = CALLS[name]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for x in (X, X, X * 2):
            torch.testing.assert_close(compiled(x), wanted(x))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"custom autograd\.Function"):
        compiled(X)


def test_one_outside_the_step() -> None:
    """A custom function that the compiled function calls for itself breaks nothing."""

    def function(x: Tensor) -> Any:
        return Spike.apply(nonlinear_recurrence(lambda h, x: 0.5 * h + x, Doubled.apply(x), 0.0))

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradient(compiled, X), gradient(function, X))
