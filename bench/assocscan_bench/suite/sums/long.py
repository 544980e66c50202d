"""`long`: one row, from 2^16 to 2^28 numbers, against torch and CUB (through CuPy)."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch

from assocscan import ops
from assocscan.functional.cumulative import cumsum
from assocscan.functional.recurrence import linear_recurrence

from ...cases import OURS, PEER, TORCH, Case, Contender, contender
from ...measuring.checks import scan_check
from ...peers import cub_cumsum
from ...settings import Settings, powers, short
from ..rnn import RECURRENCE


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """Sums of all lengths, recurrences of up to 2^27 (three arrays)."""
    if settings.is_gpu:
        usual = powers(16, 28, 4 if settings.quick else 1)
    else:
        usual = powers(16, 22, 3) if settings.quick else powers(16, 25)
    lengths = settings.lengths_or(usual)
    return [
        *(functools.partial(sum_case, settings, n, dtype) for dtype in settings.dtypes
          for n in lengths),
        *(functools.partial(recurrence_case, settings, n, dtype) for dtype in settings.dtypes[:1]
          for n in lengths if n < 1 << 28),
    ]  # fmt: skip


def sum_case(settings: Settings, length: int, dtype: torch.dtype) -> Case:
    x = settings.random((length,), dtype)
    contenders = {
        "assocscan": contender(lambda: cumsum(x, backend=settings.backend), OURS),
        "torch.cumsum": contender(lambda: torch.cumsum(x, 0), TORCH),
    }
    missing = {}
    if not settings.is_gpu:
        missing["CUB"] = "runs on GPUs only"
    elif importlib.util.find_spec("cupy") is None:
        missing["CUB"] = "CuPy is not installed"
    elif dtype == torch.bfloat16:
        missing["CUB"] = "CuPy has no bfloat16"
    else:
        contenders["CUB"] = Contender(lambda: cub_cumsum(x), PEER)
    return Case(
        f"sum, {short(dtype)}", "L", length, (length,), dtype, 2 * x.nbytes, contenders,
        scan_check(ops.sum, x, 0), missing=missing,
    )  # fmt: skip


def recurrence_case(settings: Settings, length: int, dtype: torch.dtype) -> Case:
    a, b = (settings.random((length,), dtype) for _ in range(2))
    ours = contender(lambda: linear_recurrence(a, b, axis=0, backend=settings.backend), OURS)
    return Case(
        f"recurrence, {short(dtype)}", "L", length, (length,), dtype, 3 * a.nbytes,
        {"assocscan": ours}, scan_check(RECURRENCE, (a, b), 0),
    )  # fmt: skip
