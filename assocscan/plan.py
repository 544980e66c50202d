"""`explain`: how a scan would run, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import engines
from .arguments import ScanCall, bind
from .engines import cpu
from .engines.compiler import compiler_version
from .engines.kernel import DIRECT_LANES, STEPS, WIDE
from .errors import ScanValueError
from .problem import ScanProblem


@dataclass(frozen=True)
class Plan:
    """What `explain` returns; printing it gives one line per field.

    normal_form: (outer, length, inner) after dimensions were joined.
    engine, tile, grid: who runs it, on tiles of which shape, by how many threads.
    bytes_moved: each input read once, each output written once.
    why: the reason for the engine and the walk.
    """

    operator: str
    normal_form: tuple[int, int, int]
    engine: str
    tile: str
    grid: str
    bytes_moved: int
    why: str

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
        return "\n".join(f"{name:<12} {value}" for name, value in rows.items())


def explain(
    op: Any,
    xs: Any,
    axis: int = 0,
    reverse: bool = False,
    inclusive: bool = True,
    *,
    init: Any = None,
    return_final: bool = False,
    offsets: torch.Tensor | None = None,
    backend: str = "auto",
    deterministic: bool | None = None,
) -> Plan:
    """The `Plan` of `associative_scan` with the same arguments; nothing is scanned.

    >>> import torch
    >>> from assocscan import explain, ops
    >>> explain(ops.sum, torch.ones(8, 4096, 512), axis=1, backend="eager").engine
    'eager'

    Raises what `associative_scan` raises for arguments that do not fit.
    """
    if backend not in engines.BACKENDS:
        raise ScanValueError(
            f"unknown backend {backend!r}; choose one of {', '.join(engines.BACKENDS)}"
        )
    call = bind(op, xs, axis, bool(reverse), bool(inclusive), init, return_final, offsets)
    reason = "asked for" if backend == "eager" else engines.why_not(call, backend)
    return cpu_plan(call) if reason is None else eager_plan(call, reason)


def eager_plan(call: ScanCall, reason: str) -> Plan:
    outer = 1
    for n in call.batch[: call.axis]:
        outer *= n
    inner = 1
    for n in call.batch[call.axis + 1 :]:
        inner *= n
    moved = 2 * sum(t.nbytes for t in call.leaves)
    return Plan(
        call.operator.name, (outer, call.length, inner), "eager", "whole tensors",
        f"{2 * max(call.length - 1, 1).bit_length()} levels of torch operations", moved, reason,
    )  # fmt: skip


def cpu_plan(call: ScanCall) -> Plan:
    assert call.spec is not None and call.spec.operator is not None
    exclusive = not call.inclusive
    problem = ScanProblem(
        call.spec.operator, list(call.leaves), call.batch, call.axis, call.reverse, exclusive,
        None if call.init is None else list(call.init), exclusive and call.init is None,
        tuple(range(len(call.spec.state))) if call.return_final else (), offsets=call.offsets,
    )  # fmt: skip
    prepared = cpu.prepare(problem, cpu.gather_tensors(problem))
    arguments = prepared.arguments
    inner, threads, block = arguments[1], arguments[2], arguments[7]
    direct = prepared.kernel.direct
    outer = 1
    for n in prepared.sizes:
        outer *= n
    if direct:
        tile = f"1 step x {min(block, inner)} lanes, carries of up to {DIRECT_LANES} lanes in cache"
        why = "the innermost dimension is contiguous: SIMD along it"
        form = (outer, call.length, inner)
    else:
        lanes = "segments of one row" if block == 1 else f"{block} rows"
        tile = f"{STEPS} steps x {WIDE if block == 1 else block} lanes ({lanes}), transposed"
        why = "the axis is contiguous, or the inner dimension is narrow: rows are the lanes"
        form = (outer, call.length, 1)
    cut = prepared.jobs < threads and call.offsets is None
    grid = f"{threads} threads over {prepared.jobs} jobs" + (", the axis cut" if cut else "")
    return Plan(
        call.operator.name, form, f"cpu ({compiler_version()})", tile, grid, prepared.bytes, why
    )
