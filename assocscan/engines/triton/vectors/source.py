"""Triton source of scans over vectors."""

from __future__ import annotations

import functools

from ...base.vectors.kernel import BackwardKernel, ForwardKernel
from ..source import FUNCTIONS, header
from .backward_source import BackwardText
from .forward_source import ForwardText


@functools.lru_cache(maxsize=1024)
def source(kernel: ForwardKernel | BackwardKernel) -> str:
    """The whole module: the kernel `scan`."""
    of_kernel = ForwardText(kernel) if isinstance(kernel, ForwardKernel) else BackwardText(kernel)
    text = of_kernel.text()
    head = header(kernel.operator.name) + (FUNCTIONS if "scalar." in text else "")
    return f"{head}\n\n{text}"
