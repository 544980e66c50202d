"""`forward_fill(limit=)`: gaps of which a few steps are filled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import Engine
from torch import Tensor

from assocscan import ScanTypeError, ScanValueError, forward_fill

F64, NAN = torch.float64, math.nan
LENGTH = 40


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def with_gaps(*shape: int) -> Tensor:
    """Some gaps are longer than any limit here; one begins with the row."""
    x = sample(*shape)
    x = x.masked_fill(sample(*shape, seed=1) > -0.5, NAN)
    x[..., 0] = NAN
    return x


def loop(x: Tensor, valid: Tensor, limit: int, reverse: bool = False) -> Tensor:
    """Along the last axis, one step after the other."""
    if reverse:
        return loop(x.flip(-1), valid.flip(-1), limit).flip(-1)
    last, age, rows = x[..., 0], torch.full_like(valid[..., 0], limit, dtype=torch.int64), []
    for t in range(x.shape[-1]):
        age = torch.where(valid[..., t], 0, age + 1)
        last = torch.where(valid[..., t], x[..., t], last)
        rows.append(torch.where(age <= limit, last, x[..., t]))
    return torch.stack(rows, -1)


def values_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    return [y.detach(), *torch.autograd.grad(y, leaf, sample(*y.shape, seed=2).to(y))]


@pytest.mark.thinned(7)
@pytest.mark.parametrize("reverse", [False, True])
def test_beside_a_loop(engine: Engine, reverse: bool) -> None:
    """Each limit twice, so that the call is repeated, by the same kernel for all of them."""
    x = engine.put(with_gaps(3, LENGTH).float())
    valid = engine.put(sample(3, LENGTH, seed=3) > 0.8)
    for limit in (1, 1, 3):
        for mask in (None, valid):
            given = x if mask is None else engine.put(sample(3, LENGTH).float())
            found, want = (
                values_and_gradient(function, given)
                for function in (
                    lambda t, limit=limit, mask=mask: forward_fill(
                        t, mask, reverse=reverse, limit=limit, backend=engine.name
                    ),
                    lambda t, limit=limit, mask=mask: loop(
                        t, ~t.isnan() if mask is None else mask, limit, reverse
                    ),
                )
            )
            torch.testing.assert_close(found, want, equal_nan=True, rtol=0, atol=1e-6)
    assert any(t.isnan().any() for t in (loop(x, ~x.isnan(), 3), loop(x, ~x.isnan(), 1)))


@pytest.mark.thinned(7)
@pytest.mark.parametrize("limit", [1, 2, 5, LENGTH, 10**30])
def test_as_in_pandas(limit: int) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(with_gaps(3, LENGTH).T.numpy())
    for reverse in (False, True):
        fill = frame.bfill if reverse else frame.ffill
        want = torch.tensor(fill(limit=min(limit, LENGTH)).to_numpy())
        found = forward_fill(torch.tensor(frame.to_numpy()), None, 0, reverse, limit=limit)
        torch.testing.assert_close(found, want, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.int64, torch.float16, torch.complex64], ids=str
)
def test_dtypes(dtype: torch.dtype) -> None:
    """With a limit and without one."""
    x = torch.tensor([1, 0, 0, 0, 1, 0]).to(dtype)
    valid = torch.tensor([True, False, False, False, True, False])
    for limit, want in ((2, [1, 1, 1, 0, 1, 1]), (None, [1, 1, 1, 1, 1, 1])):
        y = forward_fill(x, valid, limit=limit)
        assert y.dtype == dtype
        assert torch.equal(y, torch.tensor(want).to(dtype))


def test_long_rows() -> None:
    """Cut into chunks: a gap goes on from one to the next."""
    x = torch.full((2, 30000), NAN)
    x[:, 100] = 1.0
    x[1, 25000] = 2.0
    filled = forward_fill(x, limit=20000)
    assert (~filled.isnan()).sum(1).tolist() == [20001, 20001 + 5000]
    assert filled[:, 20100].tolist() == [1, 1] and filled[1, 25000:].unique().tolist() == [2]


def test_packed() -> None:
    """A gap at the begin of a sequence stays, whatever comes before."""
    x, offsets = with_gaps(2, LENGTH), torch.tensor([0, 7, 7, 20, LENGTH])
    found = forward_fill(x, limit=2, offsets=offsets)
    parts = [forward_fill(t, limit=2) for t in x.split(offsets.diff().tolist(), 1)]
    torch.testing.assert_close(found, torch.cat(parts, 1), equal_nan=True)


def test_second_derivatives_compiled_and_mapped() -> None:
    x, valid = sample(3, 8), sample(3, 8, seed=1) > 0.5
    torch.autograd.gradcheck(lambda t: forward_fill(t, valid, limit=2), x.clone().requires_grad_())
    torch.autograd.gradgradcheck(
        lambda t: forward_fill(t, valid, limit=2).square(), x.clone().requires_grad_()
    )

    def call(x: Tensor, valid: Tensor, limit: int) -> Tensor:
        return forward_fill(x, valid, limit=limit)

    mapped = torch.func.vmap(lambda x, valid: call(x, valid, 2))(x, valid)
    torch.testing.assert_close(mapped, loop(x, valid, 2))
    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    for limit in (2, 1, 3):
        torch.testing.assert_close(compiled(x, valid, limit), loop(x, valid, limit))


@pytest.mark.parametrize(
    "limit,error,words",
    [
        (0, ScanValueError, "limit is 0, expected at least 1; None fills whole gaps"),
        (-3, ScanValueError, "limit is -3"),
        (2.0, ScanTypeError, "limit is 2.0, expected an int or None"),
        (True, ScanTypeError, "limit is True"),
    ],
)
def test_refused(limit: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        forward_fill(torch.ones(3), limit=limit)
