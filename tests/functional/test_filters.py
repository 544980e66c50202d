"""Filters beside scipy's loops: narrow and high-order designs, states, channels, derivatives."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from filter_designs import DESIGNS, F64, LONG, errors, every_order_and_cut, inputs, rand

from assocscan import lfilter, matrix_recurrence, sosfilt
from assocscan.errors import ScanTypeError, ScanValueError
from assocscan.runtime.backends import availability

signal = pytest.importorskip("scipy.signal")

BACKENDS = [name for name in ("cpu", "eager", "cuda", "triton") if availability()[name] is None]


def is_stable(a: np.ndarray[Any, Any]) -> bool:
    """All reflection coefficients are smaller than 1, in extended precision."""
    rest = a.astype(LONG) / LONG(a[0])
    while len(rest) > 1:
        k = rest[-1]
        if not abs(k) < 1:
            return False
        rest = ((rest - k * rest[::-1]) / (1 - k * k))[:-1]
    return True


@pytest.mark.parametrize("steps", range(1, 11))
@pytest.mark.slow(3)
def test_rows_shorter_than_the_filter(steps: int) -> None:
    """A narrow filter's first outputs are 10⁻¹³ of later ones. Its gradient is the same filter of
    the cotangents in reverse."""
    for b, a in (signal.butter(8, 0.01), signal.cheby1(6, 1, 0.05), ([2.0, 1.0], [4.0, 1.0, 0.5])):
        b, a = np.asarray(b), np.asarray(a)
        rows = inputs(64 * steps, np.float64).reshape(-1, steps)
        exact = signal.lfilter(*(t.astype(LONG) for t in (b, a, rows)))
        size = abs(exact).max(-1) + 1e-300
        loop = (abs(signal.lfilter(b, a, rows) - exact).max(-1) / size).max()
        for layout, axis in (("rows", -1), ("columns", 0)):
            x = torch.as_tensor(rows if layout == "rows" else rows.T.copy()).requires_grad_()
            y = lfilter(torch.as_tensor(b), torch.as_tensor(a), x, axis=axis)
            (slope,) = torch.autograd.grad(y, x, x.detach().flip(axis))
            for found in (y.detach(), slope.flip(axis)):
                got = found.numpy() if layout == "rows" else found.numpy().T
                error = (abs(got - exact).max(-1) / size).max()
                assert error <= 10 * max(loop, 2 * np.finfo(np.float64).eps)


@pytest.mark.thinned(7)
@every_order_and_cut
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow(2)
def test_errors_are_those_of_a_loop(backend: str, order: int, cut: float) -> None:
    """At most ten times those of scipy's loop of the same dtype, where the filter is stable."""
    device = "cuda" if backend in ("triton", "cuda") and torch.cuda.is_available() else "cpu"
    is_interpreted = device == "cpu" and backend == "triton"
    if is_interpreted and order > 4:
        pytest.skip("Triton's interpreter takes minutes; test_walked_filters has these orders")
    if is_interpreted and order > 3 and cut < 0.02:
        pytest.skip("no float32 filter of this order and cut-off is stable")
    length = 300 if is_interpreted else 4096
    dtypes = (np.float32,) if is_interpreted and order > 3 else (np.float32, np.float64)
    compared = 0
    for design, kind, dtype in itertools.product(DESIGNS, ("low", "high"), dtypes):
        b, a = (
            t.astype(dtype) for t in getattr(signal, design)(order, *DESIGNS[design], cut, kind)
        )
        if not is_stable(a):
            continue
        x = inputs(length, dtype)
        on = [torch.as_tensor(t, device=device) for t in (b, a, x)]
        got, loop = errors(b, a, x, lfilter(*on, backend=backend).cpu().numpy())
        limit = 10 * np.maximum(loop, 2 * np.finfo(dtype).eps)
        assert (got <= limit).all(), (design, kind, dtype, got, loop)
        compared += 1
    assert compared or order > 5


@pytest.mark.slow
@pytest.mark.thinned(7)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_narrow_filters_in_any_layout(rows: int, threads: int) -> None:
    """The number of rows, of threads and the place of the axis do not decide the error."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype, cut, length in ((np.float32, 0.02, 20000), (np.float64, 0.002, 20000)):
            b, a = (t.astype(dtype) for t in signal.butter(4, cut))
            x = np.eye(1, length)[0].astype(dtype)
            for axis in (0, 1):
                many = np.repeat(x[None], rows, 0) if axis else np.repeat(x[:, None], rows, 1)
                y = lfilter(*(torch.as_tensor(t) for t in (b, a, many)), axis=axis).numpy()
                got, loop = errors(b, a, x, y[0] if axis else y[:, 0])
                assert got <= 10 * loop
                assert (y == (y[:1] if axis else y[:, :1])).all()
    finally:
        torch.set_num_threads(before)


def test_peak_of_a_narrow_response() -> None:
    b, a = (torch.as_tensor(t, dtype=torch.float32) for t in signal.butter(4, 0.02))
    y = lfilter(b, a, torch.eye(1, 1000)[0])
    torch.testing.assert_close(y.max(), torch.tensor(0.0239), rtol=5e-3, atol=0)


@pytest.mark.slow
def test_four_equal_poles() -> None:
    a = np.poly([0.95] * 4)
    x = inputs(4000, np.float64)
    y = lfilter(torch.ones(1, dtype=F64), *map(torch.tensor, (a, x)))
    got, loop = errors(np.ones(1), a, x, y.numpy())
    assert (got <= 10 * loop).all()


UNDAMPED = {
    **{f"turns by {angle}": [1, -2 * np.cos(angle), 1] for angle in (1e-3, 0.02, 0.3, 1.0, 3.0)},
    "alternates": [1, 0, -1], "comb": [1, 0, 0, -1],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.thinned(8)
@pytest.mark.parametrize("name", UNDAMPED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_oscillators_without_damping(backend: str, name: str) -> None:
    """Near a loop's errors: each step may add one rounding of the rotation."""
    device = "cuda" if backend in ("triton", "cuda") and torch.cuda.is_available() else "cpu"
    length = 300 if device == "cpu" and backend == "triton" else 4096
    for dtype in (np.float32, np.float64):
        a, b, x = np.array(UNDAMPED[name], dtype), np.array([1, 0.5], dtype), inputs(length, dtype)
        on = [torch.as_tensor(t, device=device) for t in (b, a, x)]
        got, loop = errors(b, a, x, lfilter(*on, backend=backend).cpu().numpy())
        assert (got <= np.maximum(10 * loop, length * np.finfo(dtype).eps)).all(), (got, loop)


RESONANT = {
    **{f"turns by {angle}": ([1], [1, -2 * np.cos(angle), 1]) for angle in (0.3, 1.0, 2.0)},
    "turns, damped": ([1], np.poly([(1 - 1e-5) * np.exp(2j), (1 - 1e-5) * np.exp(-2j)]).real),
    "two at 2": ([1], np.poly([np.exp(2j), np.exp(-2j)] * 2).real),
    "complex": ([1], [1, -np.exp(2j)]), "alternates": ([1], [1, 0.99999]),
}  # fmt: skip


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", RESONANT)
@pytest.mark.parametrize("rows", [1, 3])
def test_resonances_in_float32(name: str, rows: int) -> None:
    """A rotation of float32 would change each turn alike; a loop's roundings cancel."""
    wide, dtype = (np.clongdouble, np.complex64) if name == "complex" else (LONG, np.float32)
    b, a = (np.array(t).astype(dtype) for t in RESONANT[name])
    length = 2000 if name == "two at 2" else 50000  # later the loop has no digits, either
    x, cotangent = (inputs(length, np.float32).astype(dtype)[-1] for _ in range(2))
    leaves = [torch.as_tensor(t).requires_grad_() for t in (b, a, np.repeat(x[None], rows, 0))]
    y = lfilter(*leaves)
    y.backward(torch.as_tensor(np.repeat(cotangent[None], rows, 0)))
    of_b, of_a, of_x = (t.grad for t in leaves)
    assert of_b is not None and of_a is not None and of_x is not None
    back = cotangent[::-1]
    b, a = b.conj(), a.conj()
    for got, by, series in ((y, (b.conj(), a.conj()), x), (of_x.flip(-1), (b, a), back)):
        exact = signal.lfilter(*(t.astype(wide) for t in by), series.astype(wide))
        loop = signal.lfilter(*by, series)
        error, of_loop = (
            np.abs(t - exact).max() / np.abs(exact).max() for t in (got.detach().numpy(), loop)
        )
        assert error <= max(of_loop, 1e-7), (error, of_loop)
    adjoint = signal.lfilter(np.ones(1, wide), a.astype(wide), back.astype(wide))[::-1]
    exact = signal.lfilter(*(t.conj().astype(wide) for t in (b, a)), x.astype(wide))
    for got, sign, series in ((of_b, 1, x), (of_a, -1, exact)):
        for k in range(len(got)):
            terms = adjoint[k:] * series[: length - k].conj()
            error = np.abs(sign * terms.sum() - got[k].item() / rows)
            assert error <= 2e-5 * np.sqrt((np.abs(terms) ** 2).sum() * length)
    assert y.dtype == of_x.dtype == leaves[2].dtype


@pytest.mark.slow
@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["alternates", "turns by 2.0", "complex"])
@pytest.mark.parametrize("how", ["eager", "mapped", "compiled"])
def test_resonances_where_coefficients_are_not_read(name: str, how: str) -> None:
    dtype = np.complex64 if name == "complex" else np.float32
    b, a = (np.array(t).astype(dtype) for t in RESONANT[name])
    x = inputs(20000, np.float32)[:3].astype(dtype)
    calls: dict[str, Any] = {
        "eager": lambda *t: lfilter(*t, backend="eager"),
        "mapped": torch.func.vmap(lfilter, (None, None, 0)),
        "compiled": torch.compile(lambda *t: lfilter(*t), fullgraph=True, backend="aot_eager"),
    }
    for _ in range(2):
        y = calls[how](*map(torch.as_tensor, (b, a, x)))
        got, loop = errors(b, a, x, y.numpy())
        assert y.dtype == torch.as_tensor(x).dtype and (got <= loop).all(), (got, loop)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("band", [[0.2, 0.2002], [0.9, 0.9001]])
@pytest.mark.parametrize("steady", [False, True])
def test_last_states_of_narrow_bands(band: list[float], steady: bool) -> None:
    """The last state is a difference of numbers that are much larger than itself."""
    sos = signal.butter(2, band, "bandpass", output="sos").astype(np.float32)
    zi = signal.sosfilt_zi(sos).astype(np.float32) * steady
    x = np.ones(50000, np.float32) if steady else inputs(50000, np.float32)[-1]
    _, exact = signal.sosfilt(
        sos.astype(np.float64), x.astype(np.float64), zi=zi.astype(np.float64)
    )
    _, loop = signal.sosfilt(sos, x, zi=zi)
    y, state = sosfilt(*map(torch.as_tensor, (sos, x)), zi=torch.as_tensor(zi), return_final=True)
    assert y.dtype == state.dtype == torch.float32
    got, of_loop = (np.abs(t - exact).max() / np.abs(exact).max() for t in (state.numpy(), loop))
    assert got <= max(of_loop, 1e-7), (got, of_loop)


@pytest.mark.parametrize("function", [lfilter, sosfilt])
def test_a_resonance_in_short_chunks(function: Any) -> None:
    """The state between two chunks keeps what a loop's keeps."""
    rows = torch.tensor([[1.0, 0, 0], [1, -2 * math.cos(2.0), 1]])
    given = (rows.view(1, 6),) if function is sosfilt else tuple(rows)
    x = torch.as_tensor(inputs(20000, np.float32)[:2])
    exact = signal.lfilter(*(t.numpy().astype(LONG) for t in (*rows, x)))
    loop = signal.lfilter(*(t.numpy() for t in (*rows, x)))
    state, parts = x.new_zeros((1, 2, 2) if function is sosfilt else (2, 2)), []
    for part in x.split(50, -1):
        y, state = function(*given, part, zi=state, return_final=True)
        parts.append(y)
    got, of_loop = (np.abs(t - exact).max() for t in (torch.cat(parts, -1).numpy(), loop))
    assert got <= of_loop


def test_coefficients_that_are_not_finite() -> None:
    for bad in (math.nan, math.inf):
        y = lfilter(torch.ones(1), torch.tensor([1.0, bad, 0.5]), torch.ones(200))
        assert y[2:].isnan().all()


@pytest.mark.thinned(8)
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("radius", [1.0, 1 - 1e-6, 0.9])
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_complex_filters(backend: str, radius: float, dtype: type) -> None:
    a = np.poly([radius * np.exp(0.3j), min(radius, 0.99) * np.exp(-0.1j)]).astype(dtype)
    b, x = np.ones(1, dtype), torch.complex(rand(3, 1000), rand(3, 1000, seed=1)).numpy()
    x = x.astype(dtype)
    exact = signal.lfilter(*(t.astype(np.clongdouble) for t in (b, a, x)))
    y = lfilter(*map(torch.as_tensor, (b, a, x)), backend=backend).numpy()
    got, loop = (np.abs(t - exact).max() for t in (y, signal.lfilter(b, a, x)))
    assert got <= np.maximum(10 * loop, 1000 * np.finfo(dtype).eps * np.abs(exact).max())


@pytest.mark.thinned(7)
@pytest.mark.parametrize(
    "a", [[1, -1], [1, -2, 1], [1, 0, 0, -1], [1, -1, -1], [2, -3, 1], [1, -2.5, 2, -0.5]]
)
def test_poles_on_and_outside_the_unit_circle(a: list[float]) -> None:
    x = inputs(40, np.float64)
    b = np.array([1.0, 0.5])
    y = lfilter(*map(torch.tensor, (b, np.array(a, dtype=float), x)))
    np.testing.assert_allclose(y, signal.lfilter(b, a, x), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.thinned(8)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("n, m", [(4, 4), (1, 4), (4, 1), (4, 2), (2, 3), (1, 1)])
def test_states_are_those_of_scipy(n: int, m: int, length: int) -> None:
    b, a, x = rand(n), 0.3 * rand(m, seed=1), rand(2, length, seed=2)
    a[0] = 1.5
    zi = rand(2, max(n, m) - 1, seed=3)
    y, final = lfilter(b, a, x, zi=zi, return_final=True)
    if length == 0:  # scipy refuses it
        assert torch.equal(final, zi) and y.shape == x.shape
        return
    expected, state = signal.lfilter(*(t.numpy() for t in (b, a, x)), zi=zi.numpy())
    torch.testing.assert_close(y, torch.as_tensor(expected))
    torch.testing.assert_close(final, torch.as_tensor(state))
    halves = x.split((length + 1) // 2, -1)
    first, carry = lfilter(b, a, halves[0], zi=zi, return_final=True)
    rest = [lfilter(b, a, half, zi=carry) for half in halves[1:]]
    torch.testing.assert_close(torch.cat([first, *rest], -1), y)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_inputs_that_undo_the_state(dtype: type, backend: str) -> None:
    """The responses to x and to the state are each 10⁶ times what is left of them, or overflow. (In
    the eager engine, as on a GPU, products of growing factors overflow by themselves.)"""
    cases = [
        ([1.0], [1.0, -0.999], [1e6]),
        ([1.0, 0.5], [1.0, -1.98, 0.9801], [1e6, -5e5]),
        ([1.0], [1.0, -1.5], [1.0]),
    ]
    for b, a, large in cases[: 3 if backend == "cpu" else 2]:
        taps = [np.asarray(t, dtype) for t in (b, a)]
        x = np.full(2000, 0 if large == [1.0] else 1e-3, dtype)
        x[: len(large)] = large
        state = -np.asarray(large, dtype)
        if len(b) > 1:  # b[1] x[0] enters with x[1]
            state[1] -= dtype(0.5) * dtype(large[0])
        exact = signal.lfilter(*(t.astype(LONG) for t in (*taps, x)), zi=state.astype(LONG))[0]
        loop = signal.lfilter(*taps, x, zi=state)[0]
        y = lfilter(*map(torch.tensor, (*taps, x)), zi=torch.tensor(state), backend=backend)
        size = np.abs(exact).max()
        limit = 10 * max(np.abs(loop - exact).max(), 2 * np.finfo(dtype).eps * size)
        assert np.abs(y.numpy() - exact).max() <= limit, (b, a)


@pytest.mark.slow(2)
@pytest.mark.parametrize("n, m", [(3, 3), (2, 4), (4, 2), (3, 1)])
def test_packed_states(n: int, m: int) -> None:
    b, a, x = rand(n), 0.3 * rand(m, seed=1), rand(9, 2, seed=2)
    a[0] = 1.5
    offsets = torch.tensor([0, 2, 2, 3, 9])
    zi = rand(4, 2, max(n, m) - 1, seed=3)
    y, final = lfilter(b, a, x, axis=0, zi=zi, return_final=True, offsets=offsets)
    for s, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        alone = lfilter(b, a, x[begin:end], axis=0, zi=zi[s], return_final=True)
        torch.testing.assert_close((y[begin:end], final[s]), alone)


@pytest.mark.slow
def test_one_filter_per_channel() -> None:
    b, a, x = rand(3, 3), 0.3 * rand(2, 1, 4, seed=1), rand(2, 20, 3, seed=2)
    a[..., 0] = 1
    y = lfilter(b, a, x, axis=1)
    for row, channel in itertools.product(range(2), range(3)):
        alone = lfilter(b[channel], a[row, 0], x[row, :, channel])
        torch.testing.assert_close(y[row, :, channel], alone)


@pytest.mark.slow
@pytest.mark.thinned(8)
@pytest.mark.parametrize("dtype", [F64, torch.complex128])
@pytest.mark.parametrize("order", [1, 3])
def test_derivatives(order: int, dtype: torch.dtype) -> None:
    """Of first and second order, forward mode, batches of cotangents; packed with states."""
    b, x = (rand(*shape, dtype=dtype, seed=k) for k, shape in enumerate([(order + 1,), (2, 7)]))
    a = torch.tensor([1.5, -0.6, 0.3, 0.1][: order + 1], dtype=dtype)
    a = a + 0.1j if dtype.is_complex else a
    leaves = [t.requires_grad_() for t in (b, a, x)]
    real = not dtype.is_complex
    torch.autograd.gradcheck(lfilter, leaves, check_forward_ad=real, check_batched_grad=real)
    torch.autograd.gradgradcheck(lfilter, leaves)
    offsets, zi = torch.tensor([0, 3, 3, 7]), rand(3, 2, order, dtype=dtype).requires_grad_()
    torch.autograd.gradcheck(
        lambda b, a, x, zi: lfilter(b, a, x, zi=zi, offsets=offsets, return_final=True),
        [*leaves, zi],
    )


@pytest.mark.slow
def test_gradient_of_a_narrow_filter() -> None:
    """Beside the same sums over scipy's filters, in float64."""
    b, a = (torch.tensor(t, requires_grad=True) for t in signal.butter(4, 0.002))
    x, g = rand(20000).requires_grad_(), rand(20000, seed=1)
    y = lfilter(b, a, x)
    got = torch.autograd.grad(y, (b, a, x), g)
    coefficients = [t.detach().numpy().astype(LONG) for t in (b, a)]
    series, cotangent = x.detach().numpy().astype(LONG), g.numpy().astype(LONG)
    exact = signal.lfilter(*coefficients, series)
    adjoint = signal.lfilter(np.ones(1, LONG), coefficients[1], cotangent[::-1])[::-1]
    of_b = [(adjoint[k:] * series[: 20000 - k]).sum() for k in range(5)]
    of_a = [-(adjoint[k:] * exact[: 20000 - k]).sum() for k in range(5)]
    of_x = signal.lfilter(*coefficients, cotangent[::-1])[::-1]
    # A loop's own relative error on this filter is about 3e-9.
    for found, expected in zip(got, (of_b, of_a, of_x), strict=True):
        size = np.abs(np.array(expected)).max()
        assert np.abs(found.numpy() - expected).max() <= 1e-7 * size


def test_gradient_beside_a_state() -> None:
    """That of x is a filter with the numerator in it: 1 / A alone would lose slow input."""
    sections = signal.cheby1(4, 1, 0.01, "high", output="sos").astype(np.float32)
    x, cotangent = (inputs(20000, np.float32)[1] for _ in range(2))
    grads = []
    for zi in (None, torch.zeros(2, 2)):
        leaf = torch.tensor(x).requires_grad_()
        sosfilt(torch.tensor(sections), leaf, zi=zi).backward(torch.tensor(cotangent))
        assert leaf.grad is not None
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=0, atol=1e-6 * float(grads[0].abs().max()))


@pytest.mark.slow
def test_compiled_and_mapped() -> None:
    b, a, x = rand(5), torch.tensor([1.0, -0.5, 0.2, 0.1, 0.3], dtype=F64), rand(4, 30)
    y = lfilter(b, a, x)
    mapped = torch.func.vmap(lfilter, (None, None, 0))
    torch.testing.assert_close(mapped(b, a, x), y)
    torch.testing.assert_close(mapped(b, a, x), y)
    tensors = [t.requires_grad_() for t in (b, a, x)]
    compiled = torch.compile(
        lambda *t: lfilter(*t).square().sum(), fullgraph=True, backend="aot_eager"
    )
    for _ in range(2):
        got = torch.autograd.grad(compiled(*tensors), tensors)
        torch.testing.assert_close(
            got, torch.autograd.grad(lfilter(*tensors).square().sum(), tensors)
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    b, a, x = (t.to(dtype) for t in (rand(3), torch.tensor([1.0, -0.5, 0.2]), rand(2, 40)))
    y, final = lfilter(b, a, x, return_final=True)
    wide = [t.to(torch.complex128 if dtype.is_complex else F64).numpy() for t in (b, a, x)]
    assert y.dtype == dtype
    assert final.dtype == (dtype if dtype.is_complex else torch.float32)
    expected = torch.as_tensor(signal.lfilter(*wide))
    torch.testing.assert_close(y, expected.to(dtype))


@pytest.mark.parametrize("axis", [0, 1, -2])
def test_states_of_scipy_for_any_axis(axis: int) -> None:
    """Converted as `help(lfilter)` says."""
    b, a, x = rand(3), torch.tensor([1.0, -0.5, 0.2], dtype=F64), rand(4, 5, 3)
    zi = rand(*[2 if d == axis % 3 else n for d, n in enumerate(x.shape)])
    expected = signal.lfilter(*(t.numpy() for t in (b, a, x)), axis=axis, zi=zi.numpy())
    y, state = lfilter(b, a, x, axis, zi=zi.movedim(axis, -1), return_final=True)
    got = y, state.movedim(-1, axis)
    torch.testing.assert_close(got, tuple(map(torch.as_tensor, expected)))


def test_refused() -> None:
    b, a, x = rand(2), rand(3), rand(4, 5)
    with pytest.raises(ScanValueError, match=r"a\[0\] is 0"):
        lfilter(b, torch.tensor([0.0, 1.0], dtype=F64), x)
    with pytest.raises(ScanValueError, match=r"pass zi.movedim\(-2, -1\)"):
        lfilter(b, a, x.movedim(-1, 0), 0, zi=rand(2, 4))
    with pytest.raises(ScanValueError, match=r"zi has shape \[4, 3\].*\[4, 2\]"):
        lfilter(b, a, x, zi=rand(4, 3))
    with pytest.raises(ScanValueError, match=r"a has shape \[3, 3\].*\[4\]"):
        lfilter(b, rand(3, 3), x)
    with pytest.raises(ScanTypeError, match=r"zi has dtype torch\.float32"):
        lfilter(b, a, x, zi=rand(4, 2).float())


@pytest.mark.thinned(7)
@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("final", [False, "only"])
def test_a_carry_walks_through_matrix_recurrences(rows: int, final: bool | str) -> None:
    """Companion matrices of a narrow filter: their products grow to 10⁵ before they decay, and on
    the CPU no thread forms them."""
    _, a = signal.butter(4, 0.02)
    x = np.random.default_rng(0).standard_normal((rows, 50000)).astype(np.float32)
    companion = torch.zeros(4, 4)
    companion[0], companion[1:, :-1] = -torch.as_tensor(a[1:]), torch.eye(3)
    entering = torch.zeros(rows, 50000, 4)
    entering[..., 0] = torch.as_tensor(x)
    h = matrix_recurrence(companion, entering, return_final=final, backend="cpu")
    denominator = np.concatenate([[1], -companion[0].numpy()]).astype(LONG)
    exact = signal.lfilter(np.ones(1, LONG), denominator, x.astype(LONG))
    loop = signal.lfilter(np.ones(1, np.float32), denominator.astype(np.float32), x)
    size, limit = np.abs(exact).max(), 10 * np.abs(loop - exact).max()
    got, exact = (h[:, 0], exact[:, -1]) if final else (h[..., 0], exact)
    assert np.abs(got.numpy() - exact).max() <= limit < size
