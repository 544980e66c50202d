"""`recurrence`: h[t] = a[t] h[t−1] + b[t] at the sizes of the papers on sequential scans.

(B, L, D) = (4, ·, 2048), (8, ·, 1536), (8, ·, 1024), (16, ·, 512), L from 128 to 32768, forward
and forward with backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from assocscan.functional.recurrence import linear_recurrence

from ..cases import OURS, TORCH, Case, Contender, passes_of
from ..measuring.checks import scan_check
from ..peers import recurrence_contenders
from ..settings import BACKWARD, BOTH, FORWARD, PASSES, Settings, powers, short
from .rnn import LONGEST_LOOP, RECURRENCE, differentiable_loop, loop

WIDTHS = ((4, 2048), (8, 1536), (8, 1024), (16, 512))
# Arrays read or written: a, b, h; then a, h, ḡ, da, db.
ARRAYS = {FORWARD: 3, BACKWARD: 5, BOTH: 8}


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """All shapes, dtypes and passes."""
    widths = WIDTHS[:1] if settings.quick else WIDTHS
    lengths = powers(7, 15)
    if settings.quick:
        lengths = powers(7, 15, 4) if settings.is_gpu else [128, 512]
    elif not settings.is_gpu:
        lengths = powers(7, 12)
    return [
        functools.partial(case, settings, batch, length, width, dtype, which)
        for dtype in settings.dtypes
        for which in settings.passes_or(FORWARD, BOTH)
        for batch, length, width in settings.sizes(widths, lengths)
    ]


def case(
    settings: Settings, batch: int, length: int, width: int, dtype: torch.dtype, which: str
) -> Case:
    """Ours along the middle axis and along rows, torch's operations, and the peers."""
    shape = (batch, length, width)
    a, b = settings.decays(shape, dtype), settings.random(shape, dtype)
    cotangent = None if which == FORWARD else torch.rand_like(b)
    peers, missing = recurrence_contenders(settings, a, b, which, cotangent)

    def scan(axis: int) -> Callable[..., Tensor]:
        return lambda a, b: linear_recurrence(a, b, axis=axis, backend=settings.backend)

    def rows() -> Callable[[], object]:
        x, y = a.mT.contiguous(), b.mT.contiguous()
        given = None if cotangent is None else cotangent.mT.contiguous()
        return passes_of(scan(2), (x, y), which, given)

    contenders = {
        "assocscan": Contender(lambda: passes_of(scan(1), (a, b), which, cotangent), OURS),
        "assocscan, rows": Contender(rows, OURS, turned=transposed),
    }
    if not settings.is_gpu and length <= LONGEST_LOOP:
        steps = loop if which == FORWARD else differentiable_loop
        contenders["loop of torch operations"] = Contender(
            lambda: passes_of(steps, (a, b), which, cotangent), TORCH
        )
    group = f"({batch}, L, {width}) {short(dtype)}, {PASSES[which]}"
    return Case(
        group, "L", length, shape, dtype, ARRAYS[which] * a.nbytes, {**contenders, **peers},
        scan_check(RECURRENCE, (a, b), 1, which, cotangent), missing=missing,
    )  # fmt: skip


def transposed(result: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Rows [B, D, L] as [B, L, D]."""
    return result.mT if isinstance(result, Tensor) else tuple(t.mT for t in result)
