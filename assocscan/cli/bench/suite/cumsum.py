"""`cumsum`: against torch.cumsum along the middle axis, over lengths, widths and batches."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ....functional.cumulative import cumsum
from ..cases import Case, Settings, contender, powers, short


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """(4, L, 512), (4, 2048, D) and (B, 2048, 512)."""
    step = 2 if settings.quick else 1
    length = 512 if settings.quick and not settings.is_gpu else 2048
    sizes: list[tuple[str, str, int, tuple[int, int, int]]] = [
        *(("(4, L, 512)", "L", n, (4, n, 512)) for n in powers(9, 13, step)),
        *((f"(4, {length}, D)", "D", n, (4, length, n)) for n in powers(6, 11, step)),
        *((f"(B, {length}, 512)", "B", n, (n, length, 512)) for n in powers(0, 5, step)),
    ]
    return [
        functools.partial(case, settings, f"{group} {short(dtype)}", name, x, shape, dtype)
        for dtype in settings.dtypes
        for group, name, x, shape in sizes
    ]


def case(
    settings: Settings,
    group: str,
    x_name: str,
    x: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Case:
    t = settings.random(shape, dtype)
    contenders = {
        "assocscan": contender(lambda: cumsum(t, 1)),
        "torch.cumsum": contender(lambda: torch.cumsum(t, 1)),
    }
    return Case(group, x_name, x, shape, dtype, 2 * t.nbytes, contenders)
