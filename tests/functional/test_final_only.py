"""`return_final="only"`: the last state of a recurrence, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import BackendError, linear_recurrence, matrix_recurrence, ops
from assocscan.testing import assert_scan_close, reference_scan

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    wide = torch.complex64 if dtype.is_complex else torch.float64
    return (torch.rand(shape, dtype=wide) * 0.9).to(dtype)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_last_state(dtype: torch.dtype, reverse: bool, backend: str) -> None:
    """As the oracle has it; 16-bit states are float32, as they are beside the outputs."""
    a, b, init = drawn(dtype, 2, 13, 3), drawn(dtype, 2, 13, 3), drawn(dtype, 2, 3)
    for start in (None, init):
        last = linear_recurrence(a, b, start, reverse=reverse, return_final="only", backend=backend)
        _, beside = linear_recurrence(a, b, start, reverse=reverse, return_final=True)
        assert isinstance(last, Tensor) and last.shape == (2, 3) and last.dtype == beside.dtype
        carry = None if start is None else (torch.ones_like(start), start)
        _, (_, want) = reference_scan(
            ops.affine, (a, b), 1, reverse, init=carry, return_final=True
        )  # fmt: skip
        assert_scan_close(last, want, 13)


@pytest.mark.parametrize("length", [0, 1, 2, 64, 1025])
def test_every_length_and_axis(length: int) -> None:
    b = torch.rand(length, 4)
    want = torch.zeros(4)
    for t in range(length):
        want = 0.5 * want + b[t]
    torch.testing.assert_close(linear_recurrence(0.5, b, axis=0, return_final="only"), want)
    torch.testing.assert_close(linear_recurrence(0.5, b.T, axis=-1, return_final="only"), want)


def test_dtypes_promote_as_those_of_the_scan() -> None:
    b = torch.rand(2, 5, 3)
    for a, x, init in ((0.5, b.bfloat16(), None), (torch.rand(3).double(), b, None),
                       (torch.rand(3), b.half(), torch.rand(3))):  # fmt: skip
        last = linear_recurrence(a, x, init, return_final="only")
        _, beside = linear_recurrence(a, x, init, return_final=True)
        assert last.dtype == beside.dtype
        torch.testing.assert_close(last, beside)


@pytest.mark.slow(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_last_state(dtype: torch.dtype) -> None:
    """In a, b and init, for random and for partly zero cotangents."""
    leaves = [drawn(dtype, *s).requires_grad_() for s in ((2, 9, 3), (2, 9, 3), (2, 3))]
    for mask in (1.0, torch.tensor([0.0, 1.0, 0.0])):
        last = linear_recurrence(*leaves, return_final="only")
        _, beside = linear_recurrence(*leaves, return_final=True)
        cotangent = torch.rand(2, 3, dtype=torch.float64).to(last.dtype) * mask
        got = torch.autograd.grad(last, leaves, cotangent)
        want = torch.autograd.grad(beside, leaves, cotangent)
        for g, w, leaf in zip(got, want, leaves, strict=True):
            assert g.dtype == leaf.dtype
            torch.testing.assert_close(g, w)


def test_second_derivatives() -> None:
    a, b = (torch.rand(2, 5, dtype=torch.float64).requires_grad_() for _ in range(2))

    def last(a: Tensor, b: Tensor) -> Tensor:
        return linear_recurrence(a, b, return_final="only")

    assert torch.autograd.gradcheck(last, (a, b))
    assert torch.autograd.gradgradcheck(last, (a, b))


def test_compiled_and_mapped() -> None:
    a, b = torch.rand(4, 6, 3), torch.rand(4, 6, 3)

    def last(a: Tensor, b: Tensor) -> Tensor:
        return linear_recurrence(a, b, axis=-2, return_final="only")

    want = linear_recurrence(a, b, return_final=True)[1]
    torch.testing.assert_close(torch.compile(last, fullgraph=True, backend="eager")(a, b), want)
    torch.testing.assert_close(torch.vmap(last)(a, b), want)


@pytest.mark.thinned(8)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_vectors(dtype: torch.dtype, reverse: bool) -> None:
    A, b, init = drawn(dtype, 2, 7, 3, 3) / 3, drawn(dtype, 2, 7, 3), drawn(dtype, 2, 3)
    last = matrix_recurrence(A, b, init, reverse=reverse, return_final="only")
    _, beside = matrix_recurrence(A, b, init, reverse=reverse, return_final=True)
    assert last.dtype == beside.dtype
    torch.testing.assert_close(last, beside)
    A, b = A.double().requires_grad_(), b.double().requires_grad_()
    last = matrix_recurrence(A, b, reverse=reverse, return_final="only")
    _, beside = matrix_recurrence(A, b, reverse=reverse, return_final=True)
    cotangent = torch.rand_like(last)
    for g, w in zip(torch.autograd.grad(last, (A, b), cotangent),
                    torch.autograd.grad(beside, (A, b), cotangent), strict=True):  # fmt: skip
        torch.testing.assert_close(g, w)


def test_other_words_are_refused() -> None:
    a = torch.rand(2, 3)
    message = 'return_final is .*, expected True or False, or "only" for the last state alone'
    wrong: Any
    for wrong in ("last", None, 2):
        for _ in range(3):  # also once the call is known to the runner
            linear_recurrence(a, a)
            with pytest.raises(TypeError, match=message):
                linear_recurrence(a, a, return_final=wrong)
        with pytest.raises(TypeError, match=message):
            matrix_recurrence(torch.rand(3, 3), a, axis=0, return_final=wrong)


def test_errors_name_the_arguments() -> None:
    a = torch.rand(2, 3)
    with pytest.raises(BackendError, match="cuda"):
        linear_recurrence(a, a, return_final="only", backend="cuda")
    with pytest.raises(IndexError, match="axis 5 is out of range for b"):
        linear_recurrence(a, a, axis=5, return_final="only")
    with pytest.raises(ValueError, match="a has shape"):
        linear_recurrence(torch.rand(4), a, return_final="only")
