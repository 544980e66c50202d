"""`Plan`: what a scan will run, and why, for `explain`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .spec import Name

_LEAF = re.compile(r"\b(input|output|init|final|boundary) (\d+)\b")


@dataclass(frozen=True)
class Plan:
    """What `explain` returns; printing it gives one line per field.

    normal_form: (outer, length, inner) after dimensions were joined.
    engine, tile, grid: what runs it, on tiles of which shape, by how many threads.
    bytes_moved: each input read once, each output written once.
    why: the reason for the engine and for the way in which it goes through memory.
    gradient: the engine of the backward pass and the reason, where an input requires a gradient.
    commands: what a call with these arguments runs, in this order.
    """

    operator: str
    normal_form: tuple[int, int, int]
    engine: str
    tile: str
    grid: str
    bytes_moved: int
    why: str
    gradient: str = ""
    commands: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        outer, length, inner = self.normal_form
        rows = {
            "operator": self.operator,
            "normal form": f"[outer {outer}, length {length}, inner {inner}]",
            "engine": self.engine,
            "tile": self.tile,
            "grid": self.grid,
            "bytes moved": f"{self.bytes_moved:,}",
            "why": self.why,
        }
        if self.gradient:
            rows["gradient"] = self.gradient
        lines = [f"{name:<12} {value}" for name, value in rows.items()]
        for k, command in enumerate(self.commands):
            lines.append(f"{'' if k else 'commands':<12} {command}")
        return "\n".join(lines)

    def with_names(self, names: Mapping[Name, str]) -> Plan:
        """The leaves by the names that the caller knows: "xs[1]" for "input 1"."""

        def named(text: str) -> str:
            return _LEAF.sub(lambda m: names.get((m[1], int(m[2])), m[0]), text)

        return replace(
            self, why=named(self.why), commands=tuple(named(line) for line in self.commands)
        )
