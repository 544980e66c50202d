"""Executables of scans over vectors by Triton: one kernel; for a backward pass, besides, the sums
of what the kernel's programs added up.

One batch dimension is the lanes. A program has a block of lanes and walks the axis; leaves are read
and written as they lie, whatever their strides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ....autodiff.vector_adjoint import backward_step
from ....errors import BackendError
from ....program.cpp_and_triton_expressions import TRITON
from ....program.program_builder import Program
from ....program.vectors.state_axis import REDUCTIONS
from ....program.vectors.vector_adjoint import VectorAdjoint
from ....program.vectors.vector_operator import parts
from ...base.device_properties import processors
from ...base.executable import Executable
from ...base.scan_spec import ScanSpec
from ...base.vectors import prepare as tensors_of
from ...base.vectors.kernel import CHUNK, BackwardKernel, carry_dtype, padded
from ...base.vectors.prepare import Prepared, Spec, Tensors
from ..loader import load
from ..prepare import LoadedKernel
from .lane_sums import is_summed
from .source import source
from .tile import KEPT_CARRIES, choose_tile

# A multiprocessor has room for 8 warps whose threads take all of 255 registers, for 12 of 168.
WARPS_OF_WIDE_THREADS, FEWER_REGISTERS = 8, 168
# The most operations of a step that are compiled (an estimate).
MAX_OPERATIONS = 1000


def prepare(spec: Spec, tensors: Tensors) -> Executable:
    """The executable of a forward scan. Raises BackendError where Triton cannot express it."""
    op = spec.operator
    check_programs(op.name, op.lift, op.combine, op.lower)
    return launched(tensors_of.forward(spec, tensors, choose_tile(op.size, False)))


def prepare_backward(spec: ScanSpec[VectorAdjoint], tensors: Tensors) -> Executable:
    """The executable of a backward pass."""
    adjoint = spec.operator
    step, tile = backward_step(adjoint, False), choose_tile(adjoint.op.size, True)
    check_programs(adjoint.name, step.recomputed, step.pulled)
    found = tensors_of.backward(spec, tensors, tile)
    ports, commands, kernel = found.ports, found.commands, found.kernel
    size = kernel.carry_size(kernel.carry)
    rows = ports.rows * spec.sequence_count
    shape = (rows, KEPT_CARRIES, padded(ports.lanes), size)
    commands.slots["scratch", 0] = commands.allocate(shape, carry_dtype(adjoint.op))
    ports.add_whole("scratch", commands.spec_of(commands.slots["scratch", 0]))
    add_partials(found)
    return launched(found)


def add_partials(found: Prepared) -> None:
    """Memory for the sums of gradients over the lanes of each warp."""
    summed = {k for role, k, port in found.ports.found if role == "gradient" and is_summed(port)}
    count = sum(parts(found.kernel.vectors.inputs[k]) for k in summed)
    if count:
        tile, commands = found.kernel.tile, found.commands
        programs = found.groups * found.spec.sequence_count
        shape = (programs, count, CHUNK, tile.warps, tile.states)
        slot = commands.allocate(shape, carry_dtype(found.kernel.vectors))
        commands.slots["partials", 0] = slot
        found.ports.add_whole("partials", commands.spec_of(slot))


def most_registers(kernel: Any, programs: int, device: torch.device) -> int | None:
    """A limit to the registers of a thread, for a backward pass with more warps than fit on the GPU
    at once without it."""
    warps = programs * kernel.tile.warps
    crowded = warps > processors(device) * WARPS_OF_WIDE_THREADS
    return FEWER_REGISTERS if crowded and isinstance(kernel, BackwardKernel) else None


def check_programs(name: str, *programs: Program) -> None:
    """Raise BackendError for programs that Triton cannot express, or that take long to compile."""
    operations = sum(len(program.instructions) for program in programs)
    if operations > MAX_OPERATIONS:
        raise BackendError(
            f"one step of {name!r} has {operations} operations; the limit of Triton's kernels over "
            f"vectors is {MAX_OPERATIONS}"
        )
    for program in programs:
        rest = [i for i in program.instructions if i.op not in REDUCTIONS]
        lacking = TRITON.unsupported(replace(program, instructions=tuple(rest)))
        if lacking is not None:
            raise BackendError(f"Triton cannot express {lacking!r}")


def launched(found: Prepared) -> Executable:
    """The executable that launches the kernel on the tensors of its ports."""
    tile = found.kernel.tile
    tile = replace(tile, full=found.ports.lanes % tile.lanes == 0)
    found.kernel = replace(found.kernel, tile=tile)
    kernel = found.complete_kernel()
    if found.spec.chains:
        sizes = found.sizes()
        integers = [sizes[name] for name in kernel.sizes()]
        integers += [found.ports.values[which] for which in kernel.strides()]
        count = found.groups * found.spec.sequence_count
        registers = most_registers(kernel, count, found.spec.device)
        built = LoadedKernel(  # instructions are the limit, so that products and sums are fused
            load(source(kernel)), kernel, (count, 1, 1), kernel.pointers, integers, fused=True,
            registers=registers,
        )  # fmt: skip
        found.commands.launch(built, found.slots())
    else:
        found.set_to_zero()
    shown = f"{tile.lanes} lanes x {kernel.vectors.size} states, {tile.warps} warps"
    return found.build("triton", shown)
