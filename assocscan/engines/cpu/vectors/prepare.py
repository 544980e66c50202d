"""Executables of scans over vectors on the CPU: one call of a C++ kernel (`vector_scan.h`), and for
a backward pass the sums of what the workers added up.

One batch dimension is the lanes; the others, without the axis, are the rows. Leaves are read and
written as they lie, whatever their strides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....autodiff.vector_adjoint import backward_step
from ....errors import BackendError
from ....program.operator import Leaf
from ....program.vectors.vector_adjoint import VectorAdjoint
from ....program.vectors.vector_operator import VectorOperator, part_spans
from ...base.commands import Slot, SlotArgument
from ...base.executable import CommandList, Executable, converted
from ...base.explained_plan import Plan
from ...base.layout import Given, result_layout, tensors_by_name
from ...base.scan_spec import ScanSpec, TensorSpec
from ...base.vectors.gradients import gradient_shape, order_like
from ...base.vectors.prepare import set_to_zero
from ...base.vectors.results import end_of
from ..compiler import compiler_version, load
from .kernel import (
    WIDTH,
    Access,
    BackwardKernel,
    ForwardKernel,
    GradientAccess,
    chunk_steps,
)
from .results import carries_of
from .source import source

aten = torch.ops.aten
Spec = ScanSpec[VectorOperator]

OFFSETS = 6  # the position of the offsets' address in the arguments of `assocscan_run`
# Scans of fewer states (steps × chains × N) run on one thread (an estimate: they take about 30 µs).
SERIAL_STATES = 1 << 15
# The most operations of a step that are compiled (an estimate: a minute of GCC).
MAX_OPERATIONS = 4000


@dataclass(frozen=True)
class Sharing:
    """How threads share a scan.

    lane: the batch dimension of the lanes; None where there is no other dimension than the axis.
    rows: the other batch dimensions, without the axis. splits: into how many ranges of blocks the
    lanes of a row are cut.
    """

    lane: int | None
    rows: tuple[int, ...]
    lanes: int
    row_count: int
    blocks: int
    splits: int
    threads: int


def lane_dimension(
    spec: ScanSpec[VectorOperator], tensors: Sequence[TensorSpec | None]
) -> int | None:
    """The batch dimension of the lanes of a forward scan. Saved carries are laid out by it."""
    given, batch = tensors_by_name(spec, tensors), spec.batch
    others = [d for d in range(len(batch)) if d != spec.axis]
    return max(others, key=lambda d: lane_value(d, batch, given), default=None)


def share(spec: ScanSpec[VectorOperator | VectorAdjoint], size: int, lane: int | None) -> Sharing:
    batch = spec.batch
    others = [d for d in range(len(batch)) if d != spec.axis]
    rows = tuple(d for d in others if d != lane)
    lanes = 1 if lane is None else batch[lane]
    row_count = math.prod(batch[d] for d in rows)
    blocks = -(-lanes // WIDTH)
    work = spec.length * row_count * lanes * size
    wanted = torch.get_num_threads() if work > SERIAL_STATES else 1
    splits = min(blocks, -(-wanted // max(row_count, 1)))
    threads = max(1, min(wanted, row_count * splits))
    return Sharing(lane, rows, lanes, row_count, blocks, max(splits, 1), threads)


def lane_value(d: int, batch: tuple[int, ...], given: Given) -> tuple[float, int]:
    """How well a dimension serves as the lanes: the share of lanes in use, then the small stride of
    the leaves that vary along it."""
    size = batch[d]
    used = size / (-(-size // WIDTH) * WIDTH) if size else 0.0
    strides = [
        abs(t.strides[d]) for (role, _), t in given.items() if role == "input" and t.shape[d] > 1
    ]
    return used, -sum(strides)


def varies_along(t: TensorSpec, d: int | None) -> bool:
    return d is not None and t.shape[d] > 1 and t.strides[d] != 0


def prepare(spec: Spec, tensors: Sequence[TensorSpec | None]) -> Executable:
    """The executable of a forward scan.

    Raises BackendError where the compiler fails, or would take too long.
    """
    op = spec.operator
    given = tensors_by_name(spec, tensors)
    lane = op.lane if op.saves_carries else lane_dimension(spec, tensors)
    sharing = share(spec, op.size, lane)
    accesses = tuple(
        input_access(given.get(("input", k)), spec.axis, sharing) for k in range(len(op.inputs))
    )
    initial = spec.initial_leaves
    kernel = ForwardKernel(
        op, spec.exclusive, spec.begins_alone, initial or (), spec.final, accesses
    )  # fmt: skip
    check_cost(op.name, len(kernel.step(False).instructions))
    text = source(kernel)
    function = load(text, True, f"a kernel of operator {op.name!r}")
    commands = CommandList(spec, tensors)
    outputs, finals = result_layout(spec, given)
    out_slots = [commands.allocate(size, dtype, strides) for size, strides, dtype in outputs]
    final_slots = [commands.allocate(size, dtype) for size, dtype in finals]
    arguments = KernelArguments(spec, sharing, commands)
    for role, k in kernel.leaves:
        if role == "input":
            arguments.add(
                commands.slots["input", k] if given.get((role, k)) else None, op.inputs[k]
            )
        elif role == "output":
            arguments.add(out_slots[k], op.outputs[k])
        elif role == "init":
            arguments.add(commands.slots["init", k], op.state[k], carry=True)
        elif role == "final":
            arguments.add(final_slots[spec.final.index(k)], op.state[k], carry=True)
        else:
            out_slots.append(commands.allocate(*carries_of(spec)))
            arguments.add_whole(out_slots[-1])
    if sharing.row_count * sharing.lanes * spec.sequence_count:
        arguments.call(op.name, function)
    return commands.build(out_slots, final_slots, lambda: plan_of(spec, sharing, commands))


def input_access(t: TensorSpec | None, axis: int, sharing: Sharing) -> Access | None:
    if t is None:
        return None
    return Access(t.dtype, varies_along(t, axis), varies_along(t, sharing.lane))


def check_cost(name: str, operations: int) -> None:
    if operations > MAX_OPERATIONS:
        raise BackendError(
            f"one step of {name!r} has {operations} operations, and the compiler would take many "
            f"minutes: the limit of the cpu backend for vectors is {MAX_OPERATIONS}"
        )


class KernelArguments:
    """The arguments of `assocscan_run`, in the order that it documents; addresses are filled in by
    each run."""

    def __init__(
        self,
        spec: ScanSpec[VectorOperator | VectorAdjoint],
        sharing: Sharing,
        commands: CommandList,
    ) -> None:
        self.spec, self.sharing, self.commands = spec, sharing, commands
        sizes = [spec.batch[d] for d in sharing.rows]
        self.dims = len(sizes)
        self.template = [
            spec.length, sharing.lanes, sharing.threads, int(spec.reverse), self.dims,
            spec.sequence_count, 0, sharing.row_count, sharing.splits, sharing.blocks, *sizes,
        ]  # fmt: skip
        self.addresses: list[tuple[int, Slot]] = []
        if spec.sequences is not None:
            self.addresses.append((OFFSETS, commands.slots["offsets", 0]))

    def add(
        self, slot: Slot | None, leaf: Leaf, carry: bool = False, workers: bool = False
    ) -> None:
        """A leaf; None for one that is not read. carry: it has no axis, and a leading dimension for
        packed sequences. workers: it has a leading dimension for the workers."""
        if slot is None:
            self.template.extend([0] * (6 + self.dims))
            return
        spec, sharing = self.spec, self.sharing
        t = self.commands.spec_of(slot)
        strides = [s * t.itemsize if n > 1 else 0 for n, s in zip(t.shape, t.strides, strict=True)]
        worker = sequence = 0
        if workers:
            worker = t.nbytes // t.shape[0]
            strides = strides[1:]
        if carry:
            if t.ndim - len(leaf.shape) < len(spec.carry_batch):  # an init with fewer dimensions
                strides = [0] * (len(spec.carry_batch) + len(leaf.shape) - t.ndim) + strides
            if spec.sequences is not None:
                sequence, strides = strides[0], strides[1:]
            strides = [*strides[: spec.axis], 0, *strides[spec.axis :]]
        rank = len(spec.batch)
        state = strides[rank] if len(strides) > rank else 0
        self.addresses.append((len(self.template), slot))
        lane = 0 if sharing.lane is None else strides[sharing.lane]
        self.template += [0, strides[spec.axis], lane, state, sequence, worker]
        self.template += [strides[d] for d in sharing.rows]

    def add_whole(self, slot: Slot) -> None:
        """A tensor that the kernel addresses by itself."""
        self.addresses.append((len(self.template), slot))
        self.template.extend([0] * (6 + self.dims))

    def call(self, name: str, function: object) -> None:
        self.commands.call_host(name, function, self.template, self.addresses)  # type: ignore[arg-type]


def plan_of(
    spec: ScanSpec[VectorOperator | VectorAdjoint], sharing: Sharing, commands: CommandList
) -> Plan:
    op = spec.operator
    size = op.op.size if isinstance(op, VectorAdjoint) else op.size
    moved = sum(t.distinct_bytes for t in commands.specs if t is not None)
    steps = chunk_steps(size)
    return Plan(
        op.name, (sharing.row_count, spec.length, sharing.lanes), f"cpu ({compiler_version()})",
        f"{steps} steps x {size} states x {WIDTH} lanes in cache",
        f"{sharing.threads} threads over {sharing.row_count * sharing.splits} units", moved,
        "the same operations on every state: a loop over the states, SIMD over the lanes",
    )  # fmt: skip


# ---- Backward ----


@dataclass(frozen=True)
class Gradient:
    """The gradient of an input leaf: its shape, where dimensions along which the leaf does not vary
    (size 1 or stride 0) have size 1; and how it is written."""

    shape: tuple[int, ...]
    access: GradientAccess
    workers: int  # 0: written in place, in the leaf's dtype


def gradient_of(k: int, t: TensorSpec, spec: ScanSpec[VectorAdjoint], sharing: Sharing) -> Gradient:
    leaf, shape = spec.operator.op.inputs[k], gradient_shape(k, t, spec)
    # A size of 0 varies: there is no memory for a sum.
    time = shape[spec.axis] != 1
    lane = sharing.lane is not None and shape[sharing.lane] != 1
    is_shared = any(spec.batch[d] > 1 and shape[d] == 1 for d in sharing.rows)
    is_split = not lane and sharing.splits > 1
    adds = is_shared or is_split
    dtype = leaf.accumulator if adds else leaf.dtype
    return Gradient(shape, GradientAccess(dtype, time, lane, adds), sharing.threads if adds else 0)


def prepare_backward(
    spec: ScanSpec[VectorAdjoint], tensors: Sequence[TensorSpec | None]
) -> Executable:
    """The executable of a backward pass.

    spec: of the forward scan, with the adjoint as its operator; it has no `final`.
    tensors: the input leaves, the cotangents of `adjoint.cotangents`, the saved carries, the
        cotangents of `adjoint.seeded` (as carries), the forward scan's init, which the kernel does
        not read (the carries hold it), and the offsets.
    The outputs are the gradients of `adjoint.wanted`, with size 1 in the dimensions along which the
    leaf does not vary; the finals those of init, one for each state leaf that is carried.
    """
    adjoint = spec.operator
    op, inputs = adjoint.op, len(adjoint.op.inputs)
    commands = CommandList(spec, tensors)
    first_cotangent = inputs
    carries = adjoint.carries
    first_seed = carries + 1
    sharing = share(spec, op.size, adjoint.lane)
    ends = adjoint.ends
    gradients = []
    for k in adjoint.wanted:
        t = tensors[k]
        assert t is not None
        gradients.append(gradient_of(k, t, spec, sharing))
    cotangents = tensors[first_cotangent:carries]
    seeds = tensors[first_seed : first_seed + len(adjoint.seeded)]
    kernel = BackwardKernel(
        adjoint,
        tuple(input_access(t, spec.axis, sharing) for t in tensors[:inputs]),
        tuple(
            Access(t.dtype, varies_along(t, spec.axis), varies_along(t, sharing.lane))
            for t in cotangents if t is not None
        ),
        tuple(g.access for g in gradients),
        tuple(t.dtype for t in seeds if t is not None),
        ends,
    )  # fmt: skip
    steps = backward_step(adjoint, False)
    check_cost(adjoint.name, len(steps.recomputed.instructions) + len(steps.pulled.instructions))
    function = load(source(kernel), True, f"a kernel of operator {adjoint.name!r}")
    arguments = KernelArguments(spec, sharing, commands)
    results: list[Slot] = []
    end_slots: list[Slot] = []
    for role, k in kernel.leaves:
        if role == "input":
            arguments.add(k if tensors[k] is not None else None, op.inputs[k])
        elif role == "cotangent":
            arguments.add(first_cotangent + adjoint.cotangents.index(k), op.outputs[k])
        elif role == "carries":
            arguments.add_whole(carries)
        elif role == "seed":
            arguments.add(first_seed + adjoint.seeded.index(k), op.state[k], carry=True)
        elif role == "gradient":
            g, t = gradients[adjoint.wanted.index(k)], tensors[k]
            assert t is not None
            strides = order_like(t, g.shape)
            shape = g.shape
            if g.workers:
                shape, strides = (g.workers, *shape), (math.prod(shape), *strides)
            results.append(commands.allocate(shape, g.access.dtype, strides))
            arguments.add(results[-1], op.inputs[k], workers=bool(g.workers))
        else:
            end_slots.append(commands.allocate(*end_of(spec, k)))
            if not set(part_spans(op.state)[k]) <= set(adjoint.carry):
                commands.eager("zeros", set_to_zero, [end_slots[-1]])
            arguments.add(end_slots[-1], op.state[k], carry=True)
    if sharing.row_count * sharing.lanes * spec.sequence_count:
        arguments.call(adjoint.name, function)
    else:
        commands.eager("zeros", set_to_zero, results)
    for n, (k, g) in enumerate(zip(adjoint.wanted, gradients, strict=True)):
        if g.workers:
            results[n] = add_sum(commands, results[n], g, op.inputs[k].dtype)
    return commands.build(results, end_slots, lambda: plan_of(spec, sharing, commands))


def add_sum(commands: CommandList, slot: Slot, g: Gradient, dtype: torch.dtype) -> Slot:
    """The sum of the workers' gradients, in the leaf's dtype and with the strides of one worker's
    gradient: torch's sum would choose others where there are several workers."""
    parts = commands.spec_of(slot)
    total = TensorSpec(g.shape, parts.strides[1:], parts.dtype, parts.device)
    if parts.shape[0] == 1:
        found = commands.torch(aten.select.int, (SlotArgument(slot), 0, 0), total)
    else:
        out = commands.allocate(g.shape, parts.dtype, total.strides)
        arguments = (SlotArgument(slot), (0,), False, None, SlotArgument(out))
        found = commands.torch(aten.sum.IntList_out, arguments, total)
    return converted(commands, found, dtype)
