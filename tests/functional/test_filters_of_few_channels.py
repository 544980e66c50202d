"""Filters of few channels, which the CPU scans in chunks of the axis."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from filter_designs import DTYPES, F64, coefficients, errors, inputs, rand
from torch import Tensor

from assocscan import lfilter, sosfilt
from assocscan.functional.filters import chunks_as_lanes, rational_filter

signal = pytest.importorskip("scipy.signal")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether chunks were scanned, for each filter that was cut."""
    found: list[bool] = []
    scanned = chunks_as_lanes.scanned

    def noted(*arguments: object) -> Tensor | None:
        y = scanned(*arguments)  # type: ignore[arg-type]
        found.append(y is not None)
        return y

    monkeypatch.setattr(rational_filter, "scanned", noted)
    return found


@pytest.fixture
def cut(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Filters of any length are cut, into up to six chunks."""
    monkeypatch.setattr(chunks_as_lanes, "LEAST_WORK", 0)
    monkeypatch.setattr(chunks_as_lanes, "MOST_OF_SECOND_ORDER", chunks_as_lanes.MOST_CHANNELS)
    monkeypatch.setattr(chunks_as_lanes, "chunk_count", lambda *sizes: 6)
    yield calls
    assert calls, "no filter was cut"


@pytest.mark.parametrize("length", [6, 7, 12, 13, 64, 100])
@pytest.mark.parametrize("order", [2, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_edges_of_chunks(order: int, length: int, cut: list[bool]) -> None:
    b, a = coefficients(order)
    for shape, axis in (((length,), 0), ((length, 3), 0), ((2, length, 3), 1), ((3, length), -1)):
        x = rand(*shape)
        expected = torch.as_tensor(signal.lfilter(b, a, x, axis))
        for given in (x, x, x.clone(), rand(*shape, 2)[..., 0].copy_(x)):
            torch.testing.assert_close(lfilter(b, a, given, axis=axis), expected)
    assert all(cut)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow(2)
def test_dtypes(dtype: torch.dtype, cut: list[bool]) -> None:
    b, a = coefficients(3, dtype=dtype)
    x = rand(2, 50, dtype=dtype)
    wide = torch.complex128 if dtype.is_complex else F64
    expected = signal.lfilter(*(t.to(wide).numpy() for t in (b, a, x)))
    torch.testing.assert_close(lfilter(b, a, x), torch.as_tensor(expected).to(dtype))
    zi = rand(2, 3, dtype=dtype)
    y, final = lfilter(b, a, x, zi=zi, return_final=True)
    expected, last = signal.lfilter(*(t.to(wide).numpy() for t in (b, a, x)), zi=zi.to(wide))
    torch.testing.assert_close(y, torch.as_tensor(expected).to(dtype))
    torch.testing.assert_close(final, torch.as_tensor(last).to(dtype))


def test_one_filter_per_channel(cut: list[bool]) -> None:
    b, a = coefficients(3, 3)
    x = rand(2, 40, 3)
    y = lfilter(b, a, x, axis=1)
    for channel in range(3):
        expected = signal.lfilter(b[channel], a[channel], x[..., channel])
        torch.testing.assert_close(y[..., channel], torch.as_tensor(expected))


@pytest.mark.parametrize("order", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_derivatives(order: int, cut: list[bool]) -> None:
    b, a = coefficients(order)
    _, of_x = torch.func.jvp(lambda x: lfilter(b, a, x), (rand(20),), (rand(20),))
    torch.testing.assert_close(of_x, lfilter(b, a, rand(20)))
    leaves = [t.requires_grad_() for t in (b, a, rand(2, 20))]
    torch.autograd.gradcheck(lfilter, leaves, check_forward_ad=True, check_batched_grad=True)
    torch.autograd.gradgradcheck(lfilter, leaves)


def test_powers_that_overflow(cut: list[bool]) -> None:
    """Zeros before the first number stay zeros, and what a loop computes is computed."""
    a = torch.tensor([1.0, -1e80, 1.0], dtype=F64)
    b = torch.tensor([1.0], dtype=F64)
    x = torch.zeros(60, dtype=F64)
    x[57] = 1.0
    torch.testing.assert_close(lfilter(b, a, x), torch.as_tensor(signal.lfilter(b, a, x)))
    assert cut == [False]


def test_a_filter_that_grows(cut: list[bool]) -> None:
    a, b = torch.tensor([1.0, -2.1, 1.1], dtype=F64), torch.tensor([1.0, 0.5], dtype=F64)
    for x in (rand(200), torch.nn.functional.pad(rand(20), (180, 0))):
        expected = torch.as_tensor(signal.lfilter(b, a, x))
        torch.testing.assert_close(lfilter(b, a, x), expected)
    assert all(cut)


def test_others_are_not_cut(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    b, a = coefficients(2)
    lfilter(b, a, rand(100))  # short
    monkeypatch.setattr(chunks_as_lanes, "LEAST_WORK", 0)
    lfilter(b, a, rand(100, chunks_as_lanes.MOST_OF_SECOND_ORDER + 1), axis=0)
    lfilter(*coefficients(3), rand(chunks_as_lanes.MOST_CHANNELS + 1, 100))
    lfilter(b, a, rand(100), offsets=torch.tensor([0, 50, 100]))
    lfilter(*coefficients(1), rand(100))
    lfilter(b, a, rand(100), backend="eager")
    assert not calls
    torch.vmap(lambda x: lfilter(b, a, x))(rand(2, 100))  # is the filter of two channels
    assert calls


@pytest.mark.release_flags
@pytest.mark.parametrize(
    "order, cutoff", [(2, 0.01), pytest.param(4, 0.01, marks=pytest.mark.exhaustive),
                      pytest.param(4, 0.2, marks=pytest.mark.exhaustive)]
)  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_long_and_narrow(order: int, cutoff: float, dtype: type, calls: list[bool]) -> None:
    """Without patches, beside scipy's loop of the same dtype."""
    b, a = (t.astype(dtype) for t in signal.butter(order, cutoff))
    x = inputs(100_000, dtype)
    x = x[: chunks_as_lanes.MOST_OF_SECOND_ORDER] if order == 2 else x
    for _ in range(2):
        got, limit = errors(b, a, x, lfilter(*map(torch.as_tensor, (b, a, x))).numpy())
        assert (got <= 10 * np.maximum(limit, 2 * np.finfo(dtype).eps)).all(), (got, limit)
    assert calls and all(calls)


def test_sections(cut: list[bool]) -> None:
    sos, x = torch.as_tensor(signal.butter(6, 0.1, output="sos")), rand(2, 90)
    expected = signal.sosfilt(sos, x)
    for _ in range(2):
        torch.testing.assert_close(sosfilt(sos, x), torch.as_tensor(expected))
    assert len(cut) == 6
