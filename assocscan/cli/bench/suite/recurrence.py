"""`recurrence`: h[t] = a[t] h[t−1] + b[t] at the sizes of the papers on sequential scans.

(B, L, D) = (4, ·, 2048), (8, ·, 1536), (8, ·, 1024), (16, ·, 512), L from 128 to 32768, forward
and forward with backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ....functional.recurrence import linear_recurrence
from ..cases import Case, Contender, Settings, contender, forward_backward, powers, short
from ..peers import recurrence_contenders

WIDTHS = ((4, 2048), (8, 1536), (8, 1024), (16, 512))
FORWARD, BOTH = 3, 8  # arrays read or written: a, b, h; then a, h, ḡ, da, db


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """All shapes, dtypes and passes."""
    widths = WIDTHS[:1] if settings.quick else WIDTHS
    lengths = powers(7, 15)
    if settings.quick:
        lengths = powers(7, 15, 4) if settings.is_gpu else [128, 512]
    elif not settings.is_gpu:
        lengths = powers(7, 12)
    return [
        functools.partial(case, settings, batch, length, width, dtype, backward)
        for dtype in settings.dtypes
        for backward in (False, True)
        for batch, width in widths
        for length in lengths
    ]


def case(
    settings: Settings, batch: int, length: int, width: int, dtype: torch.dtype, backward: bool
) -> Case:
    """Ours along the middle axis and along rows, and the peers."""
    shape = (batch, length, width)
    a, b = settings.random(shape, dtype), settings.random(shape, dtype)
    peers, missing = recurrence_contenders(settings, a, b, backward)

    def rows() -> Callable[[], object]:
        x, y = a.mT.contiguous(), b.mT.contiguous()
        if backward:
            return forward_backward(lambda a, b: linear_recurrence(a, b, axis=2), (x, y))
        return lambda: linear_recurrence(x, y, axis=2)

    ours = contender(lambda: linear_recurrence(a, b))
    if backward:
        ours = Contender(lambda: forward_backward(linear_recurrence, (a, b)))
    passes = "forward and backward" if backward else "forward"
    group = f"({batch}, L, {width}) {short(dtype)}, {passes}"
    return Case(
        group, "L", length, shape, dtype, (BOTH if backward else FORWARD) * a.nbytes,
        {"assocscan": ours, "assocscan, rows": Contender(rows), **peers}, missing=missing,
    )  # fmt: skip
