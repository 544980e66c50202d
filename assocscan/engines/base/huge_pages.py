"""Allocation of large CPU outputs on huge pages, where Linux offers them.

A new output of 64 MiB causes 16 384 page faults with pages of 4 KiB. On a virtual machine they take
several times as long as the scan (25 ms and 5 ms for a sum of (4, 8192, 512) float32 on the 2-core
build machine). Most distributions give huge pages of 2 MiB only to memory that was marked by
`madvise`; with them the same output causes 32 page faults.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch

HUGE_PAGE = 1 << 21
# Smaller buffers contain at most one whole huge page and gain nothing.
MIN_BYTES = 2 * HUGE_PAGE
MADV_HUGEPAGE = 14


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    found: Callable[[int, int, int], int] = function
    return found


def empty_strided(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """`torch.empty_strided` on the CPU, with `madvise` for the huge pages that lie inside of it. If
    the system refuses, ordinary pages are used."""
    t = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    if t.untyped_storage().nbytes() >= MIN_BYTES:
        madvise = _madvise()
        if madvise is not None:
            begin = -(-t.data_ptr() // HUGE_PAGE) * HUGE_PAGE
            end = (t.data_ptr() + t.untyped_storage().nbytes()) // HUGE_PAGE * HUGE_PAGE
            madvise(begin, end - begin, MADV_HUGEPAGE)
    return t
