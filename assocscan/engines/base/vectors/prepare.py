"""The tensors of a scan over vectors, and of its backward pass: what is allocated, how it lies, and
the kernel that an engine's tile makes of it. The engine adds the launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ....program.vectors.vector_adjoint import VectorAdjoint
from ....program.vectors.vector_operator import VectorOperator, part_spans
from ..commands import Slot, SlotArgument
from ..device_properties import processors
from ..executable import CommandList, Executable, converted
from ..explained_plan import Plan
from ..layout import result_layout, tensors_by_name
from ..scan_spec import ScanSpec, TensorSpec, dense_strides
from .gradients import Gradient, gradient_of
from .kernel import BackwardKernel, ForwardKernel, padded
from .ports import Ports, best_lanes
from .results import end_of, gpu_carries

aten = torch.ops.aten
Spec = ScanSpec[VectorOperator]
Tensors = Sequence[TensorSpec | None]


@dataclass
class Prepared:
    """A kernel and its tensors, before the launch.

    outputs, finals: the slots of the results. sums: of the results by number, those that the
    kernel's programs leave in parts. segments: into which the axis is cut.
    """

    spec: ScanSpec[Any]
    commands: CommandList
    ports: Ports
    kernel: ForwardKernel | BackwardKernel
    outputs: list[Slot] = field(default_factory=list)
    finals: list[Slot] = field(default_factory=list)
    sums: dict[int, tuple[Gradient, torch.dtype]] = field(default_factory=dict)
    segments: int = 1

    @property
    def groups(self) -> int:
        """The programs for one sequence or segment: a block of lanes of a row each."""
        lanes: int = self.kernel.tile.lanes
        return self.ports.rows * -(-self.ports.lanes // lanes)

    def complete_kernel(self) -> ForwardKernel | BackwardKernel:
        """The kernel with the ports of all tensors."""
        ports, spec = self.ports, self.spec
        wide = max(ports.reach, spec.chains, spec.length) >= 2**31 - 2**16
        self.kernel = replace(self.kernel, ports=tuple(ports.found), wide=wide)
        return self.kernel

    def slots(self) -> list[Slot]:
        """The tensors of the launch, in the order of the kernel's pointers."""
        commands = self.commands
        return [*(commands.slots[name] for name in self.kernel.pointers), *commands.offsets()]

    def sizes(self) -> dict[str, int]:
        """The integer arguments by name."""
        spec, ports = self.spec, self.ports
        found = {"length": spec.length, "lanes": ports.lanes, "sequences": spec.sequence_count,
                 "rows": ports.rows, "padded": padded(ports.lanes)}  # fmt: skip
        return found | {f"size{n}": spec.batch[d] for n, d in enumerate(ports.outer)}

    def set_to_zero(self) -> None:
        """In place of the launch, where there is nothing to scan."""
        if isinstance(self.kernel, BackwardKernel):
            self.commands.eager("zeros", set_to_zero, self.outputs)

    def build(self, engine: str, tile: str) -> Executable:
        """The executable, with the sums after the launch."""
        for n, (gradient, dtype) in self.sums.items():
            self.outputs[n] = add_sum(self.commands, self.outputs[n], gradient, dtype)
        return self.commands.build(self.outputs, self.finals, lambda: self.plan(engine, tile))

    def plan(self, engine: str, tile: str) -> Plan:
        spec, ports, commands = self.spec, self.ports, self.commands
        found = [commands.specs[slot] for slot in commands.slots.values()]
        moved = sum(t.distinct_bytes for t in found if t is not None)
        return Plan(
            spec.operator.name, (ports.rows, spec.length, ports.lanes), f"{engine} (vectors)",
            tile, f"{self.groups * spec.sequence_count * self.segments} programs on "
            f"{processors(spec.device)} multiprocessors", moved,
            f"the same operations on every state: a tile of lanes and states walks {self.walked}",
        )  # fmt: skip

    @property
    def walked(self) -> str:
        """What a tile walks."""
        if self.segments == 1:
            return "the axis"
        if self.spec.segments is not None:
            totals = ", whose totals are given"
        elif self.kernel.walks:
            totals = ", after their totals"
        else:
            totals = "; their totals are then combined"
        return f"each of {self.segments} segments of the axis{totals}"


def lane_dimension(spec: Spec, tensors: Tensors) -> int | None:
    """The batch dimension of the lanes, by which saved carries are laid out."""
    return best_lanes(spec.batch, spec.axis, tensors_by_name(spec, tensors))


def forward_lane(spec: Spec, tensors: Tensors) -> int | None:
    """The batch dimension of a forward scan's lanes."""
    return spec.operator.lane if spec.operator.saves_carries else lane_dimension(spec, tensors)


def forward(spec: Spec, tensors: Tensors, tile: Any) -> Prepared:
    """A forward scan."""
    op, given = spec.operator, tensors_by_name(spec, tensors)
    initial = spec.initial_leaves
    lane = forward_lane(spec, tensors)
    ports = Ports(spec.batch, spec.axis, lane, op.size, spec.sequences is not None)
    commands = CommandList(spec, tensors)
    slots = commands.slots
    kernel = ForwardKernel(
        tile, spec.reverse, len(ports.outer), ports.packed, False, spec.begins_alone,
        tuple(op.carry_parts(spec.final)), (), op, spec.exclusive, initial or (), spec.final,
    )  # fmt: skip
    out_slots, final_slots = commands.allocate_all(*result_layout(spec, given))
    for (role, k), t in given.items():
        ports.add(role, k, t, spec.leaf((role, k)), carry=role == "init")
    for k, slot in enumerate(out_slots):
        ports.add("output", k, commands.spec_of(slot), op.outputs[k], lane=True)
    for k, slot in zip(spec.final, final_slots, strict=True):
        ports.add("final", k, commands.spec_of(slot), op.state[k], lane=True, carry=True)
    if op.saves_carries:
        shape, dtype = gpu_carries(spec)
        assert shape[-1] == kernel.carry_size(kernel.carry)  # whatever the engine's tile is
        slots["carries", 0] = commands.allocate(shape, dtype)
        ports.add_whole("carries", commands.spec_of(slots["carries", 0]))
        out_slots.append(slots["carries", 0])
    return Prepared(spec, commands, ports, kernel, out_slots, final_slots)


def backward(
    spec: ScanSpec[VectorAdjoint], tensors: Tensors, tile: Any, segments: int = 1
) -> Prepared:
    """A backward pass, with the tensors and the results of the CPU's
    (`engines/cpu/vectors/prepare.prepare_backward`)."""
    adjoint, op = spec.operator, spec.operator.op
    ports = Ports(spec.batch, spec.axis, adjoint.lane, op.size, spec.sequences is not None)
    kernel = BackwardKernel(
        tile, spec.reverse, len(ports.outer), ports.packed, False, adjoint.first,
        tuple(adjoint.carry), (), adjoint, adjoint.ends,
    )  # fmt: skip
    commands = backward_commands(spec, tensors)
    slots = commands.slots
    for k, leaf in enumerate(op.inputs):
        t = tensors[k]
        if t is not None:
            ports.add("input", k, t, leaf)
    for k in adjoint.cotangents:
        ports.add("cotangent", k, commands.spec_of(slots["cotangent", k]), op.outputs[k])
    ports.add_whole("carries", commands.spec_of(slots["carries", 0]))
    for k in adjoint.seeded:
        t = commands.spec_of(slots["seed", k]).expand((*spec.carry_batch, *op.state[k].shape))
        ports.add("seed", k, t, op.state[k], carry=True)
    found = Prepared(spec, commands, ports, kernel, segments=segments)
    for n, k in enumerate(adjoint.wanted):
        g = gradient_of(k, tensors[k], spec, ports, tile, segments)
        slots["gradient", k] = commands.allocate(g.partial, g.dtype, g.strides)
        found.outputs.append(slots["gradient", k])
        if g.dims:
            found.sums[n] = g, op.inputs[k].dtype
        t = commands.spec_of(slots["gradient", k])
        ports.add("gradient", k, t, op.inputs[k], lane=g.lane, leading=g.leading)
    found.finals = allocate_ends(commands)
    for k in kernel.ends:
        ports.add("end", k, commands.spec_of(slots["end", k]), op.state[k], lane=True, carry=True)
    return found


def backward_commands(spec: ScanSpec[VectorAdjoint], tensors: Tensors) -> CommandList:
    """The commands of a backward pass, with the roles of its tensors in `slots`: after the inputs
    the cotangents of outputs, the saved carries, the cotangents of finals ("seed")."""
    commands, adjoint = CommandList(spec, tensors), spec.operator
    cotangents = enumerate(adjoint.cotangents, len(adjoint.op.inputs))
    seeds = enumerate(adjoint.seeded, adjoint.carries + 1)
    commands.slots.update({("cotangent", k): slot for slot, k in cotangents})
    commands.slots["carries", 0] = adjoint.carries
    commands.slots.update({("seed", k): slot for slot, k in seeds})
    return commands


def allocate_ends(commands: CommandList) -> list[Slot]:
    """Allocate the gradients of init, and enter them in `slots`. Kernels write the parts that are
    carried; where there are others, all are set to zero first."""
    spec: ScanSpec[VectorAdjoint] = commands.spec
    adjoint, found = spec.operator, list[Slot]()
    for k in adjoint.ends:
        found.append(commands.allocate(*end_of(spec, k)))
        commands.slots["end", k] = found[-1]
        if not set(part_spans(adjoint.op.state)[k]) <= set(adjoint.carry):
            commands.eager("zeros", set_to_zero, found[-1:])
    return found


def set_to_zero(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a scan over nothing."""
    for t in tensors:
        t.zero_()
    return []


def add_sum(commands: CommandList, slot: Slot, g: Gradient, dtype: torch.dtype) -> Slot:
    """The sum of what the programs added up, in the leaf's dtype."""
    parts = commands.spec_of(slot)
    sizes = [n for d, n in enumerate(parts.shape) if d not in g.dims]
    total = TensorSpec.dense(sizes, parts.dtype, parts.device)
    found = commands.torch(aten.sum.dim_IntList, (SlotArgument(slot), g.dims), total)
    found = converted(commands, found, dtype)
    shaped = TensorSpec(g.shape, dense_strides(g.shape), dtype, parts.device)
    found = commands.torch(aten.reshape.default, (SlotArgument(found), g.shape), shaped)
    if g.layout == shaped.strides:
        return found
    return commands.copy(found, replace(shaped, strides=g.layout))
