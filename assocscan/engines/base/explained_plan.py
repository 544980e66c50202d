"""`Plan`, the result of `explain`: how a scan is run, and why. Engines fill it, `str` prints it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .scan_spec import Name

_LEAF = re.compile(r"\b(input|output|init|final|boundary) (\d+)\b")


@dataclass(frozen=True)
class Plan:
    """The result of `explain`; `print` shows one line per field.

    normal_form: (outer, length, inner), after batch dimensions were joined where possible.
    engine: the engine that runs the scan.
    tile: the shape of the part of the scan that is processed at a time.
    grid: the parallel units: blocks, programs or threads, according to the engine.
    bytes_moved: the bytes of all inputs and outputs, each counted once. Copies and passes that read
        them again are not included.
    why: the reasons for the engine and for its way through memory.
    gradient: where an input requires a gradient, the engine of the backward pass and the reason, or
        the error that the backward pass raises.
    solution: where the result is found by iteration, what the last call took (on request).
    commands: what a call with these arguments runs, in this order.

    >>> import torch
    >>> from assocscan import explain, ops
    >>> plan = explain(ops.sum, torch.ones(8, 64), axis=1, backend="eager")
    >>> plan.normal_form, plan.bytes_moved, plan.why
    ((8, 64, 1), 4096, 'asked for')
    """

    operator: str
    normal_form: tuple[int, int, int]
    engine: str
    tile: str
    grid: str
    bytes_moved: int
    why: str
    gradient: str = ""
    solution: str = ""
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
        if self.solution:
            rows["solution"] = self.solution
        lines = [f"{name:<12} {value}" for name, value in rows.items()]
        for k, command in enumerate(self.commands):
            lines.append(f"{'' if k else 'commands':<12} {command}")
        return "\n".join(lines)

    def with_names(self, names: Mapping[Name, str]) -> Plan:
        """This plan with the caller's names of the leaves: "xs[1]" in place of "input 1"."""

        def named(text: str) -> str:
            return _LEAF.sub(lambda m: names.get((m[1], int(m[2])), m[0]), text)

        return replace(
            self, why=named(self.why), commands=tuple(named(line) for line in self.commands)
        )
