"""The CPU engine: lays a `ScanProblem` out as [rows, length, lanes] and calls its kernel.

All that depends only on shapes, strides and flags is worked out once and kept (`Prepared`), so that
a warm call allocates its outputs, fills in the addresses and goes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import BackendError
from ..kept import Kept
from ..layout import (
    Layout,
    Row,
    Strides,
    Walk,
    gather_tensors,
    initial_leaves,
    lay_out,
    scalar_size,
)
from ..operator import Operator
from ..problem import ScanProblem, check_memory
from ..render import LIBRARY
from .compiler import load
from .kernel import DIRECT_LANES, SMALL, STEPS, WIDE, Access, Kernel, source
from .memory import empty_strided

# Below this many bytes a second thread costs more than it brings (an estimate, not measured).
SERIAL_BYTES = 1 << 18
# Fewer lanes than this are scanned as rows.
MIN_LANES = 8
# The widest distance of two lanes, in scalars, that is read in place by the direct walk.
MAX_LANE_STRIDE = 16

NO_MEMORY = 1  # what a kernel returns (`scan.h`)

_PREPARED: Kept[Any, Prepared] = Kept()


@dataclass
class Prepared:
    """A compiled kernel with every argument but the addresses."""

    run: Callable[..., int]
    kernel: Kernel
    arguments: list[int]
    addresses: list[tuple[str, int, int]]
    outputs: list[tuple[tuple[int, ...], Strides, torch.dtype]]
    finals: list[tuple[tuple[int, ...], torch.dtype]]
    sizes: tuple[int, ...]
    inner: int
    jobs: int
    bytes: int
    copies: frozenset[tuple[str, int]]


def scan(problem: ScanProblem) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the problem: its outputs, and the final carries asked for."""
    tensors = gather_tensors(problem)
    prepared = prepare(problem, tensors)
    for role_number in prepared.copies:
        tensors[role_number] = tensors[role_number].contiguous()
    outputs = [empty_strided(size, stride, d) for size, stride, d in prepared.outputs]
    finals = [torch.empty(size, dtype=d, device="cpu") for size, d in prepared.finals]
    for k, t in enumerate(outputs):
        tensors["output", k] = t
    for k, t in zip(problem.final, finals, strict=True):
        tensors["final", k] = t
    if math.prod(problem.carry_batch) != 0:
        launch(prepared, problem, tensors)
    return outputs, finals


def launch(
    prepared: Prepared, problem: ScanProblem, tensors: dict[tuple[str, int], torch.Tensor]
) -> None:
    arguments = list(prepared.arguments)
    if problem.offsets is not None:
        arguments[6] = problem.offsets.data_ptr()
    for role, number, position in prepared.addresses:
        t = tensors[role, number]
        arguments[position] = t.data_ptr()
        if arguments[position] == 0:
            check_memory([0], [t])
    if prepared.run((ctypes.c_int64 * len(arguments))(*arguments)) == NO_MEMORY:
        raise BackendError(
            f"the system has no memory left for what the threads of a scan with "
            f"{problem.operator.name!r} write on their way"
        )


def prepare(problem: ScanProblem, tensors: dict[tuple[str, int], torch.Tensor]) -> Prepared:
    """The prepared launch for these shapes, strides and flags."""
    key = (
        problem.operator, problem.batch, problem.axis, problem.reverse, problem.exclusive,
        problem.init is None, problem.from_identity, problem.final, tuple(problem.ahead),
        None if problem.offsets is None else len(problem.offsets), torch.get_num_threads(),
        tuple((name, t.dtype, t.shape, t.stride()) for name, t in tensors.items()),
    )  # fmt: skip
    known = _PREPARED.get(key)
    if known is None:
        known = _PREPARED.keep(key, _prepare(problem, tensors))
    return known


def _prepare(problem: ScanProblem, tensors: dict[tuple[str, int], torch.Tensor]) -> Prepared:
    op = problem.operator
    layout = lay_out(problem, tensors)
    direct = is_direct(layout.rows, list(layout.walks.values()), problem.axis)
    kernel = Kernel(
        op, direct, problem.exclusive, initial_leaves(problem), problem.final,
        tuple(problem.ahead), tuple(k for k, t in problem.ahead.items() if t is not None), (),
    )  # fmt: skip
    lanes = layout.rows[-1] if direct else None
    kernel = replace(
        kernel, access=tuple(access_of(layout.walks.get(name), lanes) for name in kernel.leaves)
    )
    return assemble(problem, kernel, layout)


def is_direct(rows: list[Row], walks: list[Walk], axis: int) -> bool:
    """Whether the innermost dimension can be walked in place as SIMD lanes."""
    if not rows or rows[-1].size < MIN_LANES:
        return False
    used = [s for w, s in zip(walks, rows[-1].strides, strict=True) if w.offsets]
    return all(0 <= s <= MAX_LANE_STRIDE for s in used)


def access_of(walk: Walk | None, lanes: Row | None) -> Access | None:
    if walk is None:
        return None
    lane = 0 if lanes is None else lanes.by_name[walk.role, walk.number]
    return Access(walk.dtype, lane, walk.offsets)


def assemble(problem: ScanProblem, kernel: Kernel, layout: Layout) -> Prepared:
    """Arguments in the order that `assocscan_run` documents."""
    rows, walks = layout.rows, layout.walks
    outer = rows[:-1] if kernel.direct else rows
    sizes = [r.size for r in outer]
    sequences = 1 if problem.offsets is None else len(problem.offsets) - 1
    moved = layout.bytes_moved(problem.batch)
    threads = torch.get_num_threads() if moved > SERIAL_BYTES else 1
    inner = rows[-1].size if kernel.direct else math.prod(sizes)
    block = lane_block(kernel, inner, math.prod(sizes) * sequences, threads, problem.length)
    arguments = [problem.length, inner, threads, int(problem.reverse), len(sizes), sequences, 0,
                 block, *sizes]  # fmt: skip
    addresses = []
    for name in kernel.leaves:
        walk = walks.get(name)
        if walk is None:
            arguments.extend([0] * (4 + len(sizes)))
            continue
        size = scalar_size(walk.dtype)
        addresses.append((*name, len(arguments)))
        lane = rows[-1].by_name[name] if kernel.direct else 0
        arguments.extend([0, walk.strides[problem.axis] * size, lane * size, walk.sequence * size])
        arguments.extend(r.by_name[name] * size for r in outer)
    jobs = -(-inner // block) * (math.prod(sizes) if kernel.direct else 1) * sequences
    copies = frozenset(name for name, w in walks.items() if w.copy)
    run = load(source(kernel), kernel.is_small, f"a kernel of operator {kernel.operator.name!r}")
    return Prepared(run, kernel, arguments, addresses, layout.outputs, layout.finals,
                    tuple(sizes), inner, jobs, moved, copies)  # fmt: skip


def lane_block(kernel: Kernel, inner: int, outer: int, threads: int, length: int) -> int:
    """How many lanes (direct) or rows (staged) one job takes.

    A staged row is cut into segments where it can be: consecutive tiles are then consecutive in
    memory (1.34 against 1.17 G elements/s on one core, float32 sums of rows of 1024). Operators
    that call the mathematical library are better off with one combine per element, so with rows.
    """
    if kernel.direct:
        wanted = -(-threads // max(outer, 1))
        block = -(-inner // wanted)
        return min(DIRECT_LANES, -(-block // WIDE) * WIDE)
    rows = inner // max(threads, 1)
    if length >= 2 * WIDE * STEPS and (is_cheap(kernel.operator) or rows < WIDE):
        return 1
    return max(1, min(WIDE, rows))


def is_cheap(op: Operator) -> bool:
    """Whether a combine is a few vector instructions."""
    instructions = (*op.lift.instructions, *op.combine.instructions)
    return len(instructions) <= SMALL and not any(i.op in LIBRARY for i in instructions)
