"""`testing.error_growth`: the errors of a scan and of a loop, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from assocscan import (
    Monoid,
    ScanTypeError,
    ScanValueError,
    TraceError,
    associative_scan,
    ops,
    with_lower,
)
from assocscan.testing import ErrorGrowth, error_growth

H = with_lower(ops.matrix_affine, lambda state: state[1])
LINEAR = with_lower(ops.affine, lambda state: state[1])
FIRST = [3.79525, -5.40599, 3.42522, -0.81451]  # the poles are 0.95 exp(±0.05i), twice
COMPANION = torch.cat([torch.tensor([FIRST]), torch.eye(4)[:3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_are_those_of_the_scan_and_of_a_loop(dtype: torch.dtype) -> None:
    """Against sums computed here. One sample: every step is the same."""
    x = torch.tensor([0.1], dtype=dtype)
    found = error_growth(ops.sum, samples=x, length=100, backend="eager")
    steps = x.expand(64)
    exact = x.double() * torch.arange(1, 65)
    scan = associative_scan(ops.sum, steps, backend="eager").double()
    carry, loop = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32)), []
    for t in range(64):
        carry = carry + steps[t]
        loop.append(carry.to(dtype))
    assert [f.steps for f in found] == [1, 2, 4, 8, 16, 32, 64]
    for f in found:
        part = slice(f.steps // 2, f.steps)
        for got, ys in ((f.scan, scan), (f.loop, torch.stack(loop).double())):
            wanted = (ys - exact)[part].abs().max() / exact[part].max()
            assert got == pytest.approx(float(wanted), rel=1e-6, abs=1e-15)
    assert found[-1].loop > 1e-8


def test_products_that_grow_before_they_decay() -> None:
    samples = COMPANION.expand(50, 4, 4), torch.randn(50, 4)
    found = error_growth(H, samples=samples, length=128, backend="eager")
    assert found[2].scan < 1e-5
    assert found[-1].scan > 1000 * found[-1].loop and found[-1].loop < 0.1
    wide = tuple(s.double() for s in samples)
    assert error_growth(H, samples=wide, length=128, backend="eager")[-1].scan < 1e-4


def test_outputs_that_should_be_finite_and_are_not() -> None:
    samples = torch.tensor([1e30]), torch.tensor([0.0])
    found = error_growth(LINEAR, samples=samples, length=8, backend="eager")
    assert found[-1] == ErrorGrowth(8, math.inf, 0.0)


def test_it_ends_before_float64_overflows() -> None:
    x = torch.tensor([1e100], dtype=torch.float64)
    assert [f.steps for f in error_growth(ops.prod, samples=x, length=64, backend="eager")] == [
        1,
        2,
    ]


def test_integers_are_exact_or_wrong() -> None:
    found = error_growth(ops.sum, torch.tensor(0), 16, backend="eager")
    assert all((f.scan, f.loop) == (0.0, 0.0) for f in found) and len(found) == 5


def test_draws_follow_the_seed_and_have_the_dtypes_of_like() -> None:
    like = torch.zeros((), dtype=torch.complex64), torch.zeros((), dtype=torch.complex64)
    first, again, other = (
        error_growth(LINEAR, like, 16, backend="eager", seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert 0 < max(f.scan for f in first) < 1e-5


def test_a_lift_and_a_lower_with_inputs() -> None:
    """Softmax of the last step: both run in the loop, too."""
    op = with_lower(ops.online_softmax, lambda state, x: torch.exp(x - state[0]) / state[1])
    found = error_growth(op, torch.zeros(()), 32, backend="eager")
    assert len(found) == 6 and all(f.scan < 1e-5 and f.loop < 1e-5 for f in found)


ZERO = torch.zeros(())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((lambda a, b: a + b, ZERO), ScanTypeError, "expected a Monoid"),
        ((ops.sum,), ScanTypeError, "like is None: pass the inputs of one element"),
        ((ops.sum, 1.0), ScanTypeError, "like is a float"),
        ((ops.sum, ZERO, 0), ScanValueError, "length is 0"),
        ((ops.sum, ZERO, True), ScanValueError, "length is True"),
        ((ops.sum, ZERO, 2.0), ScanValueError, r"length is 2\.0"),
    ],
)
def test_mistakes(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        error_growth(*arguments)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ((torch.zeros(2), torch.zeros(3)), r"samples\[1\] has shape \[3\], expected \[n, ...\]"),
        ((torch.zeros(2), ZERO), r"samples\[1\] has shape \[\]"),
        ((torch.zeros(0), torch.zeros(0)), "samples holds no inputs"),
    ],
)
def test_wrong_samples(samples: Any, message: str) -> None:
    with pytest.raises(ScanValueError, match=message):
        error_growth(ops.affine, samples=samples)


def test_samples_that_do_not_fit() -> None:
    """Of `error_growth` they are inputs, of `check` states."""
    op = Monoid(
        lambda a, b: (a[0] + b[0], a[1] + b[1], a[2] + b[2]), identity=(0.0, 0.0, 0.0),
        name="growth_of_weights", lift=lambda x, w: (w, w * x, w * x * x),
    )  # fmt: skip
    column = torch.rand(4)
    with pytest.raises(TraceError, match=r"the lift of 'growth_of_weights' takes \(x, w\)"):
        error_growth(op, samples=(column,) * 3, length=8, backend="eager")
    with pytest.raises(ScanTypeError, match="samples are states, as combine takes them"):
        op.check((torch.rand(()),) * 2, samples=(column,) * 2)
