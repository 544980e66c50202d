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

from ...caching.bounded import BoundedCache
from ...errors import BackendError
from ...program.operator import Operator
from ...program.render import LIBRARY
from ..base.layout import (
    CollapsedDim,
    Layout,
    LeafStrides,
    Strides,
    gather_tensors,
    initial_leaves,
    lay_out,
    scalar_size,
)
from ..base.memory import empty_strided
from ..base.problem import ScanProblem, check_memory
from .compiler import load
from .copies import Order, copied, stand_in
from .kernel import MAX_COST, OPERATIONS, SMALL, STEPS, WIDE, Access, Kernel, source
from .route import COPY, Name, Route, choose, lane_stride

Tensors = dict[Name, torch.Tensor]

# Below this many bytes a second thread costs more than it brings (an estimate, not measured).
SERIAL_BYTES = 1 << 18

NO_MEMORY = 1  # what a kernel returns (`scan.h`)

_PREPARED: BoundedCache[Any, Prepared] = BoundedCache()


@dataclass
class Prepared:
    """A compiled kernel with every argument but the addresses.

    `copies`: the tensors that are copied first, each with the order of its copy; `outputs` are then
    in the order that the kernel writes, and copied into the order `moved` where that is another.
    """

    run: Callable[..., int]
    kernel: Kernel
    arguments: list[int]
    addresses: list[tuple[str, int, int]]
    outputs: list[tuple[tuple[int, ...], Strides, torch.dtype]]
    finals: list[tuple[tuple[int, ...], torch.dtype]]
    sizes: tuple[int, ...]
    jobs: int
    bytes: int
    route: Route
    copies: list[tuple[Name, Order]]
    moved: list[Order] | None


def scan(
    problem: ScanProblem, order: Order | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the problem: its outputs, and the final carries asked for.

    `order` is that of the outputs' batch dimensions, where it is not to follow the inputs'.
    """
    tensors = gather_tensors(problem)
    prepared = prepare(problem, tensors, order)
    for name, lies in prepared.copies:
        tensors[name] = copied(tensors[name], lies, scan)
    outputs = [empty_strided(size, stride, d) for size, stride, d in prepared.outputs]
    finals = [torch.empty(size, dtype=d, device="cpu") for size, d in prepared.finals]
    for k, t in enumerate(outputs):
        tensors["output", k] = t
    for k, t in zip(problem.final, finals, strict=True):
        tensors["final", k] = t
    if prepared.jobs:
        launch(prepared, problem, tensors)
    if prepared.moved is not None:
        outputs = [copied(t, lies, scan) for t, lies in zip(outputs, prepared.moved, strict=True)]
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


def prepare(problem: ScanProblem, tensors: Tensors, order: Order | None = None) -> Prepared:
    """The prepared launch for these shapes, strides and flags."""
    key = (
        problem.operator, problem.batch, problem.axis, problem.reverse, problem.exclusive,
        problem.init is None, problem.from_identity, problem.final, tuple(problem.ahead),
        None if problem.offsets is None else len(problem.offsets), torch.get_num_threads(), order,
        tuple((name, t.dtype, t.shape, t.stride()) for name, t in tensors.items()),
    )  # fmt: skip
    known = _PREPARED.get(key)
    if known is None:
        known = _PREPARED.keep(key, _prepare(problem, tensors, order))
    return known


def _prepare(problem: ScanProblem, tensors: Tensors, order: Order | None) -> Prepared:
    layout = lay_out(problem, tensors, order)
    # A copy is not itself copied, and what stays in cache is fetched once anyway.
    is_large = order is None and layout.bytes_moved(problem.batch) > SERIAL_BYTES
    route = choose(problem, layout, COPY if is_large else math.inf)
    copies = [(n, copy_order(problem, n, tensors[n], route)) for n in tensors if n in route.copied]
    moved = None
    if len(copies) < len(route.copied):  # the others are the outputs
        moved = [elements_last(layout.order, len(size)) for size, _, _ in layout.outputs]
    if route.copied:
        laid = {name: stand_in(tensors[name], lies) for name, lies in copies}
        written = layout.order if moved is None else route.order
        layout = lay_out(problem, {**tensors, **laid}, written)
    outer, lanes = route.rows(problem, layout)
    kernel = Kernel(
        problem.operator, bool(lanes), problem.exclusive, initial_leaves(problem), problem.final,
        tuple(problem.ahead), tuple(k for k, t in problem.ahead.items() if t is not None), (),
    )  # fmt: skip
    kernel = replace(
        kernel, access=tuple(access_of(layout.walks.get(name), lanes) for name in kernel.leaves)
    )
    check_cost(kernel)
    arguments, addresses, jobs = assemble(problem, kernel, layout, outer, lanes)
    return Prepared(
        load(source(kernel), kernel.is_small, f"a kernel of operator {kernel.operator.name!r}"),
        kernel, arguments, addresses, layout.outputs,
        layout.finals, tuple(row.size for row in outer), jobs, layout.bytes_moved(problem.batch),
        route, copies, moved,
    )  # fmt: skip


def check_cost(kernel: Kernel) -> None:
    """Raise BackendError where compiling the kernel would take too long."""
    if kernel.cost > MAX_COST:
        raise BackendError(
            f"a step of it reads, carries and writes {kernel.scalars} scalars by "
            f"{kernel.operations} operations, and the compiler would take many minutes: the limit "
            f"of the cpu backend is {MAX_COST} scalars, where {OPERATIONS} operations count as one"
        )


def copy_order(problem: ScanProblem, name: Name, t: torch.Tensor, route: Route) -> Order:
    """The order of all dimensions of a tensor that is copied to lie as the route goes."""
    order, axis = route.order, problem.axis
    if name[0] != "input":
        order = tuple(d - (d > axis) for d in order if d != axis)
        if problem.offsets is not None:
            order = (0, *(d + 1 for d in order))
    return elements_last(order, t.dim())


def elements_last(order: Order, dims: int) -> Order:
    """The order of batch dimensions followed by the element's."""
    return (*order, *range(len(order), dims))


def access_of(walk: LeafStrides | None, lanes: list[CollapsedDim]) -> Access | None:
    if walk is None:
        return None
    return Access(walk.dtype, lane_stride(walk, lanes) if lanes else 0, walk.offsets)


def assemble(
    problem: ScanProblem,
    kernel: Kernel,
    layout: Layout,
    outer: list[CollapsedDim],
    lanes: list[CollapsedDim],
) -> tuple[list[int], list[tuple[str, int, int]], int]:
    """Arguments in the order that `assocscan_run` documents, where which addresses belong in them,
    and the number of jobs."""
    sizes = [r.size for r in outer]
    sequences = 1 if problem.offsets is None else len(problem.offsets) - 1
    moved = layout.bytes_moved(problem.batch)
    threads = torch.get_num_threads() if moved > SERIAL_BYTES else 1
    inner = math.prod(r.size for r in lanes) if kernel.direct else math.prod(sizes)
    block = lane_block(kernel, inner, math.prod(sizes) * sequences, threads, problem.length)
    across = lanes if kernel.tiled else []
    arguments = [problem.length, inner, threads, int(problem.reverse), len(sizes), sequences, 0,
                 block, len(across), *sizes, *(r.size for r in across)]  # fmt: skip
    addresses = []
    for name, access in zip(kernel.leaves, kernel.access, strict=True):
        if access is None:
            arguments.extend([0] * (4 + len(sizes) + len(across)))
            continue
        walk, size = layout.walks[name], scalar_size(access.dtype)
        addresses.append((*name, len(arguments)))
        near = (access.lane or 0) * size
        arguments.extend([0, walk.strides[problem.axis] * size, near, walk.sequence * size])
        arguments.extend(r.by_name[name] * size for r in (*outer, *across))
    jobs = -(-inner // block) * (math.prod(sizes) if kernel.direct else 1) * sequences
    return arguments, addresses, jobs if math.prod(problem.carry_batch) else 0


def lane_block(kernel: Kernel, inner: int, outer: int, threads: int, length: int) -> int:
    """How many lanes (direct) or rows (staged) one job takes.

    A staged row is cut into segments where it can be: consecutive tiles are then consecutive in
    memory (1.34 against 1.17 G elements/s on one core, float32 sums of rows of 1024). Operators
    that call the mathematical library are better off with one combine per element, so with rows.
    """
    if kernel.direct:
        wanted = -(-threads // max(outer, 1))
        block = -(-inner // wanted)
        return min(kernel.lanes, -(-block // WIDE) * WIDE)
    rows = inner // max(threads, 1)
    if length >= 2 * WIDE * STEPS and (is_cheap(kernel.operator) or rows < WIDE):
        return 1
    return max(1, min(WIDE, rows))


def is_cheap(op: Operator) -> bool:
    """Whether a combine is a few vector instructions."""
    instructions = (*op.lift.instructions, *op.combine.instructions)
    return len(instructions) <= SMALL and not any(i.op in LIBRARY for i in instructions)
