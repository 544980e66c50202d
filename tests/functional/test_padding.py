"""Offsets of lengths and back, packed sequences on rows of one length and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import assocscan
from assocscan import (
    ScanTypeError,
    ScanValueError,
    compact,
    from_padded,
    lengths_of,
    offsets_of,
    to_padded,
)

LENGTHS = torch.tensor([3, 0, 2, 4])
OFFSETS = torch.tensor([0, 3, 3, 5, 9])
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def sample(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def padded_loop(x: Tensor, offsets: Tensor, value: float, axis: int) -> Tensor:
    parts = [x.movedim(axis, 0)[a:b] for a, b in itertools.pairwise(offsets.tolist())]
    longest = max([len(part) for part in parts], default=0)
    rows = [
        torch.cat([part, part.new_full((longest - len(part), *part.shape[1:]), value)])
        for part in parts
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_lengths_and_offsets(dtype: torch.dtype) -> None:
    for lengths in (LENGTHS, LENGTHS[:1], LENGTHS[:0]):
        offsets = offsets_of(lengths.to(dtype))
        assert offsets.dtype == torch.int64
        assert offsets.tolist() == [0, *itertools.accumulate(lengths.tolist())]
        back = lengths_of(offsets.to(dtype))
        assert back.dtype == torch.int64 and torch.equal(back, lengths)
    # A sum that the dtype of the lengths cannot hold.
    assert offsets_of(torch.full((3,), 100, dtype=torch.int8)).tolist() == [0, 100, 200, 300]


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_dtypes_that_torch_hardly_computes_with(dtype: torch.dtype) -> None:
    x = torch.arange(1, 10).to(torch.float32).to(dtype)
    for _ in range(2):
        rows = to_padded(x, OFFSETS, 7)
        assert rows.dtype == dtype
        want = padded_loop(x.double(), OFFSETS, 7, 0)
        assert torch.equal(rows.double(), want)
        packed, count = compact(x, torch.arange(9) % 2 == 0)
        assert packed.dtype == dtype and int(count) == 5
        assert packed.double().tolist() == [*x.double().tolist()[::2], 0, 0, 0, 0]


@pytest.mark.thinned(7)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.complex64]
)
def test_there_and_back(axis: int, dtype: torch.dtype) -> None:
    x = (4 * sample(9, 9, 9)).to(dtype)
    for offsets in (OFFSETS, OFFSETS, OFFSETS.int(), torch.tensor([0, 9]), torch.tensor([0, 0, 9])):
        rows = to_padded(x, offsets, 1, axis)
        assert torch.equal(rows, padded_loop(x, offsets, 1, axis))
        packed, back = from_padded(rows, lengths_of(offsets))
        assert torch.equal(packed, x.movedim(axis, 0)) and torch.equal(back, offsets)
    # Another layout: strided, and one element further in memory.
    whole = sample(10, 18, 9).to(dtype)
    assert torch.equal(
        to_padded(whole[1:, ::2], OFFSETS), padded_loop(whole[1:, ::2], OFFSETS, 0, 0)
    )


def test_nothing() -> None:
    assert to_padded(torch.ones(0, 2), torch.tensor([0])).shape == (0, 0, 2)
    assert to_padded(torch.ones(0, 2), torch.tensor([0, 0, 0])).shape == (2, 0, 2)
    assert to_padded(torch.ones(9, 0), OFFSETS).shape == (4, 4, 0)
    packed, offsets = from_padded(torch.ones(2, 0, 3), torch.tensor([0, 0]))
    assert packed.shape == (0, 3) and offsets.tolist() == [0, 0, 0]
    packed, offsets = from_padded(torch.ones(0, 4), torch.zeros(0, dtype=torch.int64))
    assert packed.shape == (0,) and offsets.tolist() == [0]


def test_what_is_filled_in_has_no_gradient() -> None:
    """NaN behind the end of a sequence reaches neither the packed values nor their gradients."""
    x = sample(9, 2).double().requires_grad_()
    cotangent = torch.full((4, 4, 2), torch.nan).double()
    cotangent[torch.arange(4) < LENGTHS[:, None]] = 2.0
    rows = to_padded(x, OFFSETS, torch.nan)
    assert rows.isnan().sum() == 2 * 7
    assert torch.equal(torch.autograd.grad(rows, x, cotangent)[0], torch.full_like(x, 2.0))
    leaf = rows.detach().requires_grad_()
    packed, _ = from_padded(leaf, LENGTHS)
    assert torch.equal(packed, x)
    gradient = torch.autograd.grad(packed, leaf, torch.ones_like(packed))[0]
    assert torch.equal(gradient, (~leaf.isnan()).double())
    torch.autograd.gradgradcheck(lambda t: to_padded(t, OFFSETS).square(), x)
    torch.autograd.gradgradcheck(lambda t: from_padded(to_padded(t, OFFSETS), LENGTHS)[0] ** 2, x)


def test_a_scan_of_rows_is_the_packed_one() -> None:
    x = sample(9, 2)
    rows = assocscan.cumsum(to_padded(x, OFFSETS), 1)
    packed, offsets = from_padded(rows, LENGTHS)
    torch.testing.assert_close(packed, assocscan.cumsum(x, 0, offsets=offsets))


def test_transforms() -> None:
    xs = sample(3, 9, 2)
    mapped = torch.func.vmap(lambda x: to_padded(x, OFFSETS))(xs)
    assert torch.equal(mapped, torch.stack([to_padded(x, OFFSETS) for x in xs]))
    mapped = torch.func.vmap(lambda x: from_padded(x, LENGTHS)[0])(mapped)
    assert torch.equal(mapped, xs)
    mapped = torch.func.vmap(lambda n: lengths_of(offsets_of(n)))(torch.stack([LENGTHS, LENGTHS]))
    assert torch.equal(mapped, torch.stack([LENGTHS, LENGTHS]))
    compiled: Any = torch.compile(
        lambda n: (offsets_of(n), lengths_of(offsets_of(n))), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(LENGTHS)[0], OFFSETS) and torch.equal(compiled(LENGTHS)[1], LENGTHS)


@pytest.mark.parametrize(
    "call,error,words",
    [
        (lambda x: offsets_of([1, 2]), ScanTypeError, "lengths is a list"),
        (lambda x: offsets_of(x), ScanTypeError, r"lengths have dtype torch.float32.*\.long\(\)"),
        (lambda x: offsets_of(LENGTHS[None]), ScanValueError, r"shape \[1, 4\], expected \[S\]"),
        (lambda x: offsets_of(-LENGTHS), ScanValueError, r"lengths\[0\] is -3"),
        (lambda x: lengths_of(LENGTHS), ScanValueError, r"offsets\[0\] is 3, it must be 0"),
        (lambda x: lengths_of(OFFSETS[[0, 2, 1, 0]]), ScanValueError, "must not decrease"),
        (lambda x: lengths_of(OFFSETS[:0]), ScanValueError, r"expected \[S \+ 1\]"),
        (lambda x: to_padded([1.0], OFFSETS), ScanTypeError, "x is a list"),
        (lambda x: to_padded(x, LENGTHS), ScanValueError, r"of lengths make offsets"),
        (lambda x: to_padded(x, OFFSETS[:3]), ScanValueError, "the axis has length 9"),
        (lambda x: to_padded(x, OFFSETS, axis=1), IndexError, r"axis 1.*x of shape \[9\]"),
        (lambda x: to_padded(x, OFFSETS, "0"), ScanTypeError, "value is '0', expected a number"),
        (lambda x: to_padded(x.long(), OFFSETS, math.nan), ScanTypeError, "nan, which torch.int64"),
        (lambda x: to_padded(x.long(), OFFSETS, 0.5), ScanTypeError, "0.5, which torch.int64"),
        (lambda x: to_padded(x.byte(), OFFSETS, -1), ScanTypeError, "-1, which torch.uint8"),
        (lambda x: to_padded(x > 0, OFFSETS, 2), ScanTypeError, "2, which torch.bool"),
        (lambda x: to_padded(x, OFFSETS, 1j), ScanTypeError, "1j, which torch.float32"),
        (lambda x: to_padded(x, OFFSETS, 1e300), ScanTypeError, "300, which torch.float32"),
        (lambda x: to_padded(x.half(), OFFSETS, 7e4), ScanTypeError, "which torch.float16"),
        (lambda x: to_padded(x, OFFSETS, 2**1100), ScanTypeError, "which torch.float32"),
        (lambda x: to_padded(x.long(), OFFSETS, 2**70), ScanTypeError, "which torch.int64"),
        (lambda x: from_padded(x, LENGTHS), ScanValueError, r"expected \[S, longest, …\]"),
        (lambda x: from_padded(x.view(3, 3), LENGTHS), ScanValueError, r"\[3, 3\] and .*\[4\]"),
        (lambda x: from_padded(x.view(3, 3), LENGTHS[1:]), ScanValueError,
         r"lengths\[2\] is 4, expected 0 to 3"),
    ],
)  # fmt: skip
def test_refused(call: Callable[[Tensor], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(sample(9))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padding_in_transforms(dtype: torch.dtype) -> None:
    x, offsets = sample(9).double(), OFFSETS.to(dtype)

    def loss(t: Tensor) -> Tensor:
        return (to_padded(t, offsets, value=7) ** 3).sum()

    tangent = torch.linspace(-1, 1, 9, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(torch.func.grad(loss)(x), 3 * x**2)
        torch.testing.assert_close(torch.func.hessian(loss)(x), torch.diag(6 * x))
        torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(x[None]), 3 * x[None] ** 2)
        _, moved = torch.func.jvp(lambda t: to_padded(t, offsets), (x,), (tangent,))
        assert torch.equal(moved, to_padded(tangent, offsets))
    with pytest.raises(NotImplementedError, match="vmap over offsets"):
        torch.vmap(lambda o: to_padded(x, o))(offsets[None])
    with pytest.raises(ScanValueError, match="must not decrease"):
        torch.func.grad(lambda t: to_padded(t, offsets[[0, 3, 1, 4]]).sum())(x)
