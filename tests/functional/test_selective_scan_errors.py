"""Wrong calls of `selective_scan`: what is refused, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from selective_loops import draw

from assocscan import ScanTypeError, ScanValueError, selective_scan


def changed(**arguments: Any) -> Callable[[], Any]:
    """A call with some arguments replaced."""
    return lambda: selective_scan(**{**draw(groups=2), **arguments})  # u [2, 5, 6], N = 2


zeros = torch.zeros
REFUSED = [
    (changed(u=zeros(5, 6)), ScanValueError, r"u has shape \[5, 6\], expected \[batch, L, chann"),
    (changed(u=None), ScanTypeError, "u is None, expected a tensor"),
    (changed(C=None), ScanTypeError, "C is None, expected a tensor"),
    (changed(delta=[1.0]), ScanTypeError, "delta is a list, expected a tensor"),
    (changed(D=1.0), ScanTypeError, "D is a float, expected a tensor"),
    (changed(u=zeros(2, 5, 6).int()), ScanTypeError, r"u has dtype torch.int32.*: u.float\(\)"),
    (changed(A=zeros(6, 2) * 1j), ScanTypeError, "A has dtype torch.complex64, expected float16"),
    (changed(delta=zeros(2, 6, 5)), ScanValueError, r"delta has shape \[2, 6, 5\], expected \[2, "),
    (changed(z=zeros(2, 5, 1)), ScanValueError, r"z has shape \[2, 5, 1\], expected \[2, 5, 6\]"),
    (changed(A=zeros(4, 2)), ScanValueError, r"A has shape \[4, 2\], expected \[6, N\] with N ≥ 1"),
    (changed(A=zeros(6, 0)), ScanValueError, r"A has shape \[6, 0\], expected \[6, N\] with N ≥ 1"),
    (changed(A=zeros(6)), ScanValueError, r"A has shape \[6\], expected \[6, N\]"),
    (changed(D=zeros(6, 1)), ScanValueError, r"D has shape \[6, 1\], expected \[6\], the chan"),
    (changed(delta_bias=zeros(1)), ScanValueError, r"delta_bias has shape \[1\], expected \[6\]"),
    (changed(B=zeros(2, 5, 3)), ScanValueError, r"B has shape \[2, 5, 3\], expected \[2, 5, 2\]"),
    (changed(C=zeros(2, 4, 2)), ScanValueError, r"C has .*\(batch and L of u, N of A\)$"),
    (changed(C=zeros(2, 2, 5)), ScanValueError, r"C has shape \[2, 2, 5\], expected .*: C\.mT$"),
    (changed(B=zeros(2, 3, 2, 5)), ScanValueError, r"B has shape .*: B\.movedim\(-1, 1\)$"),
    (changed(B=zeros(5, 2)), ScanValueError, r"B has shape \[5, 2\], expected \[2, 5, 2\]"),
    (changed(B=zeros(2, 5, 4, 2)), ScanValueError, r"B has 4 groups .* do not divide the 6 chann"),
    (changed(C=zeros(2, 5, 0, 2)), ScanValueError, "C has 0 groups"),
    (changed(C=zeros(2, 5, 3, 2)), ScanValueError, "B has 2 groups but C has 3"),
    (changed(init=zeros(2, 6)), ScanValueError, r"init has shape \[2, 6\], expected \[2, 6, 2\]"),
    (
        changed(offsets=torch.tensor([0, 2, 5]), init=zeros(2, 6, 2)), ScanValueError,
        r"init has shape \[2, 6, 2\], expected \[2, 2, 6, 2\], \[S, batch, channels, N\]",
    ),
    (changed(offsets=torch.tensor([0, 4]), init=None), ScanValueError, r"offsets\[-1\] is 4, but"),
    (changed(offsets=[0, 5], init=None), ScanTypeError, "offsets must be a tensor, got list"),
    (changed(delta_softplus="yes"), ScanTypeError, "delta_softplus is 'yes', expected True or F"),
    (changed(return_final=2), ScanTypeError, "return_final is 2, expected True or False"),
    (changed(z=zeros(2, 5, 6, device="meta")), ScanValueError, "z is on meta, but u is on cpu"),
    (changed(cu_seqlens=None), ScanTypeError, "argument 'cu_seqlens': pass offsets="),
]  # fmt: skip


@pytest.mark.parametrize("call,error,words", REFUSED)
def test_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_channels_first_is_explained() -> None:
    given = draw(init=False, optional=())
    u = given["u"].mT.contiguous()
    with pytest.raises(ScanValueError, match=r"expected \[5, N\].*passed as their views u\.mT"):
        selective_scan(**{**given, "u": u, "delta": u})
