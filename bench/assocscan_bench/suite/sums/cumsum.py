"""`cumsum`: against torch.cumsum along the middle axis, over lengths, widths and batches."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from assocscan import ops
from assocscan.functional.cumulative import cumsum

from ...cases import OURS, TORCH, Case, Contender, passes_of
from ...measuring.checks import scan_check
from ...settings import BACKWARD, BOTH, FORWARD, PASSES, Settings, powers, short

ARRAYS = {FORWARD: 2, BACKWARD: 2, BOTH: 4}  # x, y; ḡ, dx


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """(4, L, 512), (4, 2048, D) and (B, 2048, 512)."""
    return [
        functools.partial(case, settings, f"{group} {short(dtype)}{said(which)}", name, x, shape,
                          dtype, which)
        for dtype in settings.dtypes
        for which in settings.passes_or(FORWARD)
        for group, name, x, shape in sizes(settings)
    ]  # fmt: skip


def sizes(settings: Settings) -> list[tuple[str, str, int, tuple[int, int, int]]]:
    """(group, the name of the size that varies, that size, shape)."""
    if settings.shapes or settings.lengths:
        found = settings.sizes([(4, 512)], [])
        return [(f"({b}, L, {d})", "L", n, (b, n, d)) for b, n, d in found]
    step = 2 if settings.quick else 1
    length = 512 if settings.quick and not settings.is_gpu else 2048
    return [
        *(("(4, L, 512)", "L", n, (4, n, 512)) for n in powers(9, 13, step)),
        *((f"(4, {length}, D)", "D", n, (4, length, n)) for n in powers(6, 11, step)),
        *((f"(B, {length}, 512)", "B", n, (n, length, 512)) for n in powers(0, 5, step)),
    ]


def said(which: str) -> str:
    return "" if which == FORWARD else f", {PASSES[which]}"


def case(
    settings: Settings,
    group: str,
    x_name: str,
    x: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    which: str = FORWARD,
) -> Case:
    t = settings.random(shape, dtype)
    cotangent = None if which == FORWARD else torch.rand_like(t)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return cumsum(x, 1, backend=settings.backend)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x, 1)

    contenders = {
        "assocscan": Contender(lambda: passes_of(ours, (t,), which, cotangent), OURS),
        "torch.cumsum": Contender(lambda: passes_of(theirs, (t,), which, cotangent), TORCH),
    }
    check = scan_check(ops.sum, t, 1, which, cotangent)
    return Case(group, x_name, x, shape, dtype, ARRAYS[which] * t.nbytes, contenders, check)
