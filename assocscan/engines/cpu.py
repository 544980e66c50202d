"""The CPU engine: lays a `ScanProblem` out as [rows, length, lanes] and calls its kernel.

All that depends only on shapes, strides and flags is worked out once and kept (`Prepared`), so that
a warm call allocates its outputs, fills in the addresses and goes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..locks import ForkSafeLock
from ..operator import Leaf, Operator
from ..problem import ScanProblem, contiguous_strides, memory_order, plain
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
MAX_PREPARED = 4096

_PREPARED: dict[Any, Prepared] = {}
_LOCK = ForkSafeLock()

Strides = tuple[int, ...]


@dataclass
class Prepared:
    """A compiled kernel with every argument but the addresses."""

    run: Callable[..., None]
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


@dataclass
class _Walk:
    """One leaf's strides in scalars over all batch dimensions, and over its sequences."""

    role: str
    number: int
    dtype: torch.dtype
    strides: list[int]
    sequence: int
    offsets: tuple[int, ...]
    copy: bool = False


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


def gather_tensors(problem: ScanProblem) -> dict[tuple[str, int], torch.Tensor]:
    """Everything that the kernel reads, by role and number; carries in their full shape."""
    tensors = {("input", k): plain(t) for k, t in enumerate(problem.inputs) if t is not None}
    shape = problem.carry_batch
    for k, t in enumerate(problem.init or ()):
        if t is not None:
            tensors["init", k] = expand_carry(plain(t), shape, problem.operator.state[k])
    for k, t in problem.ahead.items():
        if t is not None:
            tensors["edge", k] = expand_carry(plain(t), shape, problem.operator.inputs[k])
    return tensors


def launch(
    prepared: Prepared, problem: ScanProblem, tensors: dict[tuple[str, int], torch.Tensor]
) -> None:
    arguments = list(prepared.arguments)
    if problem.offsets is not None:
        arguments[6] = problem.offsets.data_ptr()
    for role, number, position in prepared.addresses:
        arguments[position] = tensors[role, number].data_ptr()
    prepared.run((ctypes.c_int64 * len(arguments))(*arguments))


def expand_carry(t: torch.Tensor, shape: tuple[int, ...], leaf: Leaf) -> torch.Tensor:
    """A carry leaf broadcast to the full carry shape, keeping broadcast strides."""
    full = (*shape, *leaf.shape)
    return t if t.shape == full else t.expand(full)


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
        known = _prepare(problem, tensors)
        with _LOCK:
            if len(_PREPARED) >= MAX_PREPARED:
                _PREPARED.clear()
            _PREPARED[key] = known
    return known


def _prepare(problem: ScanProblem, tensors: dict[tuple[str, int], torch.Tensor]) -> Prepared:
    op, batch, axis = problem.operator, problem.batch, problem.axis
    order = memory_order(
        batch,
        [(tuple(t.shape), t.stride()) for (role, _), t in tensors.items() if role == "input"],
    )
    outputs = [
        ((*batch, *leaf.shape), contiguous_strides(batch, order, leaf.shape), leaf.dtype)
        for leaf in op.outputs
    ]
    finals = [
        ((*problem.carry_batch, *op.state[k].shape), op.state[k].accumulator) for k in problem.final
    ]
    walks = [*walk_tensors(problem, tensors), *walk_results(problem, outputs, finals)]
    rows = merge([d for d in order if d != axis and batch[d] > 1], batch, walks)
    direct = is_direct(rows, walks, axis)
    kernel = Kernel(
        op, direct, problem.exclusive, initial_leaves(problem), problem.final,
        tuple(problem.ahead), tuple(k for k, t in problem.ahead.items() if t is not None), (),
    )  # fmt: skip
    by_name = {(w.role, w.number): w for w in walks}
    lanes = rows[-1] if direct else None
    kernel = replace(
        kernel, access=tuple(access_of(by_name.get(name), lanes) for name in kernel.leaves)
    )
    return assemble(problem, kernel, by_name, rows, outputs, finals)


def initial_leaves(problem: ScanProblem) -> tuple[int, ...] | None:
    """The state leaves read at the start; () starts from the identity alone, None without."""
    if problem.init is None:
        return () if problem.from_identity else None
    return tuple(k for k, t in enumerate(problem.init) if t is not None)


def walk_tensors(problem: ScanProblem, tensors: dict[tuple[str, int], torch.Tensor]) -> list[_Walk]:
    """Strides of everything that is read. Odd element layouts are marked for a copy."""
    walks = []
    for (role, number), t in tensors.items():
        leaf = problem.operator.state[number] if role == "init" else (
            problem.operator.inputs[number]
        )  # fmt: skip
        stride = t.stride()
        offsets = component_offsets(leaf, stride[t.dim() - len(leaf.shape) :])
        copy = max(offsets, default=0) >= 4 * max(leaf.components, 1)
        if copy:
            stride = t.contiguous().stride()
            offsets = component_offsets(leaf, stride[t.dim() - len(leaf.shape) :])
        scale = 2 if leaf.dtype.is_complex else 1
        strides = [scale * s if n > 1 else 0 for s, n in zip(stride, t.shape, strict=True)]
        walks.append(place(problem, role, number, t.dtype, strides, offsets, copy))
    return walks


def walk_results(
    problem: ScanProblem,
    outputs: Sequence[tuple[tuple[int, ...], Strides, torch.dtype]],
    finals: Sequence[tuple[tuple[int, ...], torch.dtype]],
) -> list[_Walk]:
    """Strides of everything that is written."""
    op = problem.operator
    walks = []
    for k, (_, stride, dtype) in enumerate(outputs):
        leaf = op.outputs[k]
        scale = 2 if dtype.is_complex else 1
        offsets = component_offsets(leaf, stride[len(problem.batch) :])
        scaled = [scale * s for s in stride]
        walks.append(place(problem, "output", k, dtype, scaled, offsets))
    for k, (size, dtype) in zip(problem.final, finals, strict=True):
        leaf = op.state[k]
        stride = contiguous_strides(size, tuple(range(len(size))), ())
        scale = 2 if dtype.is_complex else 1
        offsets = component_offsets(leaf, stride[len(size) - len(leaf.shape) :])
        scaled = [scale * s for s in stride]
        walks.append(place(problem, "final", k, dtype, scaled, offsets))
    return walks


def place(
    problem: ScanProblem, role: str, number: int, dtype: torch.dtype, strides: list[int],
    offsets: tuple[int, ...], copy: bool = False,
) -> _Walk:  # fmt: skip
    """A leaf's strides over the full batch; carries have no stride along the axis."""
    sequence = 0
    if role in ("init", "final", "edge"):
        if problem.offsets is not None:
            sequence, strides = strides[0], strides[1:]
        strides = [*strides[: problem.axis], 0, *strides[problem.axis :]]
    return _Walk(role, number, dtype, strides[: len(problem.batch)], sequence, offsets, copy)


def component_offsets(leaf: Leaf, strides: Sequence[int]) -> tuple[int, ...]:
    """The distance of each component from the first, in scalars."""
    scale = 2 if leaf.dtype.is_complex else 1
    offsets = [0]
    for size, stride in zip(leaf.shape, strides, strict=True):
        offsets = [o + scale * stride * k for o in offsets for k in range(size)]
    return tuple(o + k for o in offsets for k in range(scale))


def merge(dims: list[int], batch: tuple[int, ...], walks: list[_Walk]) -> list[_Row]:
    """Batch dimensions, outermost first, joined wherever every leaf allows it."""
    rows: list[_Row] = []
    for d in dims:
        strides = [w.strides[d] for w in walks]
        if rows and all(
            outer == inner * batch[d]
            for outer, inner in zip(rows[-1].strides, strides, strict=True)
        ):
            rows[-1] = _Row(rows[-1].size * batch[d], strides)
        else:
            rows.append(_Row(batch[d], strides))
    for row in rows:
        row.by_name = {(w.role, w.number): s for w, s in zip(walks, row.strides, strict=True)}
    return rows


class _Row:
    """One joined batch dimension: its size and every leaf's stride."""

    def __init__(self, size: int, strides: list[int]) -> None:
        self.size, self.strides = size, strides
        self.by_name: dict[tuple[str, int], int] = {}


def is_direct(rows: list[_Row], walks: list[_Walk], axis: int) -> bool:
    """Whether the innermost dimension can be walked in place as SIMD lanes."""
    if not rows or rows[-1].size < MIN_LANES:
        return False
    used = [s for w, s in zip(walks, rows[-1].strides, strict=True) if w.offsets]
    return all(0 <= s <= MAX_LANE_STRIDE for s in used)


def access_of(walk: _Walk | None, lanes: _Row | None) -> Access | None:
    if walk is None:
        return None
    lane = 0 if lanes is None else lanes.by_name[walk.role, walk.number]
    return Access(walk.dtype, lane, walk.offsets)


def assemble(
    problem: ScanProblem,
    kernel: Kernel,
    walks: dict[tuple[str, int], _Walk],
    rows: list[_Row],
    outputs: list[tuple[tuple[int, ...], Strides, torch.dtype]],
    finals: list[tuple[tuple[int, ...], torch.dtype]],
) -> Prepared:
    """Arguments in the order that `assocscan_run` documents."""
    outer = rows[:-1] if kernel.direct else rows
    sizes = [r.size for r in outer]
    sequences = 1 if problem.offsets is None else len(problem.offsets) - 1
    moved = sum(t_bytes(w, problem.batch) for w in walks.values())
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
    return Prepared(load(source(kernel)), kernel, arguments, addresses, outputs, finals,
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


def scalar_size(dtype: torch.dtype) -> int:
    """Bytes of one scalar: half of a complex number's."""
    return dtype.itemsize // (2 if dtype.is_complex else 1)


def t_bytes(walk: _Walk, batch: tuple[int, ...]) -> int:
    """The bytes of a leaf that a scan moves, broadcast dimensions counted once."""
    distinct = math.prod(n for n, s in zip(batch, walk.strides, strict=True) if s != 0)
    return distinct * len(walk.offsets) * scalar_size(walk.dtype)
