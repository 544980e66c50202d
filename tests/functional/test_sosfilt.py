"""`sosfilt` beside scipy's: narrow and high-order designs, states, channels, derivatives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from filter_designs import DESIGNS, F64, LONG, every_order_and_cut, inputs, rand
from torch import Tensor

from assocscan import ScanTypeError, ScanValueError, lfilter, sosfilt
from assocscan.runtime.backends import availability

signal = pytest.importorskip("scipy.signal")
BACKENDS = [
    pytest.param(name, marks=pytest.mark.exhaustive if name == "eager" else ())
    for name in ("cpu", "eager", "cuda", "triton")
    if availability()[name] is None
]


def sections(*leading: int, count: int = 2, dtype: torch.dtype = F64) -> Tensor:
    """Stable ones, whose a₀ is not 1."""
    b, a = rand(*leading, count, 3, dtype=dtype), 0.3 * rand(*leading, count, 2, seed=1).to(dtype)
    first = torch.ones_like(a[..., :1])
    return torch.cat([b, 1.5 * torch.cat([first, a], -1)], -1)


def exactly(sos: Any, x: Any) -> Any:
    y = x.astype(LONG)
    for section in sos.astype(LONG):
        y = signal.lfilter(section[:3], section[3:], y)
    return y


@pytest.mark.thinned(7)
@every_order_and_cut
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow(2)
def test_errors_are_those_of_a_loop(backend: str, order: int, cut: float) -> None:
    """At most ten times those of scipy's loop of the same dtype, where the filter is stable; forty
    times on GPUs, which scan sections of first order as those of second."""
    kinds = [("low", cut), ("high", cut), ("bandpass", [cut / 2, cut])]
    device = "cuda" if backend in ("triton", "cuda") and torch.cuda.is_available() else "cpu"
    length = 300 if device == "cpu" and backend == "triton" else 4096
    for design, (kind, edge), dtype in itertools.product(DESIGNS, kinds, (np.float32, np.float64)):
        sos = getattr(signal, design)(order, *DESIGNS[design], edge, kind, output="sos")
        sos = sos.astype(dtype)
        if any((np.abs(np.roots(s[3:].astype(float))) >= 1).any() for s in sos):
            continue
        x = inputs(length, dtype)
        exact, loop = exactly(sos, x), signal.sosfilt(sos, x)
        assert loop.dtype == dtype
        size = np.abs(exact).max(-1)
        on = [torch.as_tensor(t, device=device) for t in (sos, x)]
        y = sosfilt(*on, backend=backend).cpu().numpy()
        errors = [np.abs(t - exact).max(-1) / size for t in (y, loop)]
        limit = (40 if device == "cuda" else 10) * np.maximum(errors[1], 2 * np.finfo(dtype).eps)
        assert (errors[0] <= limit).all(), (design, kind, dtype, errors)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_states_are_those_of_scipy(length: int) -> None:
    sos, x, zi = sections(count=3), rand(2, 4, length), rand(3, 2, 4, 2)
    sos[:, 3:] /= sos[:, 3:4]
    y, final = sosfilt(sos, x, zi=zi, return_final=True)
    expected, state = signal.sosfilt(sos.numpy(), x.numpy(), zi=zi.numpy())
    torch.testing.assert_close((y, final), (torch.as_tensor(expected), torch.as_tensor(state)))
    torch.testing.assert_close(
        sosfilt(sos, x.movedim(-1, 0), 0, zi=zi, return_final=True), (y.movedim(-1, 0), final)
    )
    first, *rest = x.split((length + 1) // 2, -1)
    start, carry = sosfilt(sos, first, zi=zi, return_final=True)
    ends = [sosfilt(sos, part, zi=carry) for part in rest]
    torch.testing.assert_close(torch.cat([start, *ends], -1), y)
    broadcast = sosfilt(sos, x, zi=zi[:, :1, :1])
    torch.testing.assert_close(broadcast[0, 0], y[0, 0])


@pytest.mark.parametrize("axis", [0, 1, -2])
def test_states_of_scipy_for_any_axis(axis: int) -> None:
    """Converted as `help(sosfilt)` says."""
    sos, x = sections(count=3), rand(4, 5, 3)
    sos[:, 3:] /= sos[:, 3:4]
    zi = rand(3, *[2 if d == axis % 3 else n for d, n in enumerate(x.shape)])
    expected = signal.sosfilt(sos.numpy(), x.numpy(), axis=axis, zi=zi.numpy())
    place = axis if axis < 0 else axis + 1
    y, states = sosfilt(sos, x, axis, zi=zi.movedim(place, -1), return_final=True)
    got = y, states.movedim(-1, place)
    torch.testing.assert_close(got, tuple(map(torch.as_tensor, expected)))
    if axis == 0:
        with pytest.raises(ScanValueError, match=r"pass zi.movedim\(-3, -1\)"):
            sosfilt(sos, x, axis, zi=zi)


def test_no_steps() -> None:
    zi = rand(2, 4, 2)
    y, final = sosfilt(sections(), rand(4, 0), zi=zi, return_final=True)
    assert y.shape == (4, 0) and torch.equal(final, zi)


def test_packed_states() -> None:
    sos, x, zi = sections(), rand(9, 2), rand(4, 2, 2, 2, seed=3)
    offsets = torch.tensor([0, 2, 2, 3, 9])
    for _ in range(2):
        y, final = sosfilt(sos, x, 0, zi=zi, return_final=True, offsets=offsets)
        for s, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
            alone = sosfilt(sos, x[begin:end], 0, zi=zi[s], return_final=True)
            torch.testing.assert_close((y[begin:end], final[s]), alone)


def test_one_filter_per_channel() -> None:
    sos, x = sections(2, 1), rand(2, 20, 3, seed=2)
    y = sosfilt(sos, x, axis=1)
    for row, channel in itertools.product(range(2), range(3)):
        alone = sosfilt(sos[row, 0], x[row, :, channel])
        torch.testing.assert_close(y[row, :, channel], alone)


@pytest.mark.parametrize(
    "dtype", [F64, pytest.param(torch.complex128, marks=pytest.mark.exhaustive)]
)
def test_derivatives(dtype: torch.dtype) -> None:
    """Of sos (of a section of first order, too), x and zi; of first and second order."""
    sos, x, zi = sections(dtype=dtype), rand(2, 5, dtype=dtype), rand(3, 2, 2, 2, dtype=dtype)
    sos[0, [2, 5]] = 0
    offsets = torch.tensor([0, 3, 3, 5])
    leaves = [t.requires_grad_() for t in (sos, x, zi)]

    def call(sos: Tensor, x: Tensor, zi: Tensor) -> Any:
        return sosfilt(sos, x, zi=zi, return_final=True, offsets=offsets)

    torch.autograd.gradcheck(call, leaves)
    if not dtype.is_complex:
        torch.autograd.gradgradcheck(sosfilt, leaves[:2])


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, pytest.param(torch.complex64, marks=pytest.mark.exhaustive)],
)
def test_other_dtypes(dtype: torch.dtype) -> None:
    """16-bit filters are rounded once, behind the last section."""
    sos, x = sections(count=3).to(dtype), rand(2, 40).to(dtype)
    y, final = sosfilt(sos, x, return_final=True)
    wide = torch.complex128 if dtype.is_complex else F64
    assert y.dtype == dtype
    assert final.dtype == (dtype if dtype.is_complex else torch.float32)
    torch.testing.assert_close(y, sosfilt(sos.to(wide), x.to(wide)).to(dtype))


def test_compiled_and_mapped() -> None:
    sos, x = sections(), rand(4, 30)
    y = sosfilt(sos, x)
    mapped = torch.func.vmap(sosfilt, (None, 0))
    compiled: Any = torch.compile(sosfilt, fullgraph=True, backend="aot_eager")
    for function in (mapped, compiled, compiled):
        torch.testing.assert_close(function(sos, x), y)


def test_one_thing_changes_after_another() -> None:
    """The same call again, one element further, of other strides, dtypes and grad modes."""
    sos, whole = sections().float(), rand(4, 31, dtype=torch.float32)
    for x in (whole[:, :-1], whole[:, :-1], whole[:, 1:], whole[::2, ::3], whole.double(),
              whole.mT.contiguous().mT, whole[:1].expand(4, -1)):  # fmt: skip
        exact = exactly(sos.double().numpy(), x.double().numpy())
        want = torch.as_tensor(exact.astype(float))
        for given in (x, x.clone().requires_grad_(), x):
            y = sosfilt(sos.to(x.dtype), given)
            assert y.dtype == x.dtype and y.requires_grad == given.requires_grad
            torch.testing.assert_close(y.detach().double(), want, rtol=1e-4, atol=1e-4)


def test_trailing_zeros_do_not_matter() -> None:
    """A section of first order has the errors of a filter of first order."""
    b, a = (torch.as_tensor(t, dtype=torch.float32) for t in signal.butter(1, 1e-3, "high"))
    x = torch.as_tensor(inputs(4096, np.float32))
    zero = torch.zeros(1)
    sos = torch.cat([b, zero, a, zero])[None]
    assert torch.equal(sosfilt(sos, x), lfilter(b, a, x))


x = torch.ones(4, 5)
unit = torch.tensor([[1.0, 0, 0, 1, 0, 0]])


@pytest.mark.parametrize(
    "call,error,words",
    [
        (lambda: sosfilt(torch.zeros(2, 6), x), ScanValueError, r"a₀ of section 0, sos\[\.\.\., 0"),
        (lambda: sosfilt(torch.cat([unit, 0 * unit]), x), ScanValueError, "a₀ of section 1"),
        (lambda: sosfilt(unit[:, :5], x), ScanValueError, r"shape \[1, 5\].*\[sections, 6\]"),
        (lambda: sosfilt(unit[0], x), ScanValueError, r"shape \[6\]"),
        (lambda: sosfilt(unit[:0], x), ScanValueError, "at least one section"),
        (lambda: sosfilt(unit.expand(3, 1, 6), x), ScanValueError, r"\[3, 1, 6\].*\[4\]"),
        (lambda: sosfilt(unit, x, zi=torch.ones(2, 4, 2)), ScanValueError, r"\[1, 4, 2\]"),
        (lambda: sosfilt(unit, x, zi=torch.ones(2)), ScanValueError, r"zi has shape \[2\]"),
        (lambda: sosfilt(unit.double(), x), ScanTypeError, "sos has dtype torch.float64, but x"),
        (lambda: sosfilt(unit.long(), x), ScanTypeError, r"sos\.float\(\)"),
        (lambda: sosfilt(unit.to("meta"), x), ScanValueError, "sos is on meta"),
        (lambda: sosfilt([1.0], x), ScanTypeError, "sos is a list"),
    ],
)
def test_refused(call: Callable[[], Tensor], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
