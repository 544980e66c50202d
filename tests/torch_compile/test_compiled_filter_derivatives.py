"""Derivatives of filters inside of torch.compile equal those of a loop over the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from filter_designs import rand
from filter_transforms import CASES, check, loop, of_order
from torch import Tensor
from torch.func import grad

from assocscan import lfilter

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def in_one_graph(function: Callable[..., Any], backend: str = "aot_eager") -> Any:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.parametrize(
    "case, transform",
    [
        ("order 1", "grad of grad"), ("order 2", "grad of grad"), ("order 3", "jacrev of grad"),
        ("one section", "grad of grad"), ("with a state", "hessian"), ("order 1", "hessian"),
        ("of channels", "jvp of grad"), ("order 2", "vmap of grad"), ("sections", "vmap of grad"),
        ("long b", "jvp of grad"), ("sections with states", "jvp of jvp"),
        ("order 1", "jacfwd of jacfwd"),
    ],
)  # fmt: skip
@pytest.mark.slow(4)
def test_nested(case: str, transform: str) -> None:
    check(CASES[case], transform, 6, compiled=in_one_graph)


@pytest.mark.parametrize("length", [1, 2, 40])
@pytest.mark.slow(3)
def test_short_and_long_rows(length: int) -> None:
    check(CASES["order 2"], "grad of grad", length, compiled=in_one_graph)


@pytest.mark.parametrize("moving", ["b", "a", "x"])
@pytest.mark.slow(3)
def test_nested_in_one_argument(moving: str) -> None:
    check(CASES["order 2"], "grad of grad", 6, moving, in_one_graph)


@pytest.mark.slow
def test_by_inductor() -> None:
    b, a = of_order(1)

    def penalty(function: Callable[..., Tensor], b: Tensor, a: Tensor, x: Tensor) -> Tensor:
        slope = grad(lambda x: function(b, a, x).square().sum())
        found: Tensor = grad(lambda x: slope(x).square().sum())(x)
        return found

    compiled = in_one_graph(penalty, "inductor")
    for seed in range(3):
        x = rand(3, seed=seed)
        want = penalty(lambda *t: loop(*t)[0], b, a, x)
        torch.testing.assert_close(compiled(lfilter, b, a, x), want)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.slow(2)
def test_backward_of_a_compiled_gradient(wanted: tuple[int, ...]) -> None:
    """A penalty on the slope, which a training step differentiates by autograd, outside of the
    graph."""

    def penalty(function: Callable[..., Tensor], b: Tensor, a: Tensor, x: Tensor) -> Tensor:
        slope = grad(lambda x: function(b, a, x).square().sum())(x)
        return slope.sin().sum() + x.sum()

    compiled = in_one_graph(penalty)
    for seed in range(3):
        leaves = [*of_order(2), rand(2, 7, seed=seed)]
        for k in wanted:
            leaves[k].requires_grad_()
        moved = [leaves[k] for k in wanted]
        got = torch.autograd.grad(compiled(lfilter, *leaves), moved)
        want = torch.autograd.grad(penalty(lambda *t: loop(*t)[0], *leaves), moved)
        torch.testing.assert_close(got, want)


def test_in_inference_mode() -> None:
    """Where nothing is differentiated the operation itself is in the graph."""
    b, a = of_order(2)
    compiled = in_one_graph(lambda b, a, x: lfilter(b, a, x, axis=0))
    with torch.inference_mode():
        for length in (7, 7, 9):
            x = rand(length, 3, seed=length)
            torch.testing.assert_close(compiled(b, a, x), loop(b, a, x.mT)[0].mT)
