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
    if isinstance(kernel, ForwardKernel):
        text = ForwardText(kernel).text()
    else:
        body = BackwardText(kernel)
        text = body.text()
        if body.added > 1:
            text = f"{add_all(body.added)}\n\n\n{text}"
    head = header(kernel.operator.name) + (FUNCTIONS if "scalar." in text else "")
    return f"{head}\n\n{text}"


def add_all(count: int) -> str:
    """A function that adds several values to others."""
    left, right = ([f"{side}{i}" for i in range(count)] for side in "ab")
    results = ", ".join(f"{a} + {b}" for a, b in zip(left, right, strict=True))
    return f"@triton.jit\ndef add_all({', '.join([*left, *right])}):\n    return {results}"
