"""`with_joint_functions`: where one function takes the place of several, and where it must not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import Monoid, associative_scan, monoid, ops
from assocscan.api.bind_arguments import bind
from assocscan.program.program_builder import Program
from assocscan.program.rewriting.joint_functions import with_joint_functions
from assocscan.testing import reference_scan

JOINT = {"log1p_exp", "log1p_signed_exp", "exp_of_peak", "log_of_sum", "peak"}


def combined(op: Monoid | Callable[..., Any], xs: Any) -> Program:
    call = bind(op, xs, 0, False, True, None, False, None)
    return call.traced.operator.combine  # type: ignore[union-attr]


def joint(program: Program) -> Counter[str]:
    return Counter(i.op for i in with_joint_functions(program).instructions if i.op in JOINT)


x = torch.zeros(3)
signs = torch.ones(3, dtype=torch.int8)


@pytest.mark.parametrize(
    "op,xs,expected",
    [
        (ops.logaddexp, x, {"log1p_exp": 1}),
        (ops.log_affine, (x, x), {"log1p_exp": 1}),
        (ops.signed_log_sum, (x, signs), {"log1p_signed_exp": 1}),
        (
            ops.log_matmul,
            torch.zeros(3, 3, 3),
            {"exp_of_peak": 27, "log_of_sum": 9, "peak": 18},
        ),
        (ops.sum, x, {}),
    ],
    ids=lambda v: v.name if isinstance(v, Monoid) else "",
)
def test_operators_that_have_them(op: Monoid, xs: Any, expected: dict[str, int]) -> None:
    assert joint(combined(op, xs)) == expected


def of_any(a: Tensor, b: Tensor) -> Tensor:
    return torch.log1p(torch.exp(a + b))


def of_distance(a: Tensor, b: Tensor) -> Tensor:
    return torch.maximum(a, b) + torch.log1p(torch.exp(-(a - b).abs()))


def of_the_wrong_order(a: Tensor, b: Tensor) -> Tensor:
    higher = a >= b
    high, low = torch.where(higher, b, a), torch.where(higher, a, b)
    return high + torch.log1p(torch.exp(low - high))


def of_lesser(a: Tensor, b: Tensor) -> Tensor:
    lower = a < b
    high, low = torch.where(lower, b, a), torch.where(lower, a, b)
    return high + torch.log1p(torch.exp(low - high))


@pytest.mark.parametrize(
    "op,count", [(of_any, 0), (of_distance, 1), (of_the_wrong_order, 0), (of_lesser, 1)]
)
def test_log1p_of_exp_only_where_its_argument_is_not_positive(
    op: Callable[..., Any], count: int
) -> None:
    assert joint(combined(op, x))["log1p_exp"] == count


def test_float64_keeps_its_functions() -> None:
    assert not joint(combined(ops.logaddexp, x.double()))


def with_a_term(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The first term is used by itself: there its own error counts."""
    high = torch.maximum(a, b).detach()
    first = torch.exp(a - high)
    return torch.log(first + torch.exp(b - high)) + high, first


def of_three(a: Tensor, b: Tensor) -> Tensor:
    """A sum without the greatest number may be small."""
    high = torch.maximum(torch.maximum(a, b), a * b).detach()
    return torch.log(torch.exp(a - high) + torch.exp(b - high)) + high


def test_sums_of_exponentials_only_where_nothing_else_uses_their_terms() -> None:
    assert not joint(combined(lambda a, b: with_a_term(a[0], b[0]), (x, x)))
    assert not joint(combined(of_three, x))


@pytest.mark.parametrize("op", [ops.logaddexp, of_distance, of_lesser], ids=["ours", "abs", "less"])
def test_values_on_hard_numbers(op: Any) -> None:
    """On the CPU; NaN, infinities, numbers far apart and equal ones."""
    if not isinstance(op, Monoid):
        op = monoid(op, name=f"test_joint_{op.__name__}")
    values = [0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1e-30, -87.0, -104.0, 88.0, 5.5, -5.5]
    values += [math.inf, -math.inf, math.nan] if op is ops.logaddexp else []
    pairs = torch.tensor([(a, b) for a in values for b in values]).mT.contiguous()
    found, right = (scan(op, pairs) for scan in (associative_scan, reference_scan))
    torch.testing.assert_close(found, right.float(), rtol=3e-7, atol=1e-7, equal_nan=True)
