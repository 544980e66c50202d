"""Filters whose states are passed on from chunk to chunk, as on GPUs, by the CPU's kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from filter_designs import DTYPES, F64, LONG, coefficients, errors, inputs, rand
from torch import Tensor

from assocscan import lfilter
from assocscan.functional.filters import rational_filter, walked_chunks

signal = pytest.importorskip("scipy.signal")


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int | None]]:
    """Filters of every order are walked, in chunks of eight steps; the chunks that there were."""
    chunks: list[int | None] = []
    found = walked_chunks.chunk_length

    def noted(length: int, channels: int, is_compiled: bool = False) -> int | None:
        chunk = found(length, channels, is_compiled)
        if not torch.compiler.is_compiling():
            chunks.append(chunk)
        return chunk

    monkeypatch.setattr(rational_filter, "runs_on_gpus", lambda x, backend: backend is None)
    monkeypatch.setattr(rational_filter, "LEAST_WALKED", dict.fromkeys(DTYPES, 2))
    monkeypatch.setattr(walked_chunks, "LEAST_CHUNK", 8)
    monkeypatch.setattr(walked_chunks, "chunk_length", noted)
    yield chunks
    assert chunks, "no filter was walked"


LARGE = [3, pytest.param(8, marks=pytest.mark.exhaustive)]  # the kernels of 8 compile for 40 s


@pytest.mark.parametrize(
    "order, dtype", [(2, np.float32), pytest.param(3, np.float64, marks=pytest.mark.exhaustive)]
)
def test_narrow_filters(order: int, dtype: type) -> None:
    b, a = (t.astype(dtype) for t in signal.butter(order, 0.01))
    x = inputs(3000, dtype)
    got, limit = errors(b, a, x, lfilter(*map(torch.as_tensor, (b, a, x))).numpy())
    assert (got <= 10 * np.maximum(limit, 2 * np.finfo(dtype).eps)).all(), (got, limit)


@pytest.mark.parametrize("length", [1, 4, 5, 6, 61, 62, 97])
@pytest.mark.parametrize("order", LARGE)
@pytest.mark.slow(3)
def test_edges_of_chunks(order: int, length: int, as_on_gpus: list[int | None]) -> None:
    length += order  # no longer ones are walked
    b, a = coefficients(order)
    layouts = ((length,), 0), ((length, 3), 0), ((2, length, 3), 1), ((3, length), -1)
    for shape, axis in (*layouts, ((length, walked_chunks.FEW_CHANNELS + 1), 0)):
        x = rand(*shape)
        expected = torch.as_tensor(signal.lfilter(b, a, x, axis))
        for _ in range(2):
            torch.testing.assert_close(lfilter(b, a, x, axis=axis), expected)
    assert (as_on_gpus[-1] is None) == (length <= 8)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("order", LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128])
def test_dtypes(dtype: torch.dtype, order: int) -> None:
    b, a = coefficients(order, dtype=dtype)
    x = rand(2, 50, dtype=dtype)
    wide = torch.complex128 if dtype.is_complex else F64
    expected = signal.lfilter(*(t.to(wide).numpy() for t in (b, a, x)))
    torch.testing.assert_close(lfilter(b, a, x), torch.as_tensor(expected).to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("order", LARGE)
def test_packed_with_states(order: int) -> None:
    b, a = coefficients(order)
    offsets = torch.tensor([0, 0, 3, 8, 8, 8, 30, 61, 64])
    x, zi = rand(64, 2), rand(8, 2, order, seed=2)
    y, final = lfilter(b, a, x, axis=0, zi=zi, return_final=True, offsets=offsets)
    many = x[:, :1].expand(64, walked_chunks.FEW_CHANNELS + 1)
    walked = lfilter(b, a, many, axis=0, offsets=offsets)
    torch.testing.assert_close(walked[:, 5], lfilter(b, a, x[:, 0], offsets=offsets))
    for s, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        if begin < end:
            alone, state = signal.lfilter(b, a, x[begin:end], 0, zi[s].mT)
            torch.testing.assert_close(y[begin:end], torch.as_tensor(alone))
            torch.testing.assert_close(final[s], torch.as_tensor(state).mT)


def test_one_filter_per_channel() -> None:
    b, a = coefficients(3, 3)
    x = rand(2, 40, 3)
    y = lfilter(b, a, x, axis=1)
    for channel in range(3):
        expected = signal.lfilter(b[channel], a[channel], x[..., channel])
        torch.testing.assert_close(y[..., channel], torch.as_tensor(expected))


@pytest.mark.slow
@pytest.mark.parametrize("order", LARGE)
def test_derivatives(order: int) -> None:
    b, a = coefficients(order)
    x = rand(20)
    _, of_x = torch.func.jvp(lambda x: lfilter(b, a, x), (x,), (x,))
    torch.testing.assert_close(of_x, lfilter(b, a, x))
    for shape in ((1, 6), (2, 20)):
        leaves = [t.requires_grad_() for t in (b, a, rand(*shape))]
        torch.autograd.gradcheck(lfilter, leaves, check_forward_ad=True, check_batched_grad=True)
    torch.autograd.gradgradcheck(lfilter, leaves)
    offsets = torch.tensor([0, 3, 3, 20])
    torch.autograd.gradcheck(lambda *t: lfilter(*t, offsets=offsets), leaves)


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", [3, 5, pytest.param(7, marks=pytest.mark.by_hand)])
def test_compiled_and_mapped(order: int) -> None:
    b, a = coefficients(order)
    x = rand(4, 30)
    y = lfilter(b, a, x)
    torch.testing.assert_close(torch.func.vmap(lfilter, (None, None, 0))(b, a, x), y)
    tensors = [t.requires_grad_() for t in (b, a, x)]
    expected = torch.autograd.grad(lfilter(*tensors).square().sum(), tensors)
    compiled = torch.compile(
        lambda *t: lfilter(*t).square().sum(), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for _ in range(2):
        got = torch.autograd.grad(compiled(*tensors), tensors)
        torch.testing.assert_close(got, expected)


def test_a_nan_stays_behind() -> None:
    """Not a number from the step on at which it enters, and not beyond its sequence."""
    b, a = coefficients(3)
    x = rand(64)
    x[20] = torch.nan
    offsets = torch.tensor([0, 13, 40, 64])
    y = lfilter(b, a, x, offsets=offsets)
    assert torch.equal(y.isnan().nonzero()[:, 0], torch.arange(20, 40))


@pytest.mark.parametrize(
    "channels", [1, pytest.param(walked_chunks.FEW_CHANNELS + 1, marks=pytest.mark.exhaustive)]
)
def test_a_state_of_zero_meets_no_overflow(channels: int) -> None:
    """Powers of an unstable filter overflow; sequences are short, or x begins late."""
    a = torch.tensor(np.poly([1.2, 0.5, -0.3]))
    b, x = torch.ones(1, dtype=F64), rand(20000, channels)
    offsets = torch.arange(0, 20001, 50)
    y = lfilter(b, a, x, axis=0, offsets=offsets)
    assert y.isfinite().all()
    torch.testing.assert_close(y[50:100], lfilter(b, a, x[50:100], axis=0))
    x[:-100] = 0
    y = lfilter(b, a, x, axis=0)
    torch.testing.assert_close(y, torch.as_tensor(signal.lfilter(b, a, x, 0)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("poles, limit", [(3, 1e-4), (4, 0.1)])
def test_several_poles_on_the_unit_circle(poles: int, limit: float) -> None:
    """The powers of any M grow then, and more digits are lost than in a loop."""
    a, x = np.poly([1.0] * poles), inputs(3000, np.float64)
    y = lfilter(torch.ones(1, dtype=F64), *map(torch.as_tensor, (a, x)))
    exact = signal.lfilter(np.ones(1, LONG), a.astype(LONG), x.astype(LONG))
    assert (np.abs(y.numpy() - exact).max(-1) <= limit * np.abs(exact).max(-1)).all()


def test_an_exported_filter_is_for_any_length(as_on_gpus: list[int | None]) -> None:
    b, a = coefficients(3)

    class Filter(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return lfilter(b, a, x)

    lengths = torch.export.Dim("L", min=2, max=10000)
    program = torch.export.export(Filter(), (rand(3, 50),), dynamic_shapes=({1: lengths},))
    for length in (2, 50, 7, 600):
        x = rand(3, length, seed=length)
        torch.testing.assert_close(program.module()(x), lfilter(b, a, x))
