"""The records of a suite as a table in the terminal."""

from __future__ import annotations

from .records import Record


def table(records: list[Record]) -> str:
    """One block per group, a line for each contender and place on its axis; then who is missing."""
    lines = []
    for group, members in grouped([r for r in records if not r.note]).items():
        lines.append(f"\n  {group}")
        for r in members:
            place = f"{r.x_name} {int(r.x)}" if r.x else r.x_name
            lines.append(f"    {place:<14} {r.contender:<44} {outcome(r)}")
    missing = {(r.contender, r.note): None for r in records if r.note}
    lines += [f"  without {name}: {reason}" for name, reason in missing]
    return "\n".join(lines)


def grouped(records: list[Record]) -> dict[str, list[Record]]:
    """The records by group, in the order in which the groups come."""
    groups: dict[str, list[Record]] = {}
    for r in records:
        groups.setdefault(r.group, []).append(r)
    return groups


def outcome(r: Record) -> str:
    """The error, or time and fraction of copy."""
    if r.ms is None:
        return f"error {r.error:.2e}"
    spread = f"({time(r.ms_low or 0)} – {time(r.ms_high or 0)})"
    return f"{time(r.ms):>10}  {spread:<24} {r.of_copy:.2f} of copy"


def time(ms: float) -> str:
    return f"{1e3 * ms:.1f} µs" if ms < 1 else f"{ms:.2f} ms"
