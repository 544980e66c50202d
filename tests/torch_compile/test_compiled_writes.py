"""Functions that write into a temporary, read by Dynamo: the same as without `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assocscan import TraceError, associative_scan, nonlinear_recurrence


def clamped(l: Tensor, r: Tensor) -> Tensor:  # noqa: E741
    s = l + r
    s.clamp_(min=0.0)
    return s


def indexed(l: Tensor, r: Tensor) -> Tensor:  # noqa: E741
    s = l + r
    s[s > 1] = 1
    return s


def into_out(l: Tensor, r: Tensor) -> Tensor:  # noqa: E741
    s = l + r
    torch.clamp(s, max=0.5, out=s)
    return s


def filled(l: Tensor, r: Tensor) -> Tensor:  # noqa: E741
    z = torch.zeros_like(l)
    z.add_(l)
    z += r
    return z


@pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")  # an index that is a mask
@pytest.mark.parametrize("op", [clamped, indexed, into_out, filled])
@pytest.mark.slow(2)
def test_operators(op: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.randn(3, 2, dtype=torch.float64)  # two steps: some of these are not associative
    found = torch.compile(lambda x: associative_scan(op, x, axis=1), backend="aot_eager")(x)
    torch.testing.assert_close(found, torch.stack([x[:, 0], op(x[:, 0], x[:, 1])], 1))


def test_a_step() -> None:
    x = torch.randn(3, 7, dtype=torch.float64)
    found = torch.compile(lambda x: nonlinear_recurrence(clamped, x, 0.0), backend="aot_eager")(x)
    h, expected = torch.zeros(3, dtype=torch.float64), []
    for t in range(7):
        h = clamped(h, x[:, t])
        expected.append(h)
    torch.testing.assert_close(found, torch.stack(expected, 1))


def test_a_write_into_an_argument_is_refused() -> None:
    def op(l: Tensor, r: Tensor) -> Tensor:  # noqa: E741
        l.add_(r)
        return l

    with pytest.raises(Exception) as found:
        torch.compile(lambda x: associative_scan(op, x), backend="aot_eager")(torch.randn(4))
    causes, error = [], found.value
    while error is not None:
        causes.append(error)
        error = error.__cause__
    assert any(isinstance(e, TraceError) or "TraceError" in str(e) for e in causes)
