"""What a selection does not choose has no part in derivatives: it is not multiplied by zero.

0 · inf and 0 · NaN are NaN, so that one infinite value would reach the gradients of all segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import inf, isfinite, nan
from typing import Any

import pytest
import torch
from cuda_emulator import emulated, why_unavailable
from table import Engine
from torch import Tensor
from torch.utils._pytree import tree_leaves

from assocscan import Monoid, associative_scan, monoid, ops, segmented

LENGTH, STARTS = 21, (0, 6, 7, 14)
RESET = torch.tensor([t in STARTS for t in range(LENGTH)])
# One leaf, several, several outputs, and an own choice inside.
OPERATORS = {
    "prod": 1, "affine": 2, "logaddexp": 1, "sum": 1, "max": 1, "minmax": 1, "argmax": 2,
    "welford": 1, "mean": 1, "ema": 2, "ema_variance": 2, "covariance": 2, "log_affine": 2,
    "max_affine": 2, "online_softmax": 1, "max_subarray": 1, "compensated_sum": 1,
}  # fmt: skip
QUICK = ("prod", "affine", "logaddexp", "argmax", "welford")


def drawn(name: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.rand(LENGTH, generator=generator) + 0.5 for _ in range(OPERATORS[name])]


def structure(xs: Sequence[Tensor]) -> Any:
    return xs[0] if len(xs) == 1 else tuple(xs)


def derivatives(
    engine: Engine, op: Monoid, xs: Sequence[Tensor], reset: Tensor, cotangent: Tensor,
    reverse: bool = False, order: int = 2,
) -> list[Tensor]:  # fmt: skip
    """The gradients of the scan of (xs, reset), then those of the gradients' sum."""
    leaves = [x.clone().requires_grad_() for x in xs]
    ys = engine.scan_from_cpu(segmented(op), (structure(leaves), reset), reverse=reverse)
    values = [y for y in tree_leaves(ys) if y.requires_grad]
    found: list[Tensor] = []
    for k in range(order):
        grads = torch.autograd.grad(
            values, leaves, [cotangent] * len(values), create_graph=k + 1 < order,
            allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        found.extend(g.detach() for g in grads)
        values = [g for g in grads if g.requires_grad]
        if not values:
            break
    return found


def assert_equal(got: Tensor, want: Any) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), equal_nan=True)


def test_products_of_another_segment(engine: Engine) -> None:
    """An overflow in the first segment, of which no cotangent reaches it."""
    x = torch.tensor([1e30, 1e30, 2.0, 3.0])
    cotangent = torch.tensor([0.0, 0.0, 1.0, 1.0])
    for reset, want in (
        ([True, False, True, False], [[0, 0, 4, 2], [0, 0, 1, 1]]),
        ([True, False, True, False], [[0, 0, 4, 2], [0, 0, 1, 1]]),  # a repeated call
        ([True, False, True, True], [[0, 0, 1, 1], [0, 0, 0, 0]]),
    ):
        got = derivatives(engine, ops.prod, [x], torch.tensor(reset), cotangent)
        for one, other in zip(got, want, strict=True):
            assert_equal(one, other)


def test_maps_of_another_segment(engine: Engine) -> None:
    a = torch.tensor([1e30, 1e30, 2.0, 3.0, 1e30, 1e30])
    b = torch.ones(6)
    reset = torch.tensor([True, False, True, False, True, False])
    got = derivatives(
        engine, ops.affine, [a, b], reset, torch.tensor([0.0, 0, 1, 1, 0, 0]), order=1
    )
    # A = (2, 6) and h = (1, 4) in the second segment
    assert_equal(got[0][2:4], [4.0, 3.0])
    assert_equal(got[1][2:4], [4.0, 1.0])
    got = derivatives(
        engine, ops.affine, [a, b], reset, torch.tensor([0.0, 0, 1, 1, 0, 0]), True, order=1
    )
    # scanned from the end: a reset starts the segment that ends there
    assert got[0].isfinite()[2:4].all()


def test_logarithms_of_another_segment(engine: Engine) -> None:
    x = torch.tensor([nan, 1.0, 2.0, 3.0])
    reset = torch.tensor([True, False, True, False])
    got = derivatives(engine, ops.logaddexp, [x], reset, torch.ones(4), order=1)
    share = float(torch.sigmoid(torch.tensor(1.0)))
    assert_equal(got[0][2:], [2 - share, share])


@pytest.mark.thinned(12)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_segments_are_independent(engine: Engine, name: str, reverse: bool) -> None:
    """The gradients of the other segments are those without the infinite values."""
    if engine.interpreted and name not in QUICK:
        pytest.skip("the interpreter runs fewer operators")
    check_independence(engine, name, reverse)


@pytest.mark.slow
@pytest.mark.thinned(4)
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.parametrize("name", ["prod", "affine"])
def test_segments_are_independent_in_cuda(name: str) -> None:
    with emulated():
        check_independence(Engine("cuda"), name, False)


def check_independence(engine: Engine, name: str, reverse: bool) -> None:
    op, xs = getattr(ops, name), drawn(name)
    ones = torch.ones(LENGTH)
    usual = derivatives(engine, op, xs, RESET, ones, reverse)
    for value, place in product((1e30, inf, nan), (3, 9)):
        dirty = [x.clone() for x in xs]
        cotangent = ones.clone()
        for x in dirty:
            x[place : place + 2] = value
        if not isfinite(value):
            cotangent[place] = value
        got = derivatives(engine, op, dirty, RESET, cotangent, reverse)
        clean = ~same_segment(place, reverse)
        for one, other in zip(got, usual, strict=True):
            torch.testing.assert_close(one[clean], other[clean], rtol=1e-4, atol=1e-5)


def same_segment(place: int, reverse: bool) -> Tensor:
    """A mask of the steps in the segment of step `place`."""
    if reverse:
        number = RESET.flip(0).cumsum(0).flip(0)
    else:
        number = RESET.cumsum(0)
    return number == number[place]


def loop_gradient(op: Monoid, xs: Sequence[Tensor], cotangent: Tensor) -> Tensor:
    """The gradient of the first leaf for a cotangent of the first output, by autograd through the
    steps one after the other."""
    leaves = [xs[0].clone().requires_grad_(), *xs[1:]]
    state, values = None, []
    for t in range(LENGTH):
        element: Any = tuple(x[t] for x in leaves)
        element = element if op.lift is None else op.lift(*element)
        state = element if state is None else op.combine(state, element)
        values.append(state[0])
    return torch.autograd.grad(torch.stack(values), leaves[0], cotangent)[0]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", ["argmax", "last_valid"])
def test_infinite_cotangents_reach_what_was_chosen(engine: Engine, name: str) -> None:
    """As in a loop: others have a derivative of 0, which is not multiplied by them."""
    x = torch.rand(LENGTH, generator=torch.Generator().manual_seed(4))
    op, second = getattr(ops, name), torch.arange(LENGTH)
    xs = (x, second if name == "argmax" else second % 4 == 1)
    for value in (nan, inf):
        cotangent = torch.ones(LENGTH)
        cotangent[13] = value
        leaf = x.clone().requires_grad_()
        y = engine.scan_from_cpu(op, (leaf, xs[1]))[0]
        got = torch.autograd.grad(y, leaf, cotangent)[0]
        torch.testing.assert_close(got, loop_gradient(op, xs, cotangent), equal_nan=True)


@monoid(identity=(0.0, True), name="test_guarded_root")
def guarded(left: Any, right: Any) -> Any:
    """Adds square roots where they are wanted: of other numbers the slope is infinite or NaN."""
    x, keep = right
    return left[0] + torch.where(keep, x, torch.sqrt(x)), left[1] & keep


def test_slopes_of_what_is_not_selected(engine: Engine) -> None:
    """A choice in the user's own operator. The eager engine follows torch, which multiplies."""
    if engine.name == "eager":
        pytest.skip("torch's autograd: 0 · inf")
    x = torch.tensor([1.0, 0.0, -1.0, 4.0], requires_grad=True)
    keep = torch.tensor([True, True, True, False])
    y, _ = engine.scan_from_cpu(guarded, (x, keep))
    got = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    assert_equal(got.detach(), [4.0, 3.0, 2.0, 0.25])
    assert_equal(torch.autograd.grad(got.sum(), x)[0], [0.0, 0.0, 0.0, -0.03125])


def test_tangents_stay_in_their_segment(engine: Engine) -> None:
    x = torch.tensor([1e30, 1e30, 2.0, 3.0])
    reset = torch.tensor([True, False, True, False])

    def f(x: Tensor) -> Tensor:
        result: Tensor = engine.scan_from_cpu(segmented(ops.prod), (x, reset))
        return result

    for moving in ([inf, 1.0, 1.0, 1.0], [1.0, nan, 1.0, 1.0]):
        _, tangent = torch.func.jvp(f, (x,), (torch.tensor(moving),))
        assert_equal(tangent[2:], [1.0, 5.0])


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_torch_func(backend: str) -> None:
    x = torch.tensor([1e30, 1e30, 2.0, 3.0])
    reset = torch.tensor([True, False, True, False])

    def loss(x: Tensor) -> Tensor:
        y: Tensor = associative_scan(segmented(ops.prod), (x, reset), backend=backend)
        return y[2:].sum()

    assert_equal(torch.func.grad(loss)(x), [0.0, 0.0, 4.0, 2.0])
    hessian = torch.func.jacrev(torch.func.grad(loss))(x)
    assert_equal(hessian[2:, 2:], [[0.0, 1.0], [1.0, 0.0]])
