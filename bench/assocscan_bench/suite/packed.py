"""`packed`: scans of many sequences packed into one array, beside one sequence of as many elements.

16 million numbers in all, in sequences whose lengths are drawn from 0 to twice their mean: from 16
long ones to a million of 0 to 32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from assocscan import ops
from assocscan.api.associative_scan import associative_scan
from assocscan.api.reduce import reduce
from assocscan.functional.packing.padding import offsets_of
from assocscan.monoids.monoid import Monoid

from ..cases import OTHER, OURS, Case, Contender, contender
from ..measuring.checks import Check, against
from ..settings import SEED, Settings, powers, short

ELEMENTS, SEQUENCES = 1 << 24, powers(4, 20, 8)
QUICK_ELEMENTS, QUICK_SEQUENCES = 1 << 12, powers(4, 8, 4)
SCANS: dict[str, tuple[Callable[..., Any], Monoid]] = {
    "sum": (associative_scan, ops.sum),
    "logaddexp": (associative_scan, ops.logaddexp),
    "total of each sequence": (reduce, ops.sum),
}


def cases(settings: Settings) -> list[Callable[[], Case]]:
    counts = QUICK_SEQUENCES if settings.quick else SEQUENCES
    return [
        functools.partial(case, settings, name, count, dtype)
        for dtype in settings.chosen_dtypes or (torch.float32,)
        for name in SCANS
        for count in counts
    ]


def case(settings: Settings, name: str, count: int, dtype: torch.dtype) -> Case:
    scan, op = SCANS[name]
    mean = (QUICK_ELEMENTS if settings.quick else ELEMENTS) // count
    generator = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(0, 2 * mean + 1, (count,), generator=generator)
    offsets = offsets_of(lengths).to(settings.device)
    x = settings.random((int(offsets[-1]),), dtype)
    options = {"backend": settings.backend}
    written = x.nbytes if scan is associative_scan else count * x.itemsize
    contenders = {
        "assocscan": contender(lambda: scan(op, x, 0, offsets=offsets, **options), OURS),
        "one sequence": Contender(
            lambda: lambda: scan(op, x, 0, **options), OTHER, checked=False,
            bytes=x.nbytes + (x.nbytes if scan is associative_scan else x.itemsize),
        ),
    }  # fmt: skip
    return Case(
        f"{name}, {short(dtype)}", "sequences", count, (x.shape[0],), dtype,
        x.nbytes + written + offsets.nbytes, contenders,
        check_of(op, x, offsets, scan is reduce, 2 * mean),
    )  # fmt: skip


def check_of(op: Monoid, x: Tensor, offsets: Tensor, is_total: bool, longest: int) -> Check:
    """Against the differences of sums of all numbers, or of their exponentials, in float64."""

    def expected() -> Tensor:
        wide = x.double()
        sums = torch.cat(
            [wide.new_zeros(1), (wide.exp() if op is ops.logaddexp else wide).cumsum(0)]
        )
        before = sums[offsets]
        if is_total:
            return before.diff()
        found = sums[1:] - before[:-1].repeat_interleave(offsets.diff())
        return found.log() if op is ops.logaddexp else found

    return against(expected, x.dtype, longest)
