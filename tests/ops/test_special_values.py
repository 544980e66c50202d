"""Infinite and NaN inputs of the statistics: the variance is NaN from there on, by definition."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from table import Engine
from torch import Tensor

from assocscan import associative_scan, ops

LENGTH = 40  # on the CPU more than two segments of a row


def drawn(value: complex, place: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(LENGTH, generator=generator, dtype=torch.float64) + 0.5
    x = x.to(dtype)
    x[place] = value
    return x


def variance(op: str, engine: Engine, x: Tensor, decay: float = 0.75) -> Tensor:
    """The last output of the scan."""
    ones = torch.linspace(1, 2, LENGTH, dtype=x.dtype) if not x.is_complex() else x
    xs = {
        "welford": x, "ema_variance": (x, torch.full_like(x, decay)), "covariance": (ones, x),
        "covariance of x": (x, ones),
    }[op]  # fmt: skip
    result: Tensor = engine.scan_from_cpu(getattr(ops, op.split()[0]), xs)[-1]
    return result


@pytest.mark.thinned(5)
@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("op", ["welford", "ema_variance", "covariance", "covariance of x"])
def test_variances(engine: Engine, op: str, value: float) -> None:
    dtypes = (torch.float32,) if engine.interpreted else (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        usual = variance(op, engine, drawn(1.0, 0, dtype))
        assert usual.isfinite().all()
        for place in (0, 1, 17, LENGTH - 1):
            got = variance(op, engine, drawn(value, place, dtype))
            assert got[place:].isnan().all(), (place, got)
            assert got[:place].isfinite().all()
            if place:
                torch.testing.assert_close(got[1:place], variance(
                    op, engine, drawn(1.0, place, dtype))[1:place])  # fmt: skip


@pytest.mark.parametrize("value", [complex(inf, 0), complex(0, nan), complex(0, -inf)])
def test_variances_of_complex_numbers(engine: Engine, value: complex) -> None:
    if engine.interpreted:
        pytest.skip("one dtype is enough for the interpreter")
    x = drawn(1.0, 0, torch.complex64)
    x[0] = value
    assert variance("welford", engine, x).isnan().all()


def gradients(scan: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    y = scan(leaf)
    return torch.autograd.grad(y, leaf, torch.linspace(1, 2, y.numel(), dtype=y.dtype))[0]


def test_gradients_are_those_of_the_definition(engine: Engine) -> None:
    x = drawn(1.0, 0, torch.float64)
    got = gradients(lambda x: variance("welford", engine, x), x)
    want = gradients(
        lambda x: torch.stack([x[: t + 1].var(correction=0) for t in range(LENGTH)]), x
    )
    torch.testing.assert_close(got, want)


def test_segments_of_one_infinite_number(engine: Engine) -> None:
    """The first element of a packed sequence is lifted like any other."""
    x = torch.tensor([1.0, 2.0, inf, 4.0, 5.0])
    offsets = torch.tensor([0, 2, 3, 5])
    _, found = associative_scan(
        ops.welford, x.to(engine.device), offsets=offsets, backend=engine.name
    )
    torch.testing.assert_close(
        found.cpu(), torch.tensor([0.0, 0.25, nan, 0.0, 0.25]), equal_nan=True
    )


def test_covariance_of_integers() -> None:
    x = torch.arange(5)
    found = associative_scan(ops.covariance, (x, 2 * x))
    wanted = associative_scan(ops.covariance, (x.float(), 2 * x.float()))
    assert all(map(torch.equal, found, wanted))
