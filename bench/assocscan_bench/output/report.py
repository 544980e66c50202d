"""The records of a suite as tables in the terminal."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator

from ..cases import OURS, PEER, TORCH
from .records import Record

MOST_SPREAD = 0.3
# No scan is that much faster than a copy of its bytes: the most that was measured on an idle
# machine is 3.6, on a CPU, whose copy meets more page faults.
MOST_OF_COPY = 5.0


def rows(records: Iterable[Record]) -> Iterator[str]:
    """A line for each figure, as soon as it is there, and one where another group begins."""
    group = None
    for r in records:
        if not r.is_measured:
            continue
        if r.group != group:
            group = r.group
            yield f"\n  {group}"
        yield f"    {place(r):<18} {r.contender:<34} {outcome(r)}"


def notes(records: list[Record]) -> str:
    """Below the rows: who is missing, and what the marks mean."""
    lines = without(records)
    varying = [r for r in records if varies(r.spread) or varies(r.copy_spread)]
    if varying:
        timed = sum(r.ms is not None for r in records)
        lines.append(
            f"  ± marks {len(varying)} of {timed} figures whose quantiles 0.2 and 0.8, or those of "
            f"their copy, are more than {MOST_SPREAD:.0%} of the median apart: the machine is "
            "busy, or the call too short"
        )
    slow = sum(map(is_copy_slow, records))
    if slow:
        lines.append(
            f"  slow copy marks {slow} figures that are more than {MOST_OF_COPY:g} of copy: other "
            "programs held the copy up, and the fraction says nothing"
        )
    return "".join(f"{line}\n" for line in lines)


def without(records: list[Record]) -> list[str]:
    """Who could not be measured and why; in how many cases, where it could be in others."""
    missing = Counter((r.contender, r.note) for r in records if not r.is_measured)
    cases = Counter(r.contender for r in records)
    measured = {r.contender for r in records if r.is_measured}
    return [
        f"  without {name}{f' in {n} of {cases[name]} cases' if name in measured else ''}: {why}"
        for (name, why), n in missing.items()
    ]


def place(r: Record) -> str:
    return f"{r.x_name} {int(r.x)}" if r.x else r.x_name


def grouped(records: list[Record]) -> dict[str, list[Record]]:
    """The records by group, in the order in which the groups come."""
    groups: dict[str, list[Record]] = {}
    for r in records:
        groups.setdefault(r.group, []).append(r)
    return groups


def outcome(r: Record) -> str:
    """The error, or the time with the fractions of limits, and what is to be said of them."""
    if r.ms is None:
        return f"error {r.error:.1e}  ({r.error_low or 0:.1e} – {r.error_high or 0:.1e})"
    spread = f"({time(r.ms_low or 0)} – {time(r.ms_high or 0)})"
    columns = f"{r.of_copy:.2f} of copy"
    if r.memory is not None:
        columns += f"  {r.memory / 2**20:>9.1f} MiB"
    if r.of_exponentials is not None:
        columns += f"  {r.of_exponentials:.2f} of exponentials"
    if r.of_limit is not None:
        columns += f"  {r.of_limit:.2f} of {r.limit}"
    if r.error is not None:
        columns += f"  error {r.error:.1e}"
    marks = []
    if varies(r.spread):
        marks.append(f"± {r.spread:.0%}")
    if varies(r.copy_spread):
        marks.append(f"copy ± {r.copy_spread:.0%}")
    if is_copy_slow(r):
        marks.append("slow copy")
    if r.note:
        marks.append(r.note)
    line = f"{time(r.ms):>10}  {spread:<24} {columns}  {'; '.join(marks)}"
    return line.rstrip()


def varies(spread: float | None) -> bool:
    return spread is not None and spread > MOST_SPREAD


def is_copy_slow(r: Record) -> bool:
    return r.of_copy is not None and r.of_copy > MOST_OF_COPY


def is_flagged(r: Record) -> bool:
    """Whether the table marks it: means leave it out, and plots show it hollow or pale."""
    return varies(r.spread) or varies(r.copy_spread) or is_copy_slow(r)


def time(ms: float) -> str:
    return f"{1e3 * ms:.1f} µs" if ms < 1 else f"{ms:.2f} ms"


def speed_ups(records: list[Record]) -> str:
    """How many times faster assocscan is than torch and than the best peer, case by case, and the
    geometric means; empty where a suite has no case with one of these. Wrong results do not count.
    Ratios of which a side is flagged are marked with ±, and do not enter the means.
    """
    cases: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        if r.ms is not None and not r.is_wrong:
            cases.setdefault((r.group, place(r)), []).append(r)
    lines: list[str] = []
    ratios: dict[str, list[float]] = {TORCH: [], PEER: []}
    left_out = dict.fromkeys(ratios, 0)
    for (group, where), members in cases.items():
        ours = next((r for r in members if r.kind == OURS), None)
        if ours is None or not any(r.kind in ratios for r in members):
            continue
        cells = []
        for kind, found in ratios.items():
            best = min((r for r in members if r.kind == kind), key=milliseconds, default=None)
            if best is None:
                cells.append("-")
                continue
            ratio = milliseconds(best) / milliseconds(ours)
            if is_flagged(ours) or is_flagged(best):
                left_out[kind] += 1
                cells.append(f"± {ratio:.2f}x {best.contender}")
            else:
                found.append(ratio)
                cells.append(f"{ratio:.2f}x {best.contender}")
        lines.append(f"    {group + ', ' + where:<52} {cells[0]:<36} {cells[1]}")
    if not lines:
        return ""
    means = [mean(found, left_out[kind]) for kind, found in ratios.items()]
    lines.append(f"    {'geometric mean':<52} {means[0]:<36} {means[1]}")
    if any(left_out.values()):
        lines.append("  ± marks ratios of figures that are marked above; the means leave them out")
    return "\n".join([f"\n  {'times faster than':<54} {'torch':<36} the best peer", *lines])


def mean(ratios: list[float], left_out: int) -> str:
    """The geometric mean, and of how many ratios it is where some are left out."""
    text = f"{statistics.geometric_mean(ratios):.2f}x" if ratios else "-"
    return f"{text} ({len(ratios)} of {len(ratios) + left_out})" if left_out else text


def milliseconds(r: Record) -> float:
    assert r.ms is not None
    return r.ms
