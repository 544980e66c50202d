"""Executables of scans over vectors by CUDA: one kernel; for a backward pass, besides, the sums of
what the kernel's blocks added up."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...autodiff.vector_adjoint import backward_step
from ...engines.base.device_properties import processors, shared_memory
from ...engines.base.executable import Executable
from ...engines.base.scan_spec import ScanSpec, TensorSpec
from ...engines.base.vectors import prepare as tensors_of
from ...engines.base.vectors.kernel import CHUNK, VectorKernel, padded
from ...engines.base.vectors.prepare import Prepared, Spec, Tensors
from ...program.vectors.vector_adjoint import VectorAdjoint
from .. import launcher
from ..parameters import struct_format
from ..prepare import LoadedKernel
from .leaves import LeafPart, width_of
from .source import source, text_of
from .step_graph import NotExpressible
from .text import Widths, parameter_fields
from .tile import (
    VectorTile,
    choose_segments,
    cost_whole,
    cut_tile,
    smaller_tile,
    whole_tile,
)
from .totals_source import Totals, TotalsKernel, backward_totals, forward_totals

Kernel = TypeVar("Kernel", bound=Any)  # a ForwardKernel, BackwardKernel or TotalsKernel

# The most operations of a step that are compiled, and of one whose states are kept for a whole
# group of steps (estimates).
MAX_OPERATIONS, FEW_OPERATIONS = 400, 60
MAX_PARAMETERS = 4096  # bytes


def prepare(spec: Spec, tensors: Tensors) -> Executable:
    """The executable of a forward scan. Raises NotExpressible for operators that these kernels
    cannot compute."""
    op = spec.operator
    check_size(op.name, sum(len(p.instructions) for p in (op.lift, op.combine, op.lower)))
    lane = tensors_of.forward_lane(spec, tensors)
    tile, segments, chunks = share(spec, lane, op.size, False, lambda: forward_totals(op))

    def with_tile(tile: VectorTile) -> Executable:
        found = tensors_of.forward(spec, tensors, tile)
        found.segments = segments
        return launched(found, chunks)

    return fitting(tile, with_tile)


def prepare_backward(spec: ScanSpec[VectorAdjoint], tensors: Tensors) -> Executable:
    """The executable of a backward pass. Raises NotExpressible as `prepare`."""
    adjoint, size = spec.operator, spec.operator.op.size
    step = backward_step(adjoint, False)
    operations = len(step.recomputed.instructions) + len(step.pulled.instructions)
    check_size(adjoint.name, operations)
    tile, segments, chunks = share(spec, adjoint.lane, size, True, lambda: backward_totals(adjoint))
    if operations > FEW_OPERATIONS:
        tile = replace(tile, group=tile.group // 2)
    return fitting(
        tile, lambda tile: launched(tensors_of.backward(spec, tensors, tile, segments), chunks)
    )


class TooLarge(NotExpressible):
    """A block needs more shared memory than there is."""


def fitting(tile: VectorTile, prepare: Callable[[VectorTile], Executable]) -> Executable:
    """The executable of a tile, or of one with fewer threads if its shared memory is too large:
    rows of wide dtypes or of many states, for which the warps of a block have sums of their own."""
    while True:
        try:
            return prepare(tile)
        except TooLarge:
            smaller = smaller_tile(tile)
            if smaller is None:
                raise
            tile = smaller


def share(
    spec: ScanSpec[Any], lane: int | None, size: int, backward: bool, totals: Callable[[], Totals]
) -> tuple[VectorTile, int, int]:
    """The tile, the number of segments into which the axis is cut, and the chunks of each. totals:
    raises NotExpressible where segments have no totals."""
    count, chunks = processors(spec.device), -(-spec.length // CHUNK)
    tile = whole_tile(size, backward)
    whole = tile, 1, chunks
    if spec.sequences is not None or not (spec.chains and spec.length):
        return whole
    lanes = 1 if lane is None else spec.batch[lane]

    def blocks(tile: VectorTile) -> int:
        return spec.chains // lanes * -(-lanes // tile.lanes)

    cut = cut_tile(size, backward)
    segments, each, cost = choose_segments(cut, backward, blocks(cut), chunks, count)
    if segments == 1 or cost >= cost_whole(tile, backward, blocks(tile), count):
        return whole
    try:
        totals()
    except NotExpressible:
        return whole
    return cut, segments, each


def check_size(name: str, operations: int) -> None:
    if operations > MAX_OPERATIONS:
        raise NotExpressible(
            f"one step of {name!r} has {operations} operations; the limit of CUDA kernels over "
            f"vectors is {MAX_OPERATIONS}"
        )


@dataclass(eq=False)
class LoadedVectorKernel(LoadedKernel):
    """title: what `explain` says of the launch."""

    title: str = ""

    def shown(self) -> str:
        return self.title


def launched(found: Prepared, segment_chunks: int) -> Executable:
    """The executable that launches the kernels on the tensors of its ports; a segment of the axis
    has so many chunks."""
    spec, ports, commands = found.spec, found.ports, found.commands
    if not (spec.chains and spec.length and spec.sequence_count):
        raise NotExpressible("a CUDA kernel over vectors needs at least one step")
    sizes = found.sizes() | {"segments": found.segments, "segment_chunks": segment_chunks}
    if found.segments > 1:
        found.kernel = replace(found.kernel, cut=True)
        totals = totals_kernel(found)
        numbers = totals.totals.sizes(totals.tile.states)
        shape = (found.segments, ports.rows, padded(ports.lanes), sum(numbers))
        commands.slots["totals", 0] = commands.allocate(shape, totals.carry_dtype)
        ports.add_whole("totals", commands.spec_of(commands.slots["totals", 0]))
        wide = found.complete_kernel().wide
        totals = replace(totals, wide=wide, ports=(*totals.ports, ports.found[-1]))
        # The first or the last segment's total is not needed.
        launch(found, totals, sizes | {"segments": found.segments - 1}, "totals of ")
    else:
        found.complete_kernel()
    found.kernel = launch(found, found.kernel, sizes, "")
    return found.build("cuda", found.kernel.tile.shown)


def totals_kernel(found: Prepared) -> TotalsKernel:
    """The kernel that computes the totals of segments, with the ports that it reads."""
    kernel = found.kernel
    totals = TotalsKernel(
        replace(kernel.tile, stages=3), kernel.reverse, kernel.outer, False, False, kernel.first,
        (), (), kernel.operator, cut=True,
    )  # fmt: skip
    return replace(totals, ports=tuple(p for p in found.ports.found if p[:2] in totals.reads()))


def launch(found: Prepared, kernel: Kernel, sizes: Mapping[str, int], what: str) -> Kernel:
    """Add the launch of a kernel; returns it with the tile that fits the GPU."""
    spec, commands, tile = found.spec, found.commands, kernel.tile
    slots = [*(commands.slots[name] for name in kernel.pointers)]
    slots += commands.offsets() if kernel.packed else []
    given: list[TensorSpec] = [commands.spec_of(slot) for slot in slots]
    widths = copy_widths(found, kernel, dict(zip(kernel.pointers, given, strict=False)))
    ragged = found.ports.lanes % tile.lanes != 0
    shared = shared_memory(spec.device)
    while text_of(kernel, widths, ragged).shared > shared:
        if tile.stages == 2:
            raise TooLarge(
                f"a tile of {kernel.operator.name!r} needs more than the {shared} bytes of shared "
                "memory that a block can have"
            )
        tile = replace(tile, stages=tile.stages - 1)
        kernel = replace(kernel, tile=tile)
    grid = found.groups * spec.sequence_count * (sizes["segments"] if kernel.cut else 1)
    fields = parameter_fields(kernel)
    format_ = struct.Struct(struct_format(fields))
    if grid >= 2**31 or format_.size > MAX_PARAMETERS:
        raise NotExpressible(f"a CUDA kernel for {grid} blocks with {len(fields)} parameters")
    tail = [*(sizes[name] for name in kernel.sizes()), -(-found.ports.lanes // tile.lanes)]
    tail += [found.ports.values[which] for which in kernel.strides()]
    function = launcher.load(source(kernel, widths, ragged), None, spec.device)
    names = [[*kernel.pointers, *([("offsets", 0)] if kernel.packed else [])]]
    title = (
        f"CUDA {what}{kernel.operator.name!r} (vectors), {grid} blocks, {function.shared_bytes} "
        "bytes shared"
    )
    commands.launch(
        LoadedVectorKernel(
            kernel, function, grid, names, format_, tail, 0, 0, 1,  # type: ignore[arg-type]
            tuple(t.low for t in given), title,
        ),
        slots,
    )  # fmt: skip
    return kernel


def copy_widths(
    found: Prepared, kernel: VectorKernel, given: dict[tuple[str, int], TensorSpec]
) -> Widths:
    """For each part of a leaf that has rows, the bytes that are copied at a time."""
    op, widths = kernel.vectors, []
    for role, k, port in kernel.ports:
        if role not in ("input", "cotangent"):
            continue
        leaf = LeafPart(role, k, 0, "", port)
        if leaf.is_staged and (port.lane or port.state):
            # Rows begin at a multiple of the block's lanes, and end with the last lane.
            present = op.size if port.state else math.gcd(found.ports.lanes, kernel.tile.lanes)
            width = width_of(leaf, found.ports.values, given[role, k].low, present)
            widths.append(((role, k, 0), width))
    return tuple(widths)
