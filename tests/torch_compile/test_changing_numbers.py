"""Numbers that change from call to call, of which Dynamo makes symbols: as arguments, and captured
by functions that are made inside the compiled one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import associative_scan as scan
from assocscan import forward_fill, nonlinear_recurrence, ops, windowed, with_lift
from assocscan.errors import ScanValueError

Function = Callable[..., Any]
NEWER = torch.__version__ >= (2, 12)  # type: ignore[operator]


def checked(function: Function, *calls: tuple[Any, ...], fullgraph: bool = True) -> None:
    """The compiled function beside the function, call after call."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=fullgraph)
    for given in calls:
        torch.testing.assert_close(compiled(*given), function(*given), rtol=0, atol=0)


def inputs(steps: int = 9) -> Tensor:
    return torch.rand(2, steps, 3, generator=torch.Generator().manual_seed(0))


def fill(x: Tensor, limit: int) -> Tensor:
    return forward_fill(x, x > 0.9, axis=1, limit=limit)


def maxima(x: Tensor, width: int) -> Tensor:
    found: Tensor = windowed(ops.max, x, width, axis=1)
    return found


@pytest.mark.parametrize("function", [fill, maxima])
@pytest.mark.slow(2)
def test_wrong_sizes_of_windows(function: Function) -> None:
    x = inputs()
    checked(function, (x, 3), (x, 4), (x, 5), (x, 1))
    compiled = torch.compile(function, backend="eager")
    for size in (3, 4, 0, -1, -3, 2):
        if size > 0:
            assert torch.equal(compiled(x, size), function(x, size))
            continue
        with pytest.raises(ScanValueError, match=f"is {size}, expected"):
            compiled(x, size)


@pytest.mark.parametrize(
    ("name", "values"), [("tolerance", (1e-3, 1e-5, 1e-12)), ("max_iterations", (50, 60, 70))]
)
@pytest.mark.slow(2)
def test_options_of_newtons_method(name: str, values: tuple[float, ...]) -> None:
    x, init = inputs().double(), torch.zeros(2, 3, dtype=torch.float64)

    def function(x: Tensor, value: float) -> Any:
        options: Any = {name: value}
        step: Any = lambda h, x: torch.tanh(h * 0.5 + x)  # noqa: E731
        return nonlinear_recurrence(step, x, init, axis=1, method="newton", **options)

    checked(function, *((x, value) for value in values))
    compiled = torch.compile(function, backend="eager")
    for value in (*values, 0):
        if value:
            compiled(x, value)
            continue
        with pytest.raises(ScanValueError, match=f"{name} is 0"):
            compiled(x, value)


def lifted(x: Tensor, factor: float) -> Any:
    return scan(with_lift(ops.sum, lambda t: t * factor), x, 1)


def lifted_by_length(x: Tensor, factor: float) -> Any:
    steps = x.shape[1]
    return scan(with_lift(ops.sum, lambda t: t / steps), x, 1)


def lowered(x: Tensor, factor: float) -> Any:
    step: Any = lambda h, x: torch.tanh(h + x)  # noqa: E731
    return nonlinear_recurrence(step, x, torch.zeros(2, 3), axis=1, lower=lambda h: h * factor)


def times(t: Tensor, factor: float) -> Tensor:
    return t * factor


def partially(x: Tensor, factor: float) -> Any:
    return scan(with_lift(ops.sum, functools.partial(times, factor=factor)), x, 1)


@pytest.mark.parametrize("function", [lifted, lifted_by_length, lowered, partially])
@pytest.mark.slow(2)
def test_captured_numbers(function: Function) -> None:
    if function is lowered and not NEWER:
        pytest.skip("before torch 2.12 Dynamo does not read closures")
    fullgraph = NEWER and function is not partially
    calls = [(inputs(9 - k), factor) for k, factor in enumerate((0.5, 0.25, 0.75, 0.9))]
    checked(function, *calls, fullgraph=fullgraph)


class Scaled(torch.nn.Module):
    factor = 0.5

    def forward(self, x: Tensor) -> Any:
        return scan(with_lift(ops.sum, lambda t: t * self.factor), x, 1)


def test_a_captured_module_breaks_the_graph() -> None:
    layer, x = Scaled(), inputs()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager")
    for factor in (0.5, 0.25, 0.75):
        layer.factor = factor
        torch.testing.assert_close(compiled(x), layer(x))


class Doubled(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.double: Function = lambda t: t * factor

    def forward(self, x: Tensor) -> Any:
        return scan(with_lift(ops.sum, self.double), x, 1)


def test_closures_from_outside_are_not_written_to(recwarn: pytest.WarningsRecorder) -> None:
    """Dynamo would write to them after each call of the graph; torch.export warns of it."""
    layer, x = Doubled(2.0), inputs()
    exported = torch.export.export(layer, (x,), strict=True)
    assert torch.equal(exported.module()(x), layer(x))
    assert not [w for w in recwarn if "side effect" in str(w.message)]
