"""The CPU engine: lays a scan out as [rows, length, lanes] and prepares one call of a C++ kernel.

A kernel has one of two forms (`copy_or_tile`): direct, where lanes are the innermost dimensions,
and staged, where lanes are rows. `inner` (so named in scan.h) is how many chains a kernel can take
as lanes: in the direct form the product of the lane dimensions, in the staged form the number of
rows. `outer` are the row dimensions: in the direct form those around the lanes, in the staged form
all of them.
"""

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
    carry_order,
    lay_out,
    scalar_size,
    tensors_by_name,
)
from ..base.plan import Plan
from ..base.scan_spec import Name, ScanSpec, TensorSpec
from .compiler import compiler_version, load
from .copies import Order, prepare_copy, spec_of_copy
from .copy_or_tile import COPY, Route, choose, differences, lane_stride
from .kernel import MAX_COST, MIN_CHUNK, OPERATIONS, SMALL, STEPS, WIDE, Access, Kernel, source

Spec = ScanSpec[Operator]

# Scans that move fewer bytes run on one thread: starting another takes longer than it saves (an
# estimate, not measured).
SERIAL_BYTES = 1 << 18
OFFSETS = 6  # the position of the offsets' address in the arguments of `assocscan_run`


def prepare(
    spec: Spec, tensors: Sequence[TensorSpec | None], order: Order | None = None
) -> Executable:
    """The commands of a scan: copies of inputs that the kernel would read slowly, allocation of the
    results, one call of a C++ kernel, and copies of the outputs where another order was faster.

    `order` is the order of the batch dimensions in the outputs' memory; None: as in the inputs.
    Raises BackendError if the kernel is too large to compile, or if the compiler fails.
    """
    given = tensors_by_name(spec, tensors)
    layout = lay_out(spec, given, order)
    # No copies for small tensors, which stay in the cache, and none if this scan is itself a copy
    # (only `prepare_copy` gives an order).
    may_copy = order is None and layout.bytes_moved(spec.batch) > SERIAL_BYTES
    route = choose(spec, layout, COPY if may_copy else math.inf)
    before_copies = layout
    copies = {
        name: copy_order(spec, name, given[name], route) for name in given if name in route.copied
    }
    copies_outputs = len(copies) < len(route.copied)
    if route.copied:
        laid = {name: spec_of_copy(given[name], lies) for name, lies in copies.items()}
        written_order = route.order if copies_outputs else layout.order
        layout = lay_out(spec, {**given, **laid}, written_order)
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
    if copies_outputs:
        orders = [elements_last(before_copies.order, len(size)) for size, _, _ in layout.outputs]
        outputs = [
            add_copy(commands, k, commands.spec_of(k), lies)
            for k, lies in zip(outputs, orders, strict=True)
        ]
    return commands.build(
        outputs,
        finals,
        lambda: plan_of(spec, kernel, layout, template, outer, route, before_copies, jobs),
    )


def add_copy(commands: CommandList, slot: Slot, given: TensorSpec, order: Order) -> Slot:
    return commands.copy(slot, spec_of_copy(given, order), prepare_copy(given, order, prepare))


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
    before_copies: Layout,
    jobs: int,
) -> Plan:
    """What the kernel does, for `explain`."""
    inner, threads, block = template[1], template[2], template[7]
    rows = math.prod(row.size for row in outer)
    if kernel.direct:
        tile = f"1 step x {min(block, inner)} lanes, carries of up to {kernel.lanes} lanes in cache"
        why = "SIMD over the innermost dimensions: each step is one loop over the lanes"
        form = (rows, spec.length, inner)
    else:
        lanes = "segments of one row" if block == 1 else f"{block} rows"
        tile = f"{STEPS} steps x {WIDE if block == 1 else block} lanes ({lanes}), transposed"
        why = "the axis is contiguous, or the inner dimension is narrow: rows are the lanes"
        form = (rows, spec.length, 1)
    different = differences(route, spec, before_copies)
    cut = cuts_axis(spec, kernel, threads, block, jobs)
    used = threads if cut else min(threads, jobs)
    grid = f"{used} threads over {jobs} jobs" + (", the axis cut" if cut else "")
    return Plan(
        spec.operator.name, form, f"cpu ({compiler_version()})", tile, grid,
        layout.bytes_moved(spec.batch), "; ".join([why, *different]),
    )  # fmt: skip


def cuts_axis(spec: Spec, kernel: Kernel, threads: int, block: int, jobs: int) -> bool:
    """Whether the threads share the axis of each job: the same decision as `assocscan_run`'s."""
    return (
        0 < jobs < threads
        and spec.sequence_count == 1
        and spec.length >= MIN_CHUNK * (threads + 1)
        and (kernel.direct or block == 1)
    )


def check_cost(kernel: Kernel) -> None:
    """Raise BackendError where compiling the kernel would take too long."""
    if kernel.cost > MAX_COST:
        raise BackendError(
            f"one step of {kernel.operator.name!r} has {kernel.scalars} scalars (inputs, carry and "
            f"outputs) and {kernel.operations} operations, and the compiler would take many "
            f"minutes: the limit of the cpu backend is {MAX_COST} scalars, where {OPERATIONS} "
            "operations count as one scalar"
        )


def copy_order(spec: Spec, name: Name, t: TensorSpec, route: Route) -> Order:
    """The order of all dimensions in a tensor's copy: as in the route, the element innermost."""
    is_carry = name[0] != "input"
    return elements_last(carry_order(spec, route.order) if is_carry else route.order, t.ndim)


def elements_last(order: Order, dims: int) -> Order:
    """The order of batch dimensions, followed by the element's dimensions."""
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
    """The arguments of `assocscan_run` (in the order that it documents, with 0 for addresses); the
    tensor and position of each address; the number of jobs, 0 if there is nothing to scan."""
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
    """The number of lanes (direct form) or rows (staged form) of one job.

    A staged job of one row scans WIDE segments of it side by side. Cheap operators take it for all
    long rows, because consecutive tiles are then consecutive in memory (1.34 G elements/s instead
    of 1.17 on one core, float32 sums of rows of 1024). But it needs two combines per element
    instead of one, so expensive operators take several rows, where there are enough.
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
    """Whether a step is a few vector instructions, without calls of the mathematical library."""
    instructions = (*op.lift.instructions, *op.combine.instructions)
    return len(instructions) <= SMALL and not any(i.op in LIBRARY for i in instructions)
