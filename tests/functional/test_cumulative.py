"""The named functions against torch's own and against plain loops."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.signal
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import assocscan
from assocscan.testing import assert_scan_close

pytestmark = pytest.mark.thinned(7)

F64, C128 = torch.float64, torch.complex128
INF, NAN = float("inf"), float("nan")
INTEGERS = [torch.bool, torch.uint8, torch.int16, torch.int64]
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
SHAPE = (3, 17, 4)

every_direction = pytest.mark.parametrize("reverse", [False, True])


def sample(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype in INTEGERS:
        return torch.randint(0, 4, shape, generator=generator).to(dtype)
    wide = C128 if dtype in COMPLEX else F64
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


def along(name: str, x: Tensor, axis: int, reverse: bool, **options: Any) -> Any:
    """torch's function, run from the end by flipping; indices counted on the original axis."""
    function = getattr(torch, name)
    if not reverse:
        return function(x, axis, **options)
    result = function(x.flip(axis), axis, **options)
    if isinstance(result, Tensor):
        return result.flip(axis)
    values, indices = (r.flip(axis) for r in result)
    return values, x.shape[axis] - 1 - indices


def widest(x: Tensor) -> Tensor:
    if x.is_complex():
        return x.to(C128)
    return x.to(F64) if x.is_floating_point() else x


@pytest.mark.thinned(7)
@every_direction
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_sums_and_products(name: str, axis: int, reverse: bool) -> None:
    x = sample(torch.float32, *SHAPE)
    y = getattr(assocscan, name)(x, axis, reverse)
    assert_scan_close(y, along(name, widest(x), axis, reverse), SHAPE[axis])


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("cumsum", dtype) for dtype in [*INTEGERS, *FLOATS, torch.complex64]]
    + [("cumprod", dtype) for dtype in (torch.bool, C128)],
    ids=str,
)
def test_dtypes_of_sums_and_products(name: str, dtype: torch.dtype) -> None:
    x = sample(dtype, *SHAPE)
    y, expected = getattr(assocscan, name)(x, 1), getattr(torch, name)(widest(x), 1)
    assert y.dtype == getattr(torch, name)(x, 1).dtype
    assert_scan_close(y, expected, 17)


@pytest.mark.thinned(7)
@pytest.mark.parametrize(
    ("name", "dtype", "target"),
    [
        ("cumsum", torch.int8, torch.int8),
        ("cumsum", torch.float16, torch.float64),
        ("cumsum", torch.float32, torch.int64),
        ("cumsum", torch.float32, torch.complex64),
        ("cumprod", torch.int32, torch.float64),
    ],
    ids=str,
)
def test_cast_before_the_sum(name: str, dtype: torch.dtype, target: torch.dtype) -> None:
    x = 3 * sample(dtype, *SHAPE)
    y = getattr(assocscan, name)(x, 1, dtype=target)
    torch.testing.assert_close(y, getattr(torch, name)(x, 1, dtype=target))


def test_gradient_through_the_cast() -> None:
    x = sample(torch.float32, 5, 7).requires_grad_()
    cotangent = sample(F64, 5, 7, seed=1)
    (gradient,) = torch.autograd.grad(assocscan.cumsum(x, dtype=F64), x, cotangent)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, along("cumsum", cotangent, 1, True).float())


def test_gradient_of_a_product_with_zeros() -> None:
    x = torch.tensor([2.0, 0.0, 3.0, 0.0, 5.0], dtype=F64, requires_grad=True)
    cotangent = sample(F64, 5)
    (gradient,) = torch.autograd.grad(assocscan.cumprod(x), x, cotangent)
    (expected,) = torch.autograd.grad(torch.cumprod(x, 0), x, cotangent)
    torch.testing.assert_close(gradient, expected)


@every_direction
def test_exclusive_leaves_the_last_one_out(reverse: bool) -> None:
    x = sample(F64, *SHAPE)
    inclusive, exclusive = (assocscan.cumsum(x, 1, reverse, flag) for flag in (True, False))
    torch.testing.assert_close(exclusive + x, inclusive)
    assert not exclusive.select(1, -1 if reverse else 0).any()


@pytest.mark.thinned(8)
@every_direction
@pytest.mark.parametrize(
    ("name", "dtype", "axis"),
    [("cummax", dtype, 1) for dtype in (torch.bool, torch.uint8, torch.bfloat16)]
    + [("cummin", torch.int64, 1)]
    + [(name, torch.float32, axis) for name in ("cummax", "cummin") for axis in (0, 1, -1)],
    ids=str,
)
def test_extrema_with_ties(name: str, dtype: torch.dtype, axis: int, reverse: bool) -> None:
    x = sample(torch.int64, *SHAPE).to(dtype)
    got = getattr(assocscan, name)(x, axis, reverse)
    values, indices = along(name, x, axis, reverse)
    assert torch.equal(got.values, values) and got.values.dtype == dtype
    assert torch.equal(got.indices, indices) and got.indices.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_integers_without_sign(dtype: torch.dtype) -> None:
    """Numbers above the greatest of the signed dtype of that size among them; twice."""
    top = torch.iinfo(dtype).max
    numbers = [3, top, 0, top - 1, top, top // 2 + 1, 0, 7]
    x = torch.tensor(numbers, dtype=dtype)
    for reverse, order in ((False, 1), (False, 1), (True, -1)):
        for name, better in (("cummax", operator.ge), ("cummin", operator.le)):
            values, indices = getattr(assocscan, name)(x, reverse=reverse)
            best, want = None, []
            for k in range(len(numbers))[::order]:
                best = k if best is None or better(numbers[k], numbers[best]) else best
                want.append(best)
            assert values.dtype == dtype and indices.tolist() == want[::order]
            assert values.tolist() == [numbers[k] for k in want[::order]]
    small = torch.tensor([3, 1, 4, 1, 5], dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing runs eagerly
        for name in ("cumsum", "cumprod"):
            scan, by_torch = getattr(assocscan, name), getattr(torch, name)
            assert torch.equal(scan(small), by_torch(small.long(), 0))
            assert torch.equal(scan(small, dtype=F64), by_torch(small.to(F64), 0))


@every_direction
@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_extrema_with_nan_and_infinities(name: str, reverse: bool) -> None:
    numbers = torch.tensor([INF, -INF, NAN, 0.0, -0.0, 1.0])
    x = numbers[torch.randint(6, (40, 8), generator=torch.Generator().manual_seed(0))]
    values, indices = getattr(assocscan, name)(x, 1, reverse)
    expected = along(name, x, 1, reverse)
    torch.testing.assert_close(values, expected[0], equal_nan=True)
    assert torch.equal(indices, expected[1])


@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_gradient_of_extrema_goes_to_the_index(name: str) -> None:
    x = sample(torch.int64, *SHAPE).to(F64).requires_grad_()
    cotangent = sample(F64, *SHAPE)
    (gradient,) = torch.autograd.grad(getattr(assocscan, name)(x, 1)[0], x, cotangent)
    (expected,) = torch.autograd.grad(getattr(torch, name)(x, 1)[0], x, cotangent)
    torch.testing.assert_close(gradient, expected)


@every_direction
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_logcumsumexp(dtype: torch.dtype, reverse: bool) -> None:
    x = 20 * sample(dtype, *SHAPE)
    y = assocscan.logcumsumexp(x, 1, reverse)
    assert y.dtype == dtype
    assert_scan_close(y, along("logcumsumexp", widest(x), 1, reverse), 17)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_logcumsumexp_up_to_a_turn(dtype: torch.dtype) -> None:
    x = sample(dtype, *SHAPE)
    y = assocscan.logcumsumexp(x, 1)
    assert y.dtype == dtype
    assert_scan_close(y.exp(), widest(x).exp().cumsum(1), 17)


def test_logcumsumexp_of_infinities() -> None:
    x = torch.tensor([[-INF, -INF, 2.0, INF, INF, -INF], [-INF, 0.0, NAN, 0.0, INF, -INF]])
    y = assocscan.logcumsumexp(x)
    torch.testing.assert_close(y, torch.logcumsumexp(x, 1), equal_nan=True)


def test_gradient_of_logcumsumexp() -> None:
    x = sample(F64, *SHAPE).requires_grad_()
    cotangent = sample(F64, *SHAPE, seed=1)
    (gradient,) = torch.autograd.grad(assocscan.logcumsumexp(x, 1), x, cotangent)
    (expected,) = torch.autograd.grad(torch.logcumsumexp(x, 1), x, cotangent)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"])
def test_zero_dimensions(name: str, axis: int) -> None:
    x = torch.tensor(3.0)
    got, expected = getattr(assocscan, name)(x, axis), getattr(torch, name)(x, axis)
    torch.testing.assert_close(tree_leaves(got), tree_leaves(expected))


def recurrence_loop(a: Tensor, b: Tensor, init: Any, axis: int, reverse: bool) -> Tensor:
    """h[t] = a[t] h[t−1] + b[t] in the widest dtype."""
    dtype = widest(torch.empty(0, dtype=torch.result_type(a, b))).dtype
    a, b = a.to(dtype).expand(b.shape).movedim(axis, 0), b.to(dtype).movedim(axis, 0)
    steps = range(len(b))
    h, states = torch.zeros_like(b[0]) if init is None else init, []
    for t in reversed(steps) if reverse else steps:
        h = a[t] * h + b[t]
        states.append(h)
    return torch.stack(states[::-1] if reverse else states).movedim(0, axis)


@pytest.mark.thinned(7)
@every_direction
@pytest.mark.parametrize(
    ("shape", "axis"),
    [(shape, 1) for shape in [(), (4,), (17, 1), (3, 17, 1), (3, 1, 4), (17, 4)]]
    + [(shape, axis) for shape in [(4,), (3, 17, 4)] for axis in (0, 1, -1)],
)
def test_recurrence_broadcasts_its_decay(shape: tuple[int, ...], axis: int, reverse: bool) -> None:
    a, b = sample(F64, *shape), sample(F64, *SHAPE, seed=1)
    h = assocscan.linear_recurrence(a, b, axis=axis, reverse=reverse)
    assert_scan_close(h, recurrence_loop(a, b, None, axis, reverse), SHAPE[axis])


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.complex64, torch.float32),
        (torch.float64, torch.complex64),
        (torch.int32, torch.int64),
        (torch.complex128, torch.complex128),
    ],
    ids=str,
)
def test_recurrence_promotes_dtypes(a: torch.dtype, b: torch.dtype) -> None:
    decay, x = sample(a, 4), sample(b, *SHAPE, seed=1)
    h = assocscan.linear_recurrence(decay, x)
    assert h.dtype == torch.promote_types(a, b)
    assert_scan_close(h, recurrence_loop(decay, x, None, 1, False), SHAPE[1])


@pytest.mark.parametrize("a", [0.5, -0.5j, True])
def test_recurrence_with_a_number(a: complex) -> None:
    b = sample(torch.float32, *SHAPE)
    h = assocscan.linear_recurrence(a, b)
    assert h.dtype == torch.result_type(a, b)
    assert_scan_close(h, recurrence_loop(torch.tensor(a), b, None, 1, False), SHAPE[1])


def test_recurrence_is_a_linear_filter() -> None:
    b = sample(F64, 200)
    h = assocscan.linear_recurrence(0.9, b, axis=0)
    np.testing.assert_allclose(h.numpy(), scipy.signal.lfilter([1.0], [1.0, -0.9], b.numpy()))


@pytest.mark.thinned(7)
@every_direction
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64], ids=str)
def test_pieces_equal_the_whole(dtype: torch.dtype, reverse: bool) -> None:
    a, b = (sample(dtype, *SHAPE, seed=k) for k in range(2))
    init = sample(dtype, 3, 4, seed=2)
    whole, last = assocscan.linear_recurrence(a, b, init, 1, reverse, return_final=True)
    pieces, carry = [], init
    cuts = [slice(0, 5), slice(5, 17)]
    for cut in reversed(cuts) if reverse else cuts:
        h, carry = assocscan.linear_recurrence(
            a[:, cut], b[:, cut], carry, 1, reverse, return_final=True
        )
        pieces.append(h)
    joined = torch.cat(pieces[::-1] if reverse else pieces, 1)
    assert_scan_close(joined, widest(whole), 17)
    assert last.dtype == carry.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    torch.testing.assert_close(carry, last)
    assert_scan_close(whole, recurrence_loop(a, b, widest(init), 1, reverse), 17)


@pytest.mark.thinned(7)
@pytest.mark.parametrize(
    ("init", "expected"),
    [
        (1.0, torch.float16),
        (torch.ones(4), torch.float16),
        (torch.ones(4, dtype=torch.float16), torch.float16),
        (1j, torch.complex64),
        (torch.ones(4, dtype=F64), F64),
        (torch.ones(3, 1, dtype=torch.complex64), torch.complex64),
    ],
    ids=str,
)
def test_dtype_with_init(init: Any, expected: torch.dtype) -> None:
    b = sample(torch.float16, *SHAPE)
    h = assocscan.linear_recurrence(0.5, b, init)
    assert h.dtype == expected
    start = widest(torch.as_tensor(init)).expand(3, 4)
    assert_scan_close(h, recurrence_loop(torch.tensor(0.5), b, start, 1, False), 17)


@pytest.mark.thinned(7)
@every_direction
@pytest.mark.parametrize(
    ("shape", "dtype"), [((), F64), ((4,), C128), ((3, 17, 4), F64), ((3, 17, 4), C128)], ids=str
)
def test_gradient_of_the_recurrence(
    shape: tuple[int, ...], dtype: torch.dtype, reverse: bool
) -> None:
    a, b, init = sample(dtype, *shape), sample(dtype, *SHAPE, seed=1), sample(dtype, 3, 4, seed=2)
    inputs = [x.requires_grad_() for x in (a, b, init)]
    h, final = assocscan.linear_recurrence(*inputs, 1, reverse, return_final=True)
    expected = recurrence_loop(a, b, init, 1, reverse)
    last = expected[:, 0 if reverse else -1]
    cotangents = [sample(dtype, *SHAPE, seed=3), sample(dtype, 3, 4, seed=4)]
    cotangents[0][0] = 0
    actual = torch.autograd.grad((h, final), inputs, cotangents)
    loop = torch.autograd.grad((expected, last), inputs, cotangents)
    torch.testing.assert_close(actual, loop)


@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_extrema_have_no_exclusive_form(name: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        getattr(assocscan, name)(torch.ones(3), inclusive=False)
    assert isinstance(caught.value, assocscan.AssocScanError)


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"])
def test_bad_axis_and_bad_input(name: str) -> None:
    function = getattr(assocscan, name)
    for x, axis in [(torch.ones(3, 4), 2), (torch.ones(3, 4), -3), (torch.tensor(1.0), 1)]:
        with pytest.raises(assocscan.AxisError, match="axis"):
            function(x, axis)
    with pytest.raises(TypeError, match="list") as caught:
        function([1.0, 2.0])
    assert isinstance(caught.value, assocscan.AssocScanError)


def test_inputs_of_the_wrong_dtype() -> None:
    with pytest.raises(TypeError, match="complex64"):
        assocscan.cummax(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="int64"):
        assocscan.logcumsumexp(torch.ones(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="float"):
        assocscan.cumsum(torch.ones(3), dtype=float)  # type: ignore[arg-type]


def test_bad_recurrences() -> None:
    b = torch.ones(2, 5, 3)
    with pytest.raises(ValueError, match=r"\[4\].*\[2, 5, 3\]"):
        assocscan.linear_recurrence(torch.ones(4), b)
    with pytest.raises(ValueError, match="init"):
        assocscan.linear_recurrence(0.5, b, torch.ones(7))
    with pytest.raises(TypeError, match="str"):
        assocscan.linear_recurrence("0.5", b)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="b is a list"):
        assocscan.linear_recurrence(0.5, [1.0])  # type: ignore[arg-type]
    with pytest.raises(assocscan.AxisError):
        assocscan.linear_recurrence(0.5, torch.ones(5))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (1,)])
def test_empty_and_single(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    for name in ("cumsum", "cumprod", "logcumsumexp"):
        torch.testing.assert_close(getattr(assocscan, name)(x), getattr(torch, name)(x, -1))
    values, indices = assocscan.cummax(x)
    assert values.shape == indices.shape == x.shape
    h, final = assocscan.linear_recurrence(0.5, x, axis=-1, return_final=True)
    assert h.shape == x.shape and final.shape == x.shape[:-1]
