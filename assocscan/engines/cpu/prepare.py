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

from ...errors import BackendError
from ...program.operator import Operator
from ..base.commands import Slot
from ..base.executable import CommandList, Executable
from ..base.explained_plan import Plan
from ..base.layout import (
    CollapsedDim,
    Layout,
    LeafStrides,
    carry_order,
    lay_out,
    scalar_size,
    tensors_by_name,
)
from ..base.scan_spec import Name, ScanSpec, TensorSpec
from . import threads_and_jobs
from .compiler import compiler_version, load
from .copies import Order, prepare_copy, spec_of_copy
from .copy_or_tile import COPY, Route, choose, differences, lane_stride
from .kernel import MAX_COST, OPERATIONS, STEPS, WIDE, Access, Kernel, source
from .threads_and_jobs import Sharing

Spec = ScanSpec[Operator]

# Up to so many elements a long operator is compiled in a shorter time, to a slower kernel.
FEW_ELEMENTS = 256
# So are operators of more operations. GCC 12.2 takes 40 seconds with -O2 for the gradient of a
# Kalman filter of four states (5500 operations), over 5 minutes where its rows are lanes; 5 seconds
# with -O1, and the kernel of one row is as fast.
VERY_LONG = 4096
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
    # No optional copies for small tensors, which stay in the cache, and none if this scan is itself
    # a copy (only `prepare_copy` gives an order). Leaves marked `LeafStrides.copy` are copied in
    # any case.
    may_copy = order is None and layout.bytes_moved(spec.batch) > threads_and_jobs.SERIAL_BYTES
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
    function = load(
        source(kernel), kernel.is_small, f"a kernel of operator {spec.operator.name!r}",
        math.prod(spec.batch) <= FEW_ELEMENTS or kernel.operations > VERY_LONG,
    )  # fmt: skip

    commands = CommandList(spec, tensors)
    slots = commands.slots
    for name, lies in copies.items():
        slots[name] = add_copy(commands, slots[name], given[name], lies)
    outputs, finals = commands.allocate_results(layout)
    sharing = threads_and_jobs.share(spec, kernel, layout.bytes_moved(spec.batch), outer, lanes)
    template, addresses = assemble(spec, kernel, layout, outer, lanes, sharing)
    if sharing.jobs:
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
        lambda: plan_of(spec, kernel, layout, outer, route, before_copies, sharing),
    )


def add_copy(commands: CommandList, slot: Slot, given: TensorSpec, order: Order) -> Slot:
    return commands.copy(slot, spec_of_copy(given, order), prepare_copy(given, order, prepare))


def kernel_of(spec: Spec, layout: Layout, lanes: list[CollapsedDim]) -> Kernel:
    kernel = Kernel(
        spec.operator, bool(lanes), spec.exclusive, spec.initial_leaves, spec.final, spec.shifted,
        spec.boundary, (),
    )  # fmt: skip
    leaves = [layout.leaves.get(name) for name in kernel.leaves]
    return replace(kernel, access=tuple(access_of(walk, lanes, kernel.is_small) for walk in leaves))


def plan_of(
    spec: Spec,
    kernel: Kernel,
    layout: Layout,
    outer: list[CollapsedDim],
    route: Route,
    before_copies: Layout,
    sharing: Sharing,
) -> Plan:
    """What the kernel does, for `explain`."""
    inner, block = sharing.inner, sharing.block
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
    cut = ", the axis cut" if sharing.cuts_axis else ""
    grid = f"{sharing.threads} threads over {sharing.jobs} jobs{cut}"
    return Plan(
        spec.operator.name, form, f"cpu ({compiler_version()})", tile, grid,
        layout.bytes_moved(spec.batch), "; ".join([why, *different]),
    )  # fmt: skip


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


def access_of(walk: LeafStrides | None, lanes: list[CollapsedDim], is_small: bool) -> Access | None:
    """How the kernel reads or writes a leaf of these strides. is_small: `Kernel.is_small`."""
    if walk is None:
        return None
    lane = lane_stride(walk, lanes) if lanes else 0
    # A loop over lanes that reads bytes in place becomes SIMD code for 64 lanes, as a register has
    # 64 bytes. If a step is long that compiles for a minute, and fewer lanes are run one by one. So
    # bytes go through a tile. An HMM filter of five states and a mask, 16 sequences: 38 → 7 s to
    # compile, 14 → 2.2 ms a call.
    if lanes and not is_small and scalar_size(walk.dtype) == 1:
        lane = None
    return Access(walk.dtype, lane, walk.component_offsets)


def assemble(
    spec: Spec,
    kernel: Kernel,
    layout: Layout,
    outer: list[CollapsedDim],
    lanes: list[CollapsedDim],
    sharing: Sharing,
) -> tuple[list[int], list[tuple[Name, int]]]:
    """The arguments of `assocscan_run` (in the order that it documents, with 0 for addresses); the
    tensor and position of each address."""
    sizes = [r.size for r in outer]
    across = lanes if kernel.tiled else []
    arguments = [spec.length, sharing.inner, sharing.threads, int(spec.reverse), len(sizes),
                 spec.sequence_count, 0, sharing.block, len(across), int(sharing.cuts_axis),
                 *sizes, *(r.size for r in across)]  # fmt: skip
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
    return arguments, addresses
