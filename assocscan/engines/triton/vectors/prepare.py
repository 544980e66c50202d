"""Executables of scans over vectors by Triton: one kernel; for a backward pass, besides, the sums
of what the kernel's programs added up.

One batch dimension is the lanes. A program has a block of lanes and walks the axis; leaves are read
and written as they lie, whatever their strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....autodiff.vector_adjoint import backward_step
from ....errors import BackendError
from ....program.cpp_and_triton_expressions import TRITON
from ....program.program_builder import Program
from ....program.vectors.state_axis import REDUCTIONS
from ....program.vectors.vector_adjoint import VectorAdjoint
from ....program.vectors.vector_operator import VectorOperator, part_spans
from ...base.commands import Slot
from ...base.device_properties import processors
from ...base.executable import CommandList, Executable
from ...base.explained_plan import Plan
from ...base.layout import result_layout, tensors_by_name
from ...base.scan_spec import ScanSpec, TensorSpec, dense_strides
from ..loader import load
from ..prepare import LoadedKernel
from .gradients import Gradient, gradient_of
from .kernel import BackwardKernel, ForwardKernel, VectorKernel, VectorTile, carry_dtype
from .ports import Ports, best_lanes
from .source import source

Spec = ScanSpec[VectorOperator]
Tensors = Sequence[TensorSpec | None]

# The values of a tile for each thread, the warps of a program, the most lanes of a block, and the
# steps of a chunk and of a group: after a sketch in CUDA whose fastest sizes these were.
VALUES, WARPS, MAX_LANES, CHUNK, TOGETHER = 4, 4, 32, 64, 8
# Steps of at most so many operations are recomputed TOGETHER at a time, longer ones half as many
# (sm_90: the selective scan's 22 take 198 registers; with gates they are 60, and 320 bytes of a
# thread's values are in local memory, or 104).
FEW_OPERATIONS = 48
# The most operations of a step that are compiled (an estimate).
MAX_OPERATIONS = 1000


def choose_tile(size: int) -> VectorTile:
    """For N states."""
    states = 1 << (size - 1).bit_length()
    lanes = max(1, min(MAX_LANES, 32 * WARPS * VALUES // states))
    warps = max(1, min(WARPS, lanes * states // (32 * VALUES)))
    return VectorTile(lanes, states, CHUNK, TOGETHER, warps)


def lane_dimension(spec: Spec, tensors: Tensors) -> int | None:
    """The batch dimension of the lanes, by which saved carries are laid out."""
    return best_lanes(spec.batch, spec.axis, tensors_by_name(spec, tensors))


def prepare(spec: Spec, tensors: Tensors) -> Executable:
    """The executable of a forward scan. Raises BackendError where Triton cannot express it."""
    op, given = spec.operator, tensors_by_name(spec, tensors)
    initial = spec.initial_leaves
    lane = op.lane if op.saves_carries else lane_dimension(spec, tensors)
    ports = Ports(spec.batch, spec.axis, lane, op.size, spec.sequences is not None)
    tile = choose_tile(op.size)
    commands = CommandList(spec, tensors)
    slots = commands.slots
    kernel = ForwardKernel(
        tile, spec.reverse, len(ports.outer), ports.packed, False,
        initial is None and not spec.exclusive, tuple(op.carry_parts(spec.final)), (),
        op, spec.exclusive, initial or (), spec.final,
    )  # fmt: skip
    check_programs(op.name, op.lift, op.combine, op.lower)
    outputs, finals = result_layout(spec, given)
    out_slots = [commands.allocate(size, dtype, strides) for size, strides, dtype in outputs]
    final_slots = [commands.allocate(size, dtype) for size, dtype in finals]
    slots.update({("output", k): slot for k, slot in enumerate(out_slots)})
    slots.update({("final", k): s for k, s in zip(spec.final, final_slots, strict=True)})
    for (role, k), t in given.items():
        ports.add(role, k, t, spec.leaf((role, k)), carry=role == "init")
    for k, slot in enumerate(out_slots):
        ports.add("output", k, commands.spec_of(slot), op.outputs[k], lane=True)
    for k, slot in zip(spec.final, final_slots, strict=True):
        ports.add("final", k, commands.spec_of(slot), op.state[k], lane=True, carry=True)
    if op.saves_carries:
        chunks = spec.length // tile.chunk + spec.sequence_count
        shape = (chunks, ports.rows, padded(ports.lanes), kernel.carry_size(kernel.carry))
        slots["carries", 0] = commands.allocate(shape, carry_dtype(op))
        ports.add_whole("carries", commands.spec_of(slots["carries", 0]))
        out_slots.append(slots["carries", 0])
    if spec.chains:
        launch(commands, kernel, ports, spec)
    return commands.build(out_slots, final_slots, lambda: plan_of(spec, ports, kernel, commands))


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


def groups(ports: Ports, tile: VectorTile) -> int:
    """The blocks of lanes in all rows."""
    return ports.rows * -(-ports.lanes // tile.lanes)


def padded(lanes: int) -> int:
    """How many lanes have memory for their carries: whole blocks of any size."""
    return -(-lanes // MAX_LANES) * MAX_LANES


def launch(commands: CommandList, kernel: VectorKernel, ports: Ports, spec: ScanSpec[Any]) -> None:
    """The kernel with these ports, on the tensors of their names."""
    wide = max(ports.reach, spec.chains, spec.length) >= 2**31 - 2**16
    kernel = replace(kernel, ports=tuple(ports.found), wide=wide)
    assert isinstance(kernel, (ForwardKernel, BackwardKernel))
    count = groups(ports, kernel.tile)
    sizes = {"length": spec.length, "lanes": ports.lanes, "sequences": spec.sequence_count,
             "rows": ports.rows, "padded": padded(ports.lanes)}  # fmt: skip
    sizes.update({f"size{n}": spec.batch[d] for n, d in enumerate(ports.outer)})
    integers = [sizes[name] for name in kernel.sizes()]
    integers += [ports.values[which] for which in kernel.strides()]
    built = LoadedKernel(
        load(source(kernel)), kernel, (count * spec.sequence_count, 1, 1), kernel.pointers, integers
    )
    commands.launch(built, [*(commands.slots[n] for n in kernel.pointers), *commands.offsets()])


def plan_of(spec: ScanSpec[Any], ports: Ports, kernel: VectorKernel, commands: CommandList) -> Plan:
    tile, moved = kernel.tile, 0
    for slot in commands.slots.values():
        t = commands.specs[slot]
        if t is not None:
            distinct = math.prod(n for n, s in zip(t.shape, t.strides, strict=True) if s != 0)
            moved += distinct * t.itemsize
    return Plan(
        spec.operator.name, (ports.rows, spec.length, ports.lanes), "triton (vectors)",
        f"{tile.lanes} lanes x {kernel.vectors.size} states, {tile.warps} warps",
        f"{groups(ports, tile) * spec.sequence_count} programs on {processors(spec.device)} "
        "multiprocessors", moved,
        "the same operations on every state: a tile of lanes and states walks the axis",
    )  # fmt: skip


# ---- Backward ----


def prepare_backward(spec: ScanSpec[VectorAdjoint], tensors: Tensors) -> Executable:
    """The executable of a backward pass, with the tensors and the results of the CPU's
    (`engines/cpu/vectors/prepare.prepare_backward`)."""
    adjoint, op = spec.operator, spec.operator.op
    ports = Ports(spec.batch, spec.axis, adjoint.lane, op.size, spec.sequences is not None)
    tile = choose_tile(op.size)
    kernel = BackwardKernel(
        tile, spec.reverse, len(ports.outer), ports.packed, False, adjoint.first,
        tuple(adjoint.carry), (), adjoint, adjoint.ends,
    )  # fmt: skip
    step = backward_step(adjoint, False)
    if len(step.recomputed.instructions) + len(step.pulled.instructions) > FEW_OPERATIONS:
        kernel = replace(kernel, tile=replace(tile, together=TOGETHER // 2))
    check_programs(adjoint.name, step.recomputed, step.pulled)
    commands = CommandList(spec, tensors)
    inputs, count = len(op.inputs), len(adjoint.cotangents)
    slots: dict[tuple[str, int], Slot] = commands.slots
    order = iter(range(inputs, len(tensors)))
    for k in range(inputs):
        t = tensors[k]
        if t is not None:
            ports.add("input", k, t, op.inputs[k])
    for k in adjoint.cotangents:
        slots["cotangent", k] = next(order)
        ports.add("cotangent", k, commands.spec_of(slots["cotangent", k]), op.outputs[k])
    slots["carries", 0] = inputs + count
    next(order)
    ports.add_whole("carries", commands.spec_of(slots["carries", 0]))
    for k in adjoint.seeded:
        slots["seed", k] = next(order)
        t = commands.spec_of(slots["seed", k]).expand((*spec.carry_batch, *op.state[k].shape))
        ports.add("seed", k, t, op.state[k], carry=True)
    gradients = [gradient_of(k, tensors[k], spec, ports, tile) for k in adjoint.wanted]
    results = []
    for k, g in zip(adjoint.wanted, gradients, strict=True):
        slots["gradient", k] = commands.allocate(g.partial, g.dtype, g.strides)
        results.append(slots["gradient", k])
        t = commands.spec_of(results[-1])
        ports.add("gradient", k, t, op.inputs[k], lane=g.lane, leading=g.leading)
    ends = []
    for k in kernel.ends:
        shape = (*spec.carry_batch, *op.state[k].shape)
        slots["end", k] = commands.allocate(shape, op.state[k].accumulator)
        ends.append(slots["end", k])
        if not set(part_spans(op.state)[k]) <= set(adjoint.carry):
            commands.eager("zeros", set_to_zero, [ends[-1]])
        ports.add("end", k, commands.spec_of(ends[-1]), op.state[k], lane=True, carry=True)
    size = kernel.carry_size(kernel.carry)
    shape = (ports.rows * spec.sequence_count, kernel.slots, padded(ports.lanes), size)
    slots["scratch", 0] = commands.allocate(shape, carry_dtype(op))
    ports.add_whole("scratch", commands.spec_of(slots["scratch", 0]))
    if spec.chains:
        launch(commands, kernel, ports, spec)
    else:
        commands.eager("zeros", set_to_zero, results)
    for n, g in enumerate(gradients):
        if g.dims:
            results[n] = add_sum(commands, results[n], g, op.inputs[adjoint.wanted[n]].dtype)
    return commands.build(results, ends, lambda: plan_of(spec, ports, kernel, commands))


def set_to_zero(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a scan over nothing."""
    for t in tensors:
        t.zero_()
    return []


def add_sum(commands: CommandList, slot: Slot, g: Gradient, dtype: torch.dtype) -> Slot:
    """The sum of what the programs added up, in the leaf's dtype."""
    total = sum_over(g.dims, g.shape, dtype)
    spec = TensorSpec(g.shape, dense_strides(g.shape), dtype, commands.spec.device)
    return commands.eager("the sum of the programs' gradients", total, [slot], [spec])[0]


def sum_over(
    dims: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    return lambda t: [t.sum(dims).to(dtype).reshape(shape)]
