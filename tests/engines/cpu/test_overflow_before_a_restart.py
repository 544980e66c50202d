"""Operators that start afresh at a count: nothing is left of products that overflowed before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from assocscan import associative_scan, monoid

State = tuple[Tensor, Tensor, Tensor]


@monoid(identity=(1.0, 0.0, 0), name="restarting_test", lower=lambda state: state[1])
def restarting(left: State, right: State) -> State:
    (a1, b1, n1), (a2, b2, n2) = left, right
    is_new = n2 > 0
    return (
        torch.where(is_new, a2, a2 * a1), torch.where(is_new, b2, a2 * b1 + b2),
        torch.maximum(n1, n2),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("period", [3, 7])
def test_values(dtype: torch.dtype, period: int) -> None:
    a, b = torch.full((2000,), 1e30), torch.zeros(2000)
    count = torch.zeros(2000, dtype=dtype)
    count[::period] = 1
    assert (associative_scan(restarting, (a, b, count)) == 0).all()
