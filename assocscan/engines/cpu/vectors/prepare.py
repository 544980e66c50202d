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
from ....program.vectors.vector_adjoint import VectorAdjoint
from ....program.vectors.vector_operator import VectorOperator
from ...base.commands import Slot, SlotArgument
from ...base.executable import CommandList, Executable, converted
from ...base.explained_plan import Plan
from ...base.layout import Given, result_layout, tensors_by_name
from ...base.scan_spec import ScanSpec, TensorSpec
from ...base.vectors.gradients import gradient_shape, order_like
from ...base.vectors.prepare import allocate_ends, backward_commands, set_to_zero
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

CARRIES = ("init", "final", "seed", "end")  # the roles of tensors that are carries
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
    out_slots, final_slots = commands.allocate_all(*result_layout(spec, given))
    if op.saves_carries:
        out_slots.append(commands.allocate(*carries_of(spec)))
        commands.slots["carries", 0] = out_slots[-1]
    arguments = KernelArguments(spec, sharing, commands)
    for role, k in kernel.leaves:
        arguments.add(role, k)
    if sharing.row_count * sharing.lanes * spec.sequence_count:
        arguments.call(op.name, function)
    return commands.build(out_slots, final_slots, lambda: plan_of(spec, sharing, commands))


def input_access(t: TensorSpec | None, axis: int, sharing: Sharing) -> Access | None:
    return None if t is None else access_of(t, axis, sharing)


def access_of(t: TensorSpec, axis: int, sharing: Sharing) -> Access:
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

    def add(self, role: str, k: int, workers: bool = False) -> None:
        """The tensor with this role and number in `commands.slots`. workers: it has a leading
        dimension for the workers."""
        slot = self.commands.slots[role, k]
        t = self.commands.specs[slot]
        if t is not None:
            self.addresses.append((len(self.template), slot))
        if t is None or role == "carries":  # not read, or addressed by the kernel itself
            self.template.extend([0] * (6 + self.dims))
            return
        spec, sharing = self.spec, self.sharing
        strides = [s * t.itemsize if n > 1 else 0 for n, s in zip(t.shape, t.strides, strict=True)]
        worker = sequence = 0
        if workers:
            worker = t.nbytes // t.shape[0]
            strides = strides[1:]
        if role in CARRIES:  # without the axis, with a leading dimension for packed sequences
            rank = len(spec.carry_batch) + len(spec.operator.state[k].shape)
            strides = [0] * (rank - t.ndim) + strides  # of an init with fewer dimensions
            if spec.sequences is not None:
                sequence, strides = strides[0], strides[1:]
            strides = [*strides[: spec.axis], 0, *strides[spec.axis :]]
        rank = len(spec.batch)
        state = strides[rank] if len(strides) > rank else 0
        lane = 0 if sharing.lane is None else strides[sharing.lane]
        self.template += [0, strides[spec.axis], lane, state, sequence, worker]
        self.template += [strides[d] for d in sharing.rows]

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
    op, commands = adjoint.op, backward_commands(spec, tensors)
    sharing, slots = share(spec, op.size, adjoint.lane), commands.slots
    given = {k: commands.spec_of(k) for k in adjoint.wanted}
    gradients = {k: gradient_of(k, t, spec, sharing) for k, t in given.items()}
    cotangents = [commands.spec_of(slots["cotangent", k]) for k in adjoint.cotangents]
    kernel = BackwardKernel(
        adjoint,
        tuple(input_access(t, spec.axis, sharing) for t in tensors[: len(op.inputs)]),
        tuple(access_of(t, spec.axis, sharing) for t in cotangents),
        tuple(g.access for g in gradients.values()),
        tuple(commands.spec_of(slots["seed", k]).dtype for k in adjoint.seeded),
        adjoint.ends,
    )
    steps = backward_step(adjoint, False)
    check_cost(adjoint.name, len(steps.recomputed.instructions) + len(steps.pulled.instructions))
    function = load(source(kernel), True, f"a kernel of operator {adjoint.name!r}")
    for k, g in gradients.items():
        shape, strides = g.shape, order_like(given[k], g.shape)
        if g.workers:
            shape, strides = (g.workers, *shape), (math.prod(shape), *strides)
        slots["gradient", k] = commands.allocate(shape, g.access.dtype, strides)
    results, ends = [slots["gradient", k] for k in gradients], allocate_ends(commands)
    arguments = KernelArguments(spec, sharing, commands)
    for role, k in kernel.leaves:
        arguments.add(role, k, workers=role == "gradient" and gradients[k].workers > 0)
    if sharing.row_count * sharing.lanes * spec.sequence_count:
        arguments.call(adjoint.name, function)
    else:
        commands.eager("zeros", set_to_zero, results)
    for n, (k, g) in enumerate(gradients.items()):
        if g.workers:
            results[n] = add_sum(commands, results[n], g, op.inputs[k].dtype)
    return commands.build(results, ends, lambda: plan_of(spec, sharing, commands))


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
