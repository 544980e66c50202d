"""The CPU engine: lays a scan out as [rows, length, lanes] and prepares the call of its kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...errors import BackendError
from ...program.operator import Operator
from ...program.render import LIBRARY
from ..base.executable import CommandList, Executable, Slot
from ..base.layout import (
    CollapsedDim,
    Layout,
    LeafStrides,
    lay_out,
    scalar_size,
    tensors_by_name,
)
from ..base.plan import Plan
from ..base.spec import Name, ScanSpec, TensorSpec
from .compiler import compiler_version, load
from .copies import Order, copied, prepare_copy
from .kernel import MAX_COST, OPERATIONS, SMALL, STEPS, WIDE, Access, Kernel, source
from .layout_choice import COPY, Route, choose, differences, lane_stride

Spec = ScanSpec[Operator]

# Below this many bytes a second thread costs more than it brings (an estimate, not measured).
SERIAL_BYTES = 1 << 18
OFFSETS = 6  # the place of the offsets' address among the arguments


def prepare(
    spec: Spec, tensors: Sequence[TensorSpec | None], order: Order | None = None
) -> Executable:
    """Copies of leaves that no kernel reads well, the results, and one call of a C++ kernel.

    `order` is that of the outputs' batch dimensions, where it is not to follow the inputs'.
    Raises BackendError for what is too large to compile, or where the compiler fails.
    """
    given = tensors_by_name(spec, tensors)
    layout = lay_out(spec, given, order)
    # A copy is not itself copied, and what stays in cache is fetched once anyway.
    is_large = order is None and layout.bytes_moved(spec.batch) > SERIAL_BYTES
    route = choose(spec, layout, COPY if is_large else math.inf)
    written, described = layout.order, layout
    copies = {
        name: copy_order(spec, name, given[name], route) for name in given if name in route.copied
    }
    is_moved = len(copies) < len(route.copied)  # the others are the outputs
    if route.copied:
        laid = {name: copied(given[name], lies) for name, lies in copies.items()}
        written = route.order if is_moved else layout.order
        layout = lay_out(spec, {**given, **laid}, written)
    outer, lanes = route.rows(spec, layout)
    kernel = kernel_of(spec, layout, lanes)
    check_cost(kernel)
    function = load(source(kernel), kernel.is_small, f"a kernel of operator {spec.operator.name!r}")

    commands = CommandList(spec, tensors)
    slots = commands.slots
    for name, lies in copies.items():
        slots[name] = add_copy(commands, slots[name], given[name], lies)
    outputs, finals = commands.allocate_results(layout)
    template, addresses, jobs = assemble(spec, kernel, layout, outer, lanes)
    if jobs:
        commands.call_host(spec.operator.name, function, template, [
            (position, slots[name]) for name, position in addresses
        ])  # fmt: skip
    if is_moved:
        in_order = [elements_last(described.order, len(size)) for size, _, _ in layout.outputs]
        outputs = [
            add_copy(commands, k, commands.spec_of(k), lies)
            for k, lies in zip(outputs, in_order, strict=True)
        ]
    return commands.build(
        outputs,
        finals,
        lambda: plan_of(spec, kernel, layout, template, outer, route, described, jobs),
    )


def add_copy(commands: CommandList, slot: Slot, given: TensorSpec, order: Order) -> Slot:
    return commands.copy(slot, copied(given, order), prepare_copy(given, order, prepare))


def kernel_of(spec: Spec, layout: Layout, lanes: list[CollapsedDim]) -> Kernel:
    kernel = Kernel(
        spec.operator, bool(lanes), spec.exclusive, spec.initial_leaves, spec.final, spec.shifted,
        spec.boundary, (),
    )  # fmt: skip
    return replace(
        kernel, access=tuple(access_of(layout.leaves.get(name), lanes) for name in kernel.leaves)
    )


def plan_of(
    spec: Spec,
    kernel: Kernel,
    layout: Layout,
    template: Sequence[int],
    outer: list[CollapsedDim],
    route: Route,
    described: Layout,
    jobs: int,
) -> Plan:
    """What the kernel does; `described` is the layout before copies."""
    inner, threads, block = template[1], template[2], template[7]
    rows = math.prod(row.size for row in outer)
    if kernel.direct:
        tile = f"1 step x {min(block, inner)} lanes, carries of up to {kernel.lanes} lanes in cache"
        why = "the innermost dimension is contiguous: SIMD along it"
        form = (rows, spec.length, inner)
    else:
        lanes = "segments of one row" if block == 1 else f"{block} rows"
        tile = f"{STEPS} steps x {WIDE if block == 1 else block} lanes ({lanes}), transposed"
        why = "the axis is contiguous, or the inner dimension is narrow: rows are the lanes"
        form = (rows, spec.length, 1)
    different = differences(route, spec, described)
    cut = jobs < threads and spec.sequences is None
    grid = f"{threads} threads over {jobs} jobs" + (", the axis cut" if cut else "")
    return Plan(
        spec.operator.name, form, f"cpu ({compiler_version()})", tile, grid,
        layout.bytes_moved(spec.batch), "; ".join([why, *different]),
    )  # fmt: skip


def check_cost(kernel: Kernel) -> None:
    """Raise BackendError where compiling the kernel would take too long."""
    if kernel.cost > MAX_COST:
        raise BackendError(
            f"a step of it reads, carries and writes {kernel.scalars} scalars by "
            f"{kernel.operations} operations, and the compiler would take many minutes: the limit "
            f"of the cpu backend is {MAX_COST} scalars, where {OPERATIONS} operations count as one"
        )


def copy_order(spec: Spec, name: Name, t: TensorSpec, route: Route) -> Order:
    """The order of all dimensions of a tensor that is copied to lie as the route goes."""
    order, axis = route.order, spec.axis
    if name[0] != "input":
        order = tuple(d - (d > axis) for d in order if d != axis)
        if spec.sequences is not None:
            order = (0, *(d + 1 for d in order))
    return elements_last(order, t.ndim)


def elements_last(order: Order, dims: int) -> Order:
    """The order of batch dimensions followed by the element's."""
    return (*order, *range(len(order), dims))


def access_of(walk: LeafStrides | None, lanes: list[CollapsedDim]) -> Access | None:
    if walk is None:
        return None
    return Access(walk.dtype, lane_stride(walk, lanes) if lanes else 0, walk.component_offsets)


def assemble(
    spec: Spec,
    kernel: Kernel,
    layout: Layout,
    outer: list[CollapsedDim],
    lanes: list[CollapsedDim],
) -> tuple[list[int], list[tuple[Name, int]], int]:
    """Arguments in the order that `assocscan_run` documents, where which addresses belong in them,
    and the number of jobs."""
    sizes = [r.size for r in outer]
    sequences = spec.sequence_count
    moved = layout.bytes_moved(spec.batch)
    threads = torch.get_num_threads() if moved > SERIAL_BYTES else 1
    inner = math.prod(r.size for r in lanes) if kernel.direct else math.prod(sizes)
    block = lane_block(kernel, inner, math.prod(sizes) * sequences, threads, spec.length)
    across = lanes if kernel.tiled else []
    arguments = [spec.length, inner, threads, int(spec.reverse), len(sizes), sequences, 0,
                 block, len(across), *sizes, *(r.size for r in across)]  # fmt: skip
    addresses: list[tuple[Name, int]] = []
    if spec.sequences is not None:
        addresses.append((("offsets", 0), OFFSETS))
    for name, access in zip(kernel.leaves, kernel.access, strict=True):
        if access is None:
            arguments.extend([0] * (4 + len(sizes) + len(across)))
            continue
        walk, size = layout.leaves[name], scalar_size(access.dtype)
        addresses.append((name, len(arguments)))
        near = (access.lane or 0) * size
        arguments.extend([0, walk.strides[spec.axis] * size, near, walk.sequence * size])
        arguments.extend(r.by_name[name] * size for r in (*outer, *across))
    jobs = -(-inner // block) * (math.prod(sizes) if kernel.direct else 1) * sequences
    return arguments, addresses, jobs if spec.chains else 0


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
