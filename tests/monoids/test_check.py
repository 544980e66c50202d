"""What `Monoid.check` draws, and whom its messages blame."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import Monoid, MonoidError, ScanTypeError, ops

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize("limit", [100, 1000])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_it_reaches_where_sums_saturate(dtype: torch.dtype, limit: int) -> None:
    clamped = Monoid(lambda left, right: torch.clamp(left + right, -limit, limit), name="clamped")
    with pytest.raises(MonoidError, match="not associative"):
        clamped.check(torch.zeros((), dtype=dtype))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.int8, torch.uint8], ids=str)
def test_large_numbers_are_no_fault_of_the_operator(dtype: torch.dtype) -> None:
    zero = torch.zeros((), dtype=dtype)
    for op in (ops.sum, ops.max, ops.affine, ops.minmax, ops.mean, ops.prod):
        op.check((zero, zero) if op is ops.affine else zero, samples=300)
    if dtype.is_floating_point:
        ops.max_affine.check((zero, zero), samples=300)
        for op in (ops.welford, ops.logaddexp, ops.compensated_sum, ops.online_softmax):
            op.check(zero, samples=300)


def remainders(left: Any, right: Any) -> Any:
    """Four numbers modulo primes: with floats it would round."""
    return tuple(
        (a * b + a + b) % p for a, b, p in zip(left, right, (101, 103, 107, 109), strict=True)
    )


def four(x: Tensor) -> tuple[Tensor, ...]:
    return x % 101, x % 103, x % 107, x % 109


def test_what_is_drawn_has_the_types_of_the_identity() -> None:
    """Integers for a lift whose state is that of its input."""
    op = Monoid(remainders, identity=(0, 0, 0, 0), lift=four, name="remainders")
    op.check()
    bits = Monoid(lambda left, right: left ^ right, identity=0, lift=lambda x: x, name="bits")
    bits.check()
    assert "int64_t s0" in bits.source("cpp")
    # An identity that was written with integers for floats: they are drawn where integers fail.
    halves = Monoid(
        lambda left, right: (left[0] + right[0], torch.sqrt(left[1] ** 2 + right[1] ** 2)),
        identity=(0, 0), lift=lambda x: (x, x.abs()), name="halves",
    )  # fmt: skip
    halves.check()
    assert "float s1" in halves.source("cpp")


def test_a_lift_may_be_an_exponential() -> None:
    """What overflows float32 when it is combined twice is not drawn."""
    decay = Monoid(
        lambda left, right: (left[0] * right[0], left[1] + left[0] * right[1]),
        identity=(1.0, 0.0), lift=lambda x, y: (torch.exp(-x), (1 - torch.exp(-x)) * y),
        name="volume",
    )  # fmt: skip
    decay.check(samples=500)


def test_two_inputs_of_different_types() -> None:
    op = Monoid(
        lambda left, right: (left[0] + right[0], left[1] ^ right[1]), identity=(0.0, 0),
        lift=lambda x, n: (x, n), name="sum and parity",
    )  # fmt: skip
    op.check()
    assert "float s0; int64_t s1" in op.source("cpp")


def test_samples_are_blamed_for_their_type() -> None:
    """The operator takes floats, and not the integers of its identity."""
    op = Monoid(ops.welford.combine, identity=(0, 0, 0), name="welford of integers")
    states = torch.ones(5, dtype=torch.int64), torch.rand(5), torch.rand(5)
    with pytest.raises(ScanTypeError, match=r"^samples\[1\] is torch.float32.*int64.*like="):
        op.check(samples=states)
    zero = torch.zeros(())
    op.check((zero.long(), zero, zero), samples=states)


@pytest.mark.parametrize("samples", [True, False])
def test_a_flag_is_no_number_of_samples(samples: bool) -> None:
    with pytest.raises(ScanTypeError, match=f"^samples is {samples}, expected how many states"):
        ops.sum.check(samples=samples)


def naive_welford(left: Any, right: Any) -> Any:
    """Without a guard: 0 / 0 where both counts are 0."""
    n1, mean1, m1 = left
    n2, mean2, m2 = right
    n, delta = n1 + n2, mean2 - mean1
    return n, mean1 + delta * (n2 / n), m1 + m2 + delta**2 * n1 * n2 / n


def test_the_identity_is_combined_with_itself() -> None:
    """Counts that are drawn are not 0, so that only e ∘ e divides by 0."""
    op = Monoid(naive_welford, identity=(0.0, 0.0, 0.0), name="naive welford")
    zero = torch.zeros(())
    states = torch.rand(9) + 1, torch.randn(9), torch.rand(9)
    with pytest.raises(MonoidError) as caught:
        op.check((zero, zero, zero), samples=states)
    lines = str(caught.value).splitlines()
    assert lines[0] == "'naive welford' is not a monoid: its identity is not neutral in element[1]"
    assert lines[1:] == [
        "  e = (0.0, 0.0, 0.0)", "  e ∘ e = (0.0, nan, nan)", "  expected e = (0.0, 0.0, 0.0)",
    ]  # fmt: skip


def test_identities_of_the_package_are_neutral_to_themselves() -> None:
    zero = torch.zeros(())
    for op in (ops.welford, ops.logaddexp, ops.online_softmax, ops.compensated_sum, ops.minmax):
        op.check(zero)
