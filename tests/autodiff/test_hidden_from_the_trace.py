"""What a trace does not show: torch.no_grad within an operator, and numbers that Python draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from assocscan import (
    FallbackWarning,
    TraceError,
    associative_scan,
    monoid,
    nonlinear_recurrence,
    ops,
    reduce,
    windowed,
    with_lower,
)

F64 = torch.float64
pytestmark = [
    pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning"),
    # torch.compile reads .grad of results where the graph breaks.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=F64).requires_grad_()


@monoid(identity=(1.0, 0.0), name="test_half_hidden")
def half_hidden(left: Any, right: Any) -> Any:
    (a1, b1), (a2, b2) = left, right
    with torch.no_grad():
        a = a1 * a2
    return a, b1 * a2 + b2


def hidden(left: Tensor, right: Tensor) -> Tensor:
    with torch.no_grad():
        return left * right


def hidden_sum(left: Tensor, right: Tensor) -> Tensor:
    return left + hidden(right, right)


def step(state: Any, x: Tensor) -> Any:
    a, b = state
    with torch.no_grad():
        later = 0.5 * b + x
    return torch.tanh(0.5 * a + x) * b, later


def scanned(function: Callable[..., Any], x: Tensor, **options: Any) -> Tensor:
    """A sum of what the scan gives, with the gradient of autograd through a loop beside it."""
    if function is step:
        a, b = nonlinear_recurrence(step, x, (0.0, 1.0), **options)
        return (a * x.detach()).sum() + b.sum()
    if function is half_hidden:
        a, b = associative_scan(half_hidden, (x.detach(), x), 1, **options)
        return (a + b * x.detach()).sum()
    y: Tensor = associative_scan(function, x, 1, **options)
    return (y * x.detach()).sum()


def looped(function: Callable[..., Any], x: Tensor) -> Tensor:
    found, steps = [], x.unbind(1)
    if function is step:
        state: Any = torch.zeros(2, dtype=F64), torch.ones(2, dtype=F64)
        for t in steps:
            state = step(state, t)
            found.append(state)
        a, b = (torch.stack(parts, 1) for parts in zip(*found, strict=True))
        return (a * x.detach()).sum() + b.sum()
    pair = function is half_hidden
    combine = half_hidden.combine if pair else function
    # Only b is differentiated: the gradient in a would depend on how the steps are grouped.
    carry = (steps[0].detach(), steps[0]) if pair else steps[0]
    found.append(carry)
    for t in steps[1:]:
        carry = combine(carry, (t.detach(), t) if pair else t)
        found.append(carry)
    if pair:
        a, b = (torch.stack(parts, 1) for parts in zip(*found, strict=True))
        return (a + b * x.detach()).sum()
    return (torch.stack(found, 1) * x.detach()).sum()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("function", [half_hidden, hidden, hidden_sum, step])
def test_no_grad_is_kept(function: Callable[..., Any], compiled: bool) -> None:
    x = draw(2, 5)
    want = torch.autograd.grad(looped(function, x), x)[0]
    call: Any = scanned
    if compiled:
        torch.compiler.reset()
        call = torch.compile(scanned, backend="aot_eager")
    for _ in range(2):
        (got,) = torch.autograd.grad(call(function, x), x)
        torch.testing.assert_close(got, want)


class Hinge(torch.autograd.Function):
    """Without a derivative, so that its result has no node in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = torch.relu(-x)
        ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> None:
        raise AssertionError


def below(x: Tensor) -> Tensor:
    """Its formula is flat on positive numbers, as those are with which gradients are compared."""
    with torch.no_grad():
        return torch.relu(-x)


@pytest.mark.parametrize("method", ["loop", "newton"])
@pytest.mark.parametrize("hinge", [below, Hinge.apply])
def test_it_counts_where_samples_do_not_show_it(hinge: Any, method: str) -> None:
    def falling(h: Tensor, x: Tensor) -> Tensor:
        return 0.5 * h + x + hinge(h)

    x = torch.full((1, 4), -1.0, dtype=F64, requires_grad=True)
    for _ in range(2):
        y = nonlinear_recurrence(falling, x, 0.0, method=method)
        (got,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(got, torch.tensor([[1.875, 1.75, 1.5, 1.0]], dtype=F64))


def test_it_counts_in_scans_reductions_and_windows() -> None:
    op = monoid(lambda a, b: b + torch.relu(a) - below(a), identity=0.0, name="test_kept_below")
    x = torch.full((1, 4), -1.0, dtype=F64, requires_grad=True)
    expected = {
        lambda: associative_scan(op, x, 1): [1.0, 1.0, 1.0, 1.0],
        lambda: reduce(op, x, 1): [0.0, 0.0, 0.0, 1.0],
        lambda: windowed(op, x, 3, 1): [1.0, 1.0, 1.0, 1.0],
    }
    for call, gradient in expected.items():
        (got,) = torch.autograd.grad(call().sum(), x)
        torch.testing.assert_close(got, torch.tensor([gradient], dtype=F64))


def test_no_grad_in_lower() -> None:
    x = draw(2, 5)
    op = with_lower(ops.sum, lambda s: (s, hidden(s, s)))
    plain, squared = associative_scan(op, x, 1)
    (got,) = torch.autograd.grad(plain.sum() + 3 * squared.sum(), x)
    torch.testing.assert_close(got, torch.arange(5.0, 0, -1, dtype=F64).expand(2, 5))


def test_the_warning_names_it() -> None:
    fresh = monoid(lambda a, b: hidden(a, b) + b, name="test_hidden_warns")
    with pytest.warns(FallbackWarning, match="torch.no_grad does; x.detach\\(\\) is part"):
        associative_scan(fresh, draw(3, 4), 1)


DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(numpy.random.rand()),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_that_python_draws_are_refused(name: str) -> None:
    """They would be one constant for all steps."""
    x = torch.ones(2, 5)
    with pytest.raises(TraceError, match="step 'lambda' draws random numbers of Python or NumPy"):
        nonlinear_recurrence(lambda h, x: h + DRAWS[name]() * x, x, 0.0)
    with pytest.raises(TraceError, match="operator 'test_draws' draws random numbers"):
        associative_scan(monoid(lambda a, b: a + DRAWS[name]() * b, name="test_draws"), x, 1)


def test_infinite_slopes_meet_cotangents_alone() -> None:
    """A state is infinite where no cotangent comes from later steps: infinity, not NaN."""
    p = torch.tensor(1.1, requires_grad=True)
    x = torch.tensor([1.0, torch.inf, 1.0, 1.0])
    h = nonlinear_recurrence(lambda h, x, p: p * h + x, x, 0.0, 0, params=p)
    assert torch.autograd.grad(h.sum(), p)[0] == torch.inf
