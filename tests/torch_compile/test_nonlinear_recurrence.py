"""`nonlinear_recurrence` in compiled and exported graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from steps import CASES, arguments
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from assocscan import TraceError, nonlinear_recurrence


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Pair(NamedTuple):
    a: Any
    b: Any


x, h = torch.randn(2, 6, 3), torch.randn(2, 3)
weights, mask = torch.randn(3), torch.rand(2, 6) > 0.5


def leaky(h: Any, x: Any, scale: Any) -> Any:
    return torch.tanh(scale * h + x)


def with_default(x: Tensor, h: Tensor, scale: float = 0.75) -> Any:
    def step(h: Any, x: Any, scale: float = scale) -> Any:
        return torch.tanh(scale * h + x)

    return nonlinear_recurrence(step, x, h)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "lambda": lambda x, h: nonlinear_recurrence(lambda h, x: torch.tanh(0.5 * h + x), x, h),
    "params": lambda x, h: nonlinear_recurrence(leaky, x, h, params=weights, return_final=True),
    "number": lambda x, h: nonlinear_recurrence(leaky, x, 0.5, params=0.25, reverse=True),
    "partial": lambda x, h: nonlinear_recurrence(
        functools.partial(lambda s, h, x: torch.tanh(s * h + x), 0.5), x, h
    ),
    "default": with_default,
    "lower": lambda x, h: nonlinear_recurrence(
        lambda h, x: torch.sin(h + x), x, h, lower=lambda h, x: {"y": h * x, "z": [h]},
        return_final=True,
    ),
    "lower of h": lambda x, h: nonlinear_recurrence(
        lambda h, x: torch.sin(h + x), x, h, lower=lambda h: Pair(h, (h + 1,))
    ),
    "named tuple": lambda x, h: nonlinear_recurrence(
        lambda h, x: Pair(torch.tanh(h.a + x), h.a), x, Pair(h, 0.0), return_final=True
    ),
    "dict": lambda x, h: nonlinear_recurrence(
        lambda h, x: {"a": torch.tanh(h["b"] + x["in"]), "b": h["a"]}, {"in": x},
        {"b": h, "a": 0.5}, return_final=True,
    ),
    "several dtypes": lambda x, h: nonlinear_recurrence(
        lambda h, x: (torch.where(h[2], h[0], 0.0) + x, h[1] + 1, h[0] > 0), x, (h, 0, False)
    ),
    "reset": lambda x, h: nonlinear_recurrence(leaky, x, h, params=0.5, reset=mask),
    "offsets": lambda x, h: nonlinear_recurrence(
        leaky, x, h, params=0.5, offsets=torch.tensor([0, 2, 2, 6]), return_final=True
    ),
    "nested": lambda x, h: nonlinear_recurrence(
        torch.add, nonlinear_recurrence(lambda h, x: torch.sin(h) + x, x, h), h
    ),
    "shared variable": lambda x, h: [
        nonlinear_recurrence(lambda h, x: torch.tanh(k * h + x), x, h)  # noqa: B023
        for k in (0.5, 1.0, 1.5)
    ],
    "x unread": lambda x, h: nonlinear_recurrence(lambda h, x: torch.tanh(h), x, h),
    "h unread": lambda x, h: nonlinear_recurrence(lambda h, x: x + 1, x, h),
    "eager": lambda x, h: nonlinear_recurrence(leaky, x, h, params=0.5, backend="eager"),
}  # fmt: skip


def results_and_gradients(function: Callable[..., Any]) -> tuple[Any, Any]:
    leaves = [x.clone().requires_grad_(), h.clone().requires_grad_()]
    found = function(*leaves)
    floats = [t for t in pytree.tree_leaves(found) if t.requires_grad]
    total = torch.stack([(t.float() ** 2).sum() * (k + 1) for k, t in enumerate(floats)]).sum()
    return found, torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.thinned(17)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.slow(2)
def test_one_graph(name: str) -> None:
    function = FUNCTIONS[name]
    want, gradients = results_and_gradients(function)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with torch.no_grad():
            plain = compiled(x, h)
        found, got = results_and_gradients(compiled)
        for results in (plain, found):
            assert type(results) is type(want)
            assert pytree.tree_structure(results) == pytree.tree_structure(want)
            assert_close(pytree.tree_leaves(results), pytree.tree_leaves(want))
        assert_close(got, gradients)


@pytest.mark.slow
def test_numbers_that_change() -> None:
    """A captured number is another step, and makes another graph; one among params need not."""
    captured = torch.compile(
        lambda x, k: nonlinear_recurrence(lambda h, x: torch.tanh(k * h + x), x, 0.0),
        fullgraph=True, backend="eager",
    )  # fmt: skip
    passed = torch.compile(
        lambda x, k: nonlinear_recurrence(leaky, x, k, params=k), fullgraph=True, backend="eager"
    )
    for k in (0.5, 0.25, 3, 0.5):
        want = nonlinear_recurrence(leaky, x, 0.0, params=float(k))
        assert_close(captured(x, k), want)
        assert_close(passed(x, k), nonlinear_recurrence(leaky, x, k, params=k))


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(3)), 0.5

    def step(self, h: Any, x: Any, weight: Any) -> Any:
        return torch.tanh(weight * h * self.scale + x)

    def forward(self, x: Tensor) -> Any:
        return nonlinear_recurrence(self.step, x, 0.0, params=self.weight, return_final=True)


@pytest.mark.exhaustive
def test_a_module() -> None:
    """Its method is the step; a setting that changes makes another graph."""
    cell = Cell()
    compiled = torch.compile(cell, fullgraph=True, backend="aot_eager")
    for scale in (0.5, 1.25):
        cell.scale = scale
        for _ in range(2):
            assert_close(compiled(x), cell(x))
        total = compiled(x)[0].square().sum()
        (got,) = torch.autograd.grad(total, cell.weight)
        assert_close(got, torch.autograd.grad(cell(x)[0].square().sum(), cell.weight)[0])


def test_export() -> None:
    cell = Cell()
    shapes = {"x": {0: torch.export.Dim("B"), 1: torch.export.Dim("L")}}
    module = torch.export.export(cell, (x,), dynamic_shapes=shapes).module()
    for size in ((2, 6, 3), (5, 17, 3), (1, 2, 3)):
        given = torch.randn(size)
        assert_close(module(given), cell(given))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inductor(case: Any) -> None:
    given = arguments(case, 9)
    if case.name == "rotating":
        pytest.skip("inductor warns that it does not generate code for complex numbers")

    def function(xs: Any, init: Any, params: Any) -> Any:
        return nonlinear_recurrence(case.step, xs, init, params=params, return_final=True)

    compiled = torch.compile(function, fullgraph=True)
    for _ in range(2):
        got, want = compiled(*given), function(*given)
        assert_close(pytree.tree_leaves(got), pytree.tree_leaves(want))


def test_what_cannot_be_compiled() -> None:
    """A captured tensor breaks the graph, and is then refused as without it; so is a sum."""

    def capturing(x: Tensor, w: Tensor) -> Any:
        return nonlinear_recurrence(lambda h, x: torch.tanh(w * h + x), x, 0.0)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="it captures a tensor"):
        torch.compile(capturing, fullgraph=True, backend="eager")(x, weights[0])
    with pytest.raises(TraceError, match=r"captured tensor.*pass it in params="):
        torch.compile(capturing, backend="eager")(x, weights[0])
    with pytest.raises(Exception, match="reduces a whole tensor"):
        torch.compile(
            lambda x: nonlinear_recurrence(lambda h, x: h.sum() + x, x, 0.0), backend="eager",
            fullgraph=True,
        )(x)  # fmt: skip
