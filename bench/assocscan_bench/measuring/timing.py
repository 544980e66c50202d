"""Timing of calls: medians with quantiles, on GPUs by `do_bench`, on the CPU by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..settings import Settings

QUANTILES = (0.5, 0.2, 0.8)
BY_EVENTS, BY_CLOCK, QUICK = 100, 250, 20  # milliseconds for which a call is repeated
WARM_UP = 4  # the warm-up before it takes as long, divided by this


class Times(NamedTuple):
    """Milliseconds: the median, and the quantiles at 0.2 and 0.8."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """The distance of the quantiles over the median."""
        return (self.high - self.low) / self.median


class Timer:
    """Times calls on one device."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def measure(self, call: Callable[[], Any], wall: bool = False) -> Times:
        """The times of a call that ran before, and so is compiled."""
        if self.settings.is_gpu and not wall:
            return self.on_gpu(call)
        return self.by_clock(call)

    def on_gpu(self, call: Callable[[], Any]) -> Times:
        """By CUDA events, the L2 cache overwritten before each call."""
        from triton.testing import do_bench

        repeat = self.repeat(BY_EVENTS)
        return Times(*do_bench(call, max(repeat // WARM_UP, 1), repeat, quantiles=list(QUANTILES)))

    def by_clock(self, call: Callable[[], Any]) -> Times:
        """At least 9 calls (5 where quick), at most 1000."""
        least, budget = 5 if self.settings.quick else 9, self.repeat(BY_CLOCK) / 1e3
        times: list[float] = []
        while len(times) < least or (sum(times) < budget and len(times) < 1000):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return quantiles([1e3 * t for t in times])

    def repeat(self, usual: int) -> int:
        """Milliseconds for which a call is repeated: what was asked for, or what is usual."""
        return self.settings.repeat or (QUICK if self.settings.quick else usual)

    def copy(self, count: int) -> Times:
        """A copy that moves `count` bytes, half read and half written, into a fresh output."""
        source = torch.ones(max(count // 2, 1), dtype=torch.uint8, device=self.settings.device)

        def call() -> torch.Tensor:
            return torch.empty_like(source).copy_(source)

        call()
        return self.measure(call)


def quantiles(times: list[float]) -> Times:
    """Median and quantiles of at least one time."""
    ordered = sorted(times)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in QUANTILES[1:])
    return Times(statistics.median(ordered), low, high)
