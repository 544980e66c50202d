"""What operators see besides their arguments: values that change, differentiated tensors."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from assocscan import associative_scan, cumsum
from assocscan.monoids import raw_callables as raw

x = torch.arange(4.0)


def assert_as_eager(op: Callable[..., Any]) -> None:
    got = associative_scan(op, x, backend="cpu")
    assert torch.equal(got, associative_scan(op, x, backend="eager"))


settings = types.ModuleType("settings")
settings.scale = 0.5  # type: ignore[attr-defined]
settings.inner = types.ModuleType("inner")  # type: ignore[attr-defined]
settings.inner.shift = 1.0


class Constants:
    scale = 0.5


def helper() -> None: ...


def test_attributes_that_change() -> None:
    def of_module(left: Tensor, right: Tensor) -> Any:
        return left + right + settings.scale + settings.inner.shift

    def of_class(left: Tensor, right: Tensor) -> Any:
        return left + right + Constants.scale

    def of_function(left: Tensor, right: Tensor) -> Any:
        return left + right + helper.scale  # type: ignore[attr-defined]

    def of_environment(left: Tensor, right: Tensor) -> Any:
        return left + right + float(os.environ["ASSOCSCAN_TEST_SCALE"])

    for scale in (2.0, 3.0):
        settings.scale = Constants.scale = helper.scale = scale  # type: ignore[attr-defined]
        os.environ["ASSOCSCAN_TEST_SCALE"] = str(scale)
        for op in (of_module, of_class, of_function, of_environment):
            assert_as_eager(op)
    settings.inner.shift = 7.0
    assert_as_eager(of_module)


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_variables_that_functions_share(backend: str) -> None:
    """Functions that a loop makes share its variable, which has another value when an operator that
    was kept is traced for other dtypes, or for its gradient."""

    def last(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            associative_scan(lambda a, b: a + b * k + k, x, 0, backend=backend)[-1]  # noqa: B023
            for k in (0.5, 1.5)
        ]

    def right(x: torch.Tensor) -> list[torch.Tensor]:
        return [(x[0] + x[1] * k + k) for k in (0.5, 1.5)]

    x = torch.tensor([1.0, 3.0])
    for given in (x, x.double(), x.clone().requires_grad_()):
        for got, want in zip(last(given), right(given), strict=True):
            torch.testing.assert_close(got, want)
            if given.requires_grad:
                pair = (torch.autograd.grad(y, given, retain_graph=True)[0] for y in (got, want))
                torch.testing.assert_close(*pair)


def test_functions_that_know_themselves() -> None:
    def op(left: Tensor, right: Tensor) -> Any:
        return left + right + (1 if op.itself is op else 2)  # type: ignore[attr-defined]

    op.itself = op  # type: ignore[attr-defined]
    assert_as_eager(op)


class Pair(NamedTuple):
    scale: Tensor
    shift: Tensor


def test_named_tuples_are_traced_once() -> None:
    def op(left: Pair, right: Pair) -> Pair:
        return Pair(left.scale * right.scale, left.shift * right.scale + right.shift)

    before = len(raw._RAW)
    for _ in range(3):
        associative_scan(op, Pair(x, x))
    assert len(raw._RAW) == before + 1


@pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")
@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "hessian", "grad", "vmap", "dual"])
def test_transforms_of_what_an_operator_captured(transform: str) -> None:
    """And the next scan is not disturbed."""
    xs = torch.randn(5, dtype=torch.float64)
    c = torch.tensor(0.7, dtype=torch.float64)

    def scanned(c: Tensor) -> Tensor:
        y: Tensor = associative_scan(lambda l, r: l + r + c * l * r, xs)  # noqa: E741
        return y.sum()

    def looped(c: Tensor) -> Tensor:
        h = total = xs[0]
        for t in range(1, 5):
            h = h + xs[t] + c * h * xs[t]
            total = total + h
        return total

    def dual(f: Callable[[Tensor], Tensor]) -> Any:
        with torch.autograd.forward_ad.dual_level():
            given = torch.autograd.forward_ad.make_dual(c, torch.ones_like(c))
            return torch.autograd.forward_ad.unpack_dual(f(given)).tangent

    of: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
        "jvp": lambda f: torch.func.jvp(f, (c,), (torch.ones_like(c),))[1],
        "jacfwd": lambda f: torch.func.jacfwd(f)(c),
        "hessian": lambda f: torch.func.hessian(f)(c),
        "grad": lambda f: torch.func.grad(f)(c),
        "vmap": lambda f: torch.vmap(f)(torch.stack([c, 2 * c])),
        "dual": dual,
    }
    torch.testing.assert_close(of[transform](scanned), of[transform](looped))
    torch.testing.assert_close(cumsum(xs), xs.cumsum(0))
