"""Runs the cases of a suite: every contender timed, beside a copy of the same bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .cases import Case, Contender, short
from .records import Record
from .timing import Timer


def run(suite: str, makers: list[Callable[[], Case]], timer: Timer) -> Iterator[Record]:
    """One record for each contender of each case, and for each that is missing."""
    for make in progress(makers, suite):
        case = make()
        for name, reason in case.missing.items():
            yield record(suite, case, name, note=reason)
        for name, contender in case.contenders.items():
            yield measured(suite, case, name, contender, timer)
        del case
        if timer.settings.is_gpu:
            torch.cuda.empty_cache()


def measured(suite: str, case: Case, name: str, contender: Contender, timer: Timer) -> Record:
    """One contender's times or error; what went wrong where it could not run."""
    try:
        if case.errors:
            return record(suite, case, name, error=float(contender.make()()))
        count = case.bytes if contender.bytes is None else contender.bytes
        copy = timer.copy(count).median
        times = timer.measure(contender)
    except Exception as reason:  # of any peer or compiler: the others are still measured
        note = f"{type(reason).__name__}: {reason}".splitlines()[0]
        return record(suite, case, name, note=note)
    return record(
        suite, case, name, ms=times.median, ms_low=times.low, ms_high=times.high, bytes=count,
        copy_ms=copy, of_copy=copy / times.median,
    )  # fmt: skip


def record(suite: str, case: Case, name: str, **found: Any) -> Record:
    shape = " x ".join(map(str, case.shape))
    return Record(suite, case.group, case.x_name, case.x, shape, short(case.dtype), name, **found)


def progress(makers: list[Callable[[], Case]], suite: str) -> Iterable[Callable[[], Case]]:
    """With a progress bar on stderr, where tqdm is installed and somebody watches."""
    if not sys.stderr.isatty():
        return makers
    try:
        from tqdm import tqdm
    except ImportError:
        return makers
    bar: Iterable[Callable[[], Case]] = tqdm(makers, desc=suite, unit="case")
    return bar
