"""Executables of scans over vectors by CUDA: one kernel; for a backward pass, besides, the sums of
what the kernel's blocks added up."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import Any

from ...autodiff.vector_adjoint import backward_step
from ...engines.base.device_properties import processors, shared_memory
from ...engines.base.executable import Executable
from ...engines.base.scan_spec import ScanSpec, TensorSpec
from ...engines.base.vectors import prepare as tensors_of
from ...engines.base.vectors.prepare import Prepared, Spec, Tensors
from ...program.vectors.vector_adjoint import VectorAdjoint
from .. import launcher
from ..parameters import struct_format
from ..prepare import LoadedKernel
from .leaves import LeafPart, width_of
from .source import source, text_of
from .step_graph import NotExpressible
from .text import Widths, parameter_fields
from .tile import VectorTile, choose_tile

# The most operations of a step that are compiled, and of one whose states are kept for a whole
# group of steps (estimates).
MAX_OPERATIONS, FEW_OPERATIONS = 400, 60
MAX_PARAMETERS = 4096  # bytes


def prepare(spec: Spec, tensors: Tensors) -> Executable:
    """The executable of a forward scan. Raises NotExpressible for operators that these kernels
    cannot compute."""
    op = spec.operator
    check_size(op.name, sum(len(p.instructions) for p in (op.lift, op.combine, op.lower)))
    return launched(tensors_of.forward(spec, tensors, tile_for(spec, op.size, False)))


def prepare_backward(spec: ScanSpec[VectorAdjoint], tensors: Tensors) -> Executable:
    """The executable of a backward pass. Raises NotExpressible as `prepare`."""
    adjoint = spec.operator
    step, tile = backward_step(adjoint, False), tile_for(spec, adjoint.op.size, True)
    operations = len(step.recomputed.instructions) + len(step.pulled.instructions)
    check_size(adjoint.name, operations)
    if operations > FEW_OPERATIONS:
        tile = replace(tile, group=tile.group // 2)
    return launched(tensors_of.backward(spec, tensors, tile))


def tile_for(spec: ScanSpec[Any], size: int, backward: bool) -> VectorTile:
    return choose_tile(size, backward, spec.chains, processors(spec.device))


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


def launched(found: Prepared) -> Executable:
    """The executable that launches the kernel on the tensors of its ports."""
    spec, commands, tile = found.spec, found.commands, found.kernel.tile
    if not (spec.chains and spec.length and spec.sequence_count):
        raise NotExpressible("a CUDA kernel over vectors needs at least one step")
    kernel = found.complete_kernel()
    slots = found.slots()
    given: list[TensorSpec] = [commands.spec_of(slot) for slot in slots]
    widths = copy_widths(found, dict(zip(kernel.pointers, given, strict=False)))
    ragged = found.ports.lanes % tile.lanes != 0
    shared = shared_memory(spec.device)
    while text_of(kernel, widths, ragged).shared > shared:
        if tile.stages == 2:
            raise NotExpressible(
                f"a tile of {kernel.operator.name!r} needs more than the {shared} bytes of shared "
                "memory that a block can have"
            )
        tile = replace(tile, stages=tile.stages - 1)
        kernel = found.kernel = replace(kernel, tile=tile)
    grid = found.groups * spec.sequence_count
    fields = parameter_fields(kernel)
    format_ = struct.Struct(struct_format(fields))
    if grid >= 2**31 or format_.size > MAX_PARAMETERS:
        raise NotExpressible(f"a CUDA kernel for {grid} blocks with {len(fields)} parameters")
    sizes = found.sizes()
    blocks = -(-found.ports.lanes // tile.lanes)
    tail = [*(sizes[name] for name in kernel.sizes()), blocks]
    tail += [found.ports.values[which] for which in kernel.strides()]
    function = launcher.load(source(kernel, widths, ragged), None, spec.device)
    names = [[*kernel.pointers, *([("offsets", 0)] if kernel.packed else [])]]
    title = (
        f"CUDA {kernel.operator.name!r} (vectors), {grid} blocks, {function.shared_bytes} bytes "
        "shared"
    )
    commands.launch(
        LoadedVectorKernel(
            kernel, function, grid, names, format_, tail, 0, 0, 1,  # type: ignore[arg-type]
            tuple(t.low for t in given), title,
        ),
        slots,
    )  # fmt: skip
    return found.build("cuda", tile.shown)


def copy_widths(found: Prepared, given: dict[tuple[str, int], TensorSpec]) -> Widths:
    """For each part of a leaf that has rows, the bytes that are copied at a time."""
    kernel, op, widths = found.kernel, found.kernel.vectors, []
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
