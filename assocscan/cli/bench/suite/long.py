"""`long`: one row, from 2^16 to 2^28 numbers, against torch and CUB (through CuPy)."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch

from ....functional.cumulative import cumsum
from ....functional.recurrence import linear_recurrence
from ..cases import Case, Contender, Settings, contender, powers, short
from ..peers import cub_cumsum


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """Sums of all lengths, recurrences of up to 2^27 (three arrays)."""
    if settings.is_gpu:
        lengths = powers(16, 28, 4 if settings.quick else 1)
    else:
        lengths = powers(16, 22, 3) if settings.quick else powers(16, 25)
    return [
        *(functools.partial(sum_case, settings, n, dtype) for dtype in settings.dtypes
          for n in lengths),
        *(functools.partial(recurrence_case, settings, n) for n in lengths if n < 1 << 28),
    ]  # fmt: skip


def sum_case(settings: Settings, length: int, dtype: torch.dtype) -> Case:
    x = settings.random((length,), dtype)
    contenders = {
        "assocscan": contender(lambda: cumsum(x)),
        "torch.cumsum": contender(lambda: torch.cumsum(x, 0)),
    }
    missing = {}
    if not settings.is_gpu:
        missing["CUB"] = "runs on GPUs only"
    elif importlib.util.find_spec("cupy") is None:
        missing["CUB"] = "CuPy is not installed"
    elif dtype == torch.bfloat16:
        missing["CUB"] = "CuPy has no bfloat16"
    else:
        contenders["CUB"] = Contender(lambda: cub_cumsum(x))
    group = f"sum, {short(dtype)}"
    return Case(group, "L", length, (length,), dtype, 2 * x.nbytes, contenders, missing=missing)


def recurrence_case(settings: Settings, length: int) -> Case:
    a, b = (settings.random((length,)) for _ in range(2))
    ours = contender(lambda: linear_recurrence(a, b, axis=0))
    return Case(
        "recurrence, float32", "L", length, (length,), a.dtype, 3 * a.nbytes, {"assocscan": ours}
    )
