"""`matrix_recurrence` of matrices too large to be unrolled: filled up to a side that kernels of
whole matrices have, or walked. Warnings are errors: nothing falls back to the eager engine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from table import GPU, Engine
from torch import Tensor

from assocscan import (
    Monoid,
    ScanTypeError,
    ScanValueError,
    associative_scan,
    matrix_recurrence,
    ops,
    reduce,
    windowed,
)
from assocscan.functional.vector_recurrences import kernel_side
from assocscan.runtime.backends import availability

put = Engine("triton", GPU).put
WALKED = pytest.mark.parametrize("d", [15, 16, 40])


def draw(d: int, length: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """A [2, L, d, d], b [3, 2, L, d] and init [2, d]."""
    generator = torch.Generator().manual_seed(d)
    shapes = (2, length, d, d), (3, 2, length, d), (2, d)
    A, b, init = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return tuple(t.to(dtype) for t in (A / d**0.5, b, init))


def loop(A: Tensor, b: Tensor, init: Tensor | None, reverse: bool) -> Tensor:
    h = b.new_zeros(()).expand(3, 2, b.shape[-1]) if init is None else init
    states = {}
    for t in range(b.shape[2])[:: -1 if reverse else 1]:
        h = torch.einsum("bij,abj->abi", A[:, t], h.expand(3, *h.shape[-2:])) + b[:, :, t]
        states[t] = h
    return torch.stack([states[t] for t in range(b.shape[2])], 2)


@WALKED
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("has_init", [False, True])
def test_walked_on_the_cpu(d: int, reverse: bool, has_init: bool) -> None:
    A, b, init = draw(d)
    given = A, b, init if has_init else None
    want = loop(*given, reverse)
    options: Any = {"axis": 2, "reverse": reverse}
    torch.testing.assert_close(matrix_recurrence(*given, **options), want)
    h, last = matrix_recurrence(*given, **options, return_final=True)
    torch.testing.assert_close(h, want)
    torch.testing.assert_close(last, want[:, :, 0 if reverse else -1])
    only = matrix_recurrence(*given, **options, return_final="only")
    torch.testing.assert_close(only, last)


@pytest.mark.parametrize("return_final", [True, "only"])
def test_gradients_of_the_walk(return_final: Any) -> None:
    A, b, init = (t.requires_grad_() for t in draw(15, 3))

    def call(*given: Tensor) -> Any:
        return matrix_recurrence(*given, axis=2, return_final=return_final)

    assert torch.autograd.gradcheck(call, (A, b, init), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (A, b, init), fast_mode=True)


def test_16_bits_are_walked_in_float32() -> None:
    A, b, init = draw(16, 6, torch.bfloat16)
    want = loop(A.float(), b.float(), init.float(), False)
    h, last = matrix_recurrence(A, b, init, axis=2, return_final=True)
    assert h.dtype == torch.bfloat16 and last.dtype == torch.float32
    torch.testing.assert_close(last, want[:, :, -1])
    torch.testing.assert_close(h, want.bfloat16(), rtol=2**-7, atol=0)


def test_what_is_wrong_is_said_as_of_small_ones() -> None:
    A, b, init = draw(16)
    with pytest.raises(ScanValueError, match=r"init has shape \[5, 16\]"):
        matrix_recurrence(A, b, init[:1].expand(5, 16), axis=2)
    whole = matrix_recurrence(A, b, init.int(), axis=2)
    torch.testing.assert_close(whole, matrix_recurrence(A, b, init.int().double(), axis=2))
    with pytest.raises(ScanTypeError, match=r"init has dtype torch\.float64"):
        matrix_recurrence(A.float(), b.float(), init, axis=2)
    with pytest.raises(ScanTypeError, match="reverse is 'yes'"):
        matrix_recurrence(A, b, axis=2, reverse="yes")  # type: ignore[arg-type]


def test_no_steps() -> None:
    A, b, init = draw(16, 0)
    h, last = matrix_recurrence(A, b, init, axis=2, return_final=True)
    assert h.shape == (3, 2, 0, 16) and torch.equal(last, init.expand(3, 2, 16))
    last = matrix_recurrence(A, b, axis=2, return_final="only")
    assert torch.equal(last, torch.zeros(3, 2, 16, dtype=b.dtype))


@pytest.mark.skipif(availability()["triton"] is not None, reason="needs Triton")
def test_sides_of_kernels() -> None:
    b = put(torch.empty(3, 15))
    asked = {d: kernel_side(d, b, "triton") for d in (4, 14, 15, 16, 17, 33, 64, 65)}
    assert asked == {4: 4, 14: 14, 15: 16, 16: 16, 17: 32, 33: 64, 64: 64, 65: None}
    assert kernel_side(15, b.cpu(), None) is kernel_side(15, b, "eager") is None
    assert kernel_side(15, b.to(torch.complex64), "triton") is None


@pytest.mark.skipif(availability()["triton"] is not None, reason="needs Triton")
@pytest.mark.parametrize("reverse", [False, True])
def test_filled_up(reverse: bool) -> None:
    A, b, init = draw(15, 3)
    want = loop(A, b, init, reverse)
    given: Any = {"axis": 2, "reverse": reverse, "backend": "triton"}
    h, last = matrix_recurrence(put(A), put(b), put(init), return_final=True, **given)
    torch.testing.assert_close(h, put(want))
    torch.testing.assert_close(last, put(want[:, :, 0 if reverse else -1]))
    only = matrix_recurrence(put(A), put(b), put(init), return_final="only", **given)
    torch.testing.assert_close(only, last)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("d", [15, 24, 48, 80])
def test_gradients_on_a_gpu(d: int) -> None:
    A, b, init = draw(d, 40)
    weights = torch.linspace(-1, 1, b.numel(), dtype=b.dtype).view(b.shape)

    def gradients(device: str) -> tuple[Tensor, ...]:
        given = [t.to(device).requires_grad_() for t in (A, b, init)]
        h = matrix_recurrence(*given, axis=2)
        return torch.autograd.grad(h, given, weights.to(device))

    for found, want in zip(gradients("cuda"), gradients("cpu"), strict=True):
        torch.testing.assert_close(found.cpu(), want)


def test_the_walk_under_autocast() -> None:
    torch.manual_seed(0)
    A, b = torch.linalg.qr(torch.randn(20, 20))[0], torch.randn(1, 50, 20)
    want = matrix_recurrence(A, b)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(matrix_recurrence(A, b), want)


@pytest.mark.parametrize("size", [3, 16])
def test_gradients_of_no_steps(size: int) -> None:
    """An empty result depends on A, b and init, with gradients of 0."""
    A, init = (torch.ones(size, *more, requires_grad=True) for more in ([size], []))
    b = torch.zeros(2, 0, size, requires_grad=True)
    h, final = matrix_recurrence(A, b, init, return_final=True)
    assert h.shape == b.shape and torch.equal(final, init.expand(2, size))
    for found in torch.autograd.grad(h.sum(), (A, b, init)):
        assert not found.any()


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_matrices_of_size_0(backend: str) -> None:
    """Results and gradients are empty and have the shapes that torch's products have."""
    A, b = torch.zeros(2, 5, 0, 0, requires_grad=True), torch.zeros(2, 5, 0, requires_grad=True)
    h, final = matrix_recurrence(A, b, b[:, 0], return_final=True, backend=backend)
    last = matrix_recurrence(A, b, return_final="only", backend=backend)
    assert (h.shape, final.shape, last.shape) == (b.shape, (2, 0), (2, 0))
    products = associative_scan(ops.matmul, A, 1, backend=backend)
    both = associative_scan(ops.matrix_affine, (A, b), -1, True, False, backend=backend)
    assert products.shape == A.shape and [t.shape for t in both] == [A.shape, b.shape]
    assert reduce(ops.matmul, A, 1, backend=backend).shape == (2, 0, 0)
    assert windowed(ops.matmul, A[0], 3, 0, backend=backend).shape == (5, 0, 0)
    total = sum(t.sum() for t in (h, final, last, products, *both))
    assert [g.shape for g in torch.autograd.grad(total, (A, b))] == [A.shape, b.shape]
    offsets = torch.tensor([0, 2, 2, 5])
    packed = matrix_recurrence(
        A[0], b[0], axis=0, offsets=offsets, return_final="only", backend=backend
    )
    assert packed.shape == (3, 0)


def test_a_size_of_0_beside_numbers() -> None:
    op = Monoid(
        lambda left, right: (left[0] + right[0], left[1] + right[1] * (1 + right[0].sum())),
        element_ndim=(1, 0), identity=(0.0, 0.0), name="a vector and a number",
    )  # fmt: skip
    x = torch.rand(5, requires_grad=True)
    vectors, sums = associative_scan(op, (torch.zeros(5, 0), x))
    assert vectors.shape == (5, 0)
    torch.testing.assert_close(sums, x.cumsum(0))
    torch.testing.assert_close(torch.autograd.grad(sums.sum(), x)[0], 5 - torch.arange(5.0))
