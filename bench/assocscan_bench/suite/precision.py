"""`precision`: the errors of recurrences and sums against float64 scans of the same inputs.

Over lengths from 2^5 to 2^17 in float32, float16 and bfloat16, for the seeds 3407, 4, 42 and 57:
decays near 1, sums of numbers in [0, 0.25). The error is the largest difference over the largest
value of a seed; that of a 16-bit output holds its rounding. Beside the peers stand ablations: the
same scan with every combination rounded to 16 bits, and the sum with its roundings summed beside
it; a loop of torch operations rounds every step to the dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from assocscan import ops
from assocscan.api.associative_scan import associative_scan
from assocscan.functional.cumulative import cumsum
from assocscan.functional.recurrence import linear_recurrence
from assocscan.monoids.monoid import Monoid

from ..cases import ENGINE, OURS, TORCH, Case, Contender
from ..measuring.reference import reference
from ..peers import recurrence_contenders
from ..settings import Settings, powers, short
from .rnn import RECURRENCE, loop

SEEDS = (3407, 4, 42, 57)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LANES = 16


def rounded_affine(dtype: torch.dtype) -> Monoid:
    """h[t] = a[t] h[t−1] + b[t], rounded to the dtype after every combination."""

    def combine(left: Any, right: Any) -> Any:
        a, b = right[0] * left[0], right[0] * left[1] + right[1]
        return a.to(dtype).to(left[0].dtype), b.to(dtype).to(left[1].dtype)

    return Monoid(combine, identity=(1.0, 0.0), name=f"recurrence rounded to {short(dtype)}",
                  lower=lambda state: state[1])  # fmt: skip


def rounded_sum(dtype: torch.dtype) -> Monoid:
    """The running sum, rounded to the dtype after every combination."""
    return Monoid(lambda left, right: (left + right).to(dtype).to(left.dtype), identity=0.0,
                  name=f"sum rounded to {short(dtype)}")  # fmt: skip


SIXTEEN_BITS = (torch.float16, torch.bfloat16)
ROUNDED_AFFINE = {dtype: rounded_affine(dtype) for dtype in SIXTEEN_BITS}
ROUNDED_SUM = {dtype: rounded_sum(dtype) for dtype in SIXTEEN_BITS}
ROUNDED = "rounded to 16 bits in each combination"


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """Recurrences and sums of every length in every dtype; all seeds are one batch."""
    lengths = settings.lengths_or(powers(5, 9, 2) if settings.quick else powers(5, 17))
    return [
        functools.partial(make, settings, length, dtype)
        for make in (recurrence_case, sum_case)
        for dtype in settings.chosen_dtypes or DTYPES
        for length in lengths
    ]


def drawn(
    settings: Settings, draw: Callable[..., Tensor], length: int, dtype: torch.dtype
) -> Tensor:
    """[seeds, length, lanes], each seed by a generator of its own."""
    seeds = SEEDS[:2] if settings.quick else SEEDS
    shape = (length, LANES)
    parts = [draw(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(parts).to(settings.device, dtype)


def recurrence_case(settings: Settings, length: int, dtype: torch.dtype) -> Case:
    a = 0.9 + 0.1 * drawn(settings, torch.rand, length, torch.float32)
    a, b = a.to(dtype), drawn(settings, torch.randn, length, dtype)
    exact = reference(RECURRENCE, (a, b), 1)
    peers, missing = recurrence_contenders(settings, a, b)
    ways: dict[str, tuple[Callable[[], Any], str]] = {
        "assocscan": (lambda: linear_recurrence(a, b, backend=settings.backend), OURS),
        "loop of torch operations": (lambda: loop(a, b), TORCH),
    }
    if dtype in ROUNDED_AFFINE:
        ways[ROUNDED] = (lambda: associative_scan(ROUNDED_AFFINE[dtype], (a, b), 1), ENGINE)
    contenders = {
        name: Contender(functools.partial(compared, call, exact), kind)
        for name, (call, kind) in ways.items()
    }
    for name, peer in peers.items():
        make = functools.partial(peer_compared, peer, exact)
        contenders[name] = Contender(make, peer.kind, apart=peer.apart)
    return Case(
        f"recurrence, {short(dtype)}", "L", length, tuple(a.shape), dtype, 0, contenders,
        errors=True, missing=missing,
    )  # fmt: skip


def sum_case(settings: Settings, length: int, dtype: torch.dtype) -> Case:
    x = (0.25 * drawn(settings, torch.rand, length, torch.float32)).to(dtype)
    exact = reference(ops.sum, x, 1)
    ways: dict[str, tuple[Callable[[], Any], str]] = {
        "assocscan": (lambda: cumsum(x, 1, backend=settings.backend), OURS),
        "assocscan, compensated": (
            lambda: cumsum(x, 1, compensated=True, backend=settings.backend),
            ENGINE,
        ),
        "torch.cumsum": (lambda: torch.cumsum(x, 1), TORCH),
        "loop of torch operations": (lambda: loop(torch.ones_like(x), x), TORCH),
    }
    if dtype in ROUNDED_SUM:
        ways[ROUNDED] = (lambda: associative_scan(ROUNDED_SUM[dtype], x, 1), ENGINE)
    contenders = {
        name: Contender(functools.partial(compared, call, exact), kind)
        for name, (call, kind) in ways.items()
    }
    return Case(
        f"sum, {short(dtype)}", "L", length, tuple(x.shape), dtype, 0, contenders, errors=True
    )


def compared(call: Callable[[], Any], exact: Tensor) -> Callable[[], list[float]]:
    """A call of the scan that returns its errors."""
    return lambda: errors(call(), exact)


def peer_compared(peer: Contender, exact: Tensor) -> Callable[[], list[float]]:
    call, turned = peer.make(), peer.turned
    return lambda: errors(call() if turned is None else turned(call()), exact)


def errors(got: Tensor, exact: Tensor) -> list[float]:
    """For each seed the largest difference over the largest value; NaN where one is not finite."""
    difference = (got.to(exact.device, exact.dtype) - exact).abs().flatten(1).amax(1)
    found: list[float] = (difference / exact.abs().flatten(1).amax(1)).tolist()
    return found
