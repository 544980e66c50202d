"""CUDA C++ of scans over vectors."""

from __future__ import annotations

import functools

from ...engines.base.vectors.kernel import BackwardKernel, ForwardKernel, VectorKernel
from .backward_source import BackwardText
from .forward_source import ForwardText
from .text import Widths
from .totals_source import TotalsKernel, TotalsText

Text = ForwardText | BackwardText | TotalsText


def text_of(kernel: VectorKernel, widths: Widths, ragged: bool) -> Text:
    """Raises BackendError for operators that these kernels cannot express."""
    if isinstance(kernel, ForwardKernel):
        return ForwardText(kernel, widths, ragged)
    if isinstance(kernel, BackwardKernel):
        return BackwardText(kernel, widths, ragged)
    assert isinstance(kernel, TotalsKernel)
    return TotalsText(kernel, widths, ragged)


@functools.lru_cache(maxsize=1024)
def source(kernel: VectorKernel, widths: Widths, ragged: bool) -> str:
    """The whole translation unit."""
    return text_of(kernel, widths, ragged).text()
