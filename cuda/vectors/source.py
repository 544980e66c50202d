"""CUDA C++ of scans over vectors."""

from __future__ import annotations

import functools

from ...engines.base.vectors.kernel import BackwardKernel, ForwardKernel
from .backward_source import BackwardText
from .forward_source import ForwardText
from .text import Widths


def text_of(
    kernel: ForwardKernel | BackwardKernel, widths: Widths, ragged: bool
) -> ForwardText | BackwardText:
    """Raises BackendError for operators that these kernels cannot express."""
    if isinstance(kernel, ForwardKernel):
        return ForwardText(kernel, widths, ragged)
    return BackwardText(kernel, widths, ragged)


@functools.lru_cache(maxsize=1024)
def source(kernel: ForwardKernel | BackwardKernel, widths: Widths, ragged: bool) -> str:
    """The whole translation unit."""
    return text_of(kernel, widths, ragged).text()
