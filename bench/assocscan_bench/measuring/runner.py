"""Runs the cases of a suite: every contender checked, then timed beside a copy of its bytes."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..cases import Case, Contender
from ..output.records import Record
from ..settings import short
from .checks import Verdict
from .device_limits import exponentials_ms, peak_memory
from .operation_counts import nearest_limit
from .own_process import OwnProcess, said
from .timing import Timer, Times

Copies = dict[int, Times]  # of one case, by the bytes that move


def run(suite: str, makers: list[Callable[[], Case]], timer: Timer) -> Iterator[Record]:
    """One record for each contender of each case, and for each that is missing."""
    apart: dict[str, OwnProcess] = {}
    try:
        yield from records_of(suite, makers, timer, apart)
    finally:
        for process in apart.values():
            process.close()


def records_of(
    suite: str, makers: list[Callable[[], Case]], timer: Timer, apart: dict[str, OwnProcess]
) -> Iterator[Record]:
    """The records; `apart` keeps the processes of contenders that have one of their own."""
    for make in progress(makers, suite):
        case = make()
        copies: Copies = {}
        for name, reason in case.missing.items():
            yield record(suite, case, name, note=reason)
        for name, contender in case.contenders.items():
            measure = errors_of if case.errors else times_of
            if contender.apart:
                if name not in apart:
                    apart[name] = OwnProcess(name, timer.settings, measure)
                found = apart[name].run(make, copies)
            else:
                try:
                    found = measure(case, contender, timer, copies)
                except Exception as error:  # of any peer or compiler: the others are still measured
                    found = {"note": said(error)}
            yield record(suite, case, name, kind=contender.kind, **found)
        del case
        if timer.settings.is_gpu:
            torch.cuda.empty_cache()


def errors_of(case: Case, contender: Contender, timer: Timer, copies: Copies) -> dict[str, Any]:
    """The errors that the call returns, one for each seed: the median, least and largest."""
    errors = [float(e) for e in contender.make()()]
    return {"error": statistics.median(errors), "error_low": min(errors),
            "error_high": max(errors)}  # fmt: skip


def times_of(case: Case, contender: Contender, timer: Timer, copies: Copies) -> dict[str, Any]:
    """The error of the first result, then the times, beside those of the copy."""
    call = contender.make()
    verdict = checked(case, contender, call())
    count = case.bytes if contender.bytes is None else contender.bytes
    if count not in copies:
        copies[count] = timer.copy(count)
    copy, times = copies[count], timer.measure(call, contender.wall)
    found: dict[str, Any] = {
        "ms": times.median, "ms_low": times.low, "ms_high": times.high, "bytes": count,
        "copy_ms": copy.median, "of_copy": copy.median / times.median, "spread": times.spread,
        "copy_spread": copy.spread,
    }  # fmt: skip
    device = timer.settings.device
    if case.memory and device.type == "cuda":
        found["memory"] = peak_memory(call, device)
    least = exponentials_ms(case.exponentials, device)
    if least is not None:
        found["of_exponentials"] = least / times.median
    limit = nearest_limit(case.arithmetic, copy.median, device)
    if limit is not None:
        found |= {"limit": limit.name, "of_limit": limit.ms / times.median}
    if verdict is not None:
        found["error"] = verdict.error if math.isfinite(verdict.error) else None
        if verdict.is_wrong:
            found |= {"is_wrong": True, "note": wrong(verdict)}
    return found


def checked(case: Case, contender: Contender, result: Any) -> Verdict | None:
    """How far a result is from the right one; None where there is none to compare with."""
    check = contender.check or case.check
    if check is None or not contender.checked:
        return None
    return check(result if contender.turned is None else contender.turned(result))


def wrong(verdict: Verdict) -> str:
    if verdict.error == float("inf"):
        return "wrong: other shapes, integers, NaN or infinities than the reference"
    return f"wrong: error {verdict.error:.1e}, at most {verdict.bound:.1e} expected"


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
