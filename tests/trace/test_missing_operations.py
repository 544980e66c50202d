"""Operations that torch does not have for some dtypes: no engine makes up a result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import AssocScanError, BackendError, Monoid, associative_scan, ops, with_lower

CASES: dict[str, tuple[Any, Tensor]] = {
    "gcd of floats": (ops.gcd, torch.tensor([2.5, 7.5, 5.0])),
    "gcd, raw": (torch.gcd, torch.tensor([2.5, 7.5, 5.0])),
    "hypot of integers": (torch.hypot, torch.tensor([3, 5, 1])),
    "logaddexp of bytes": (torch.logaddexp, torch.tensor([3, 5, 7]).byte()),
    "xor of floats": (ops.xor, torch.tensor([1.0, 2.0])),
    "max of complex numbers": (ops.max, torch.ones(3, dtype=torch.complex64)),
    "gcd of bools": (Monoid(torch.gcd, name="missing_gcd"), torch.tensor([True, False])),
    "shifts of bools": (
        Monoid(torch.bitwise_left_shift, name="missing_shift"),
        torch.tensor([True, False]),
    ),
    "lower": (with_lower(ops.any, torch.floor), torch.tensor([True, False])),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    op, xs = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for backend in ("auto", "eager"):
            with pytest.raises(AssocScanError, match=r"torch has no operation|not implemented"):
                associative_scan(op, xs, backend=backend)
        with pytest.raises(BackendError, match="torch has no operation"):
            associative_scan(op, xs, backend="cpu")


def test_16_bit_floats_are_asked_as_float32() -> None:
    x = torch.rand(5).bfloat16()
    got = associative_scan(ops.logaddexp, x, backend="cpu")
    torch.testing.assert_close(got, torch.logcumsumexp(x.float(), 0).bfloat16())


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda s: s.sum(), "mean": lambda s: s.mean(), "amax": lambda s: s.amax(),
    "prod": lambda s: s.prod(), "sum of a dimension": lambda s: s.sum(-1),
    "logsumexp": lambda s: s.logsumexp(0),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_scalar_elements(name: str) -> None:
    x = torch.rand(2, 5)
    for backend in ("cpu", "eager"):
        got = associative_scan(with_lower(ops.sum, REDUCTIONS[name]), x, 1, backend=backend)
        torch.testing.assert_close(got, x.cumsum(1))


@pytest.mark.parametrize(
    "lower",
    [lambda s: s.sum(), lambda s: torch.stack([s, s]).mean(0), lambda s: s[None].squeeze(-1)],
)
def test_reductions_of_scalar_elements_with_dimensions_behind_the_axis(
    lower: Callable[[Tensor], Tensor],
) -> None:
    """They name no dimension of an element: so none has been forgotten in element_ndim."""
    x = torch.rand(2, 5)
    torch.testing.assert_close(associative_scan(with_lower(ops.sum, lower), x), x.cumsum(0))
