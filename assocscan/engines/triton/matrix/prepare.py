"""The engine for matrices on GPUs: one program per chain, or per chunk of a chain.

    prepare            one kernel; a program walks its chain
    prepare_multipass  chunks of the axis are combined to totals, those are scanned, and every chunk
                       is scanned again from the carry before it
    prepare_auto       one of the two, by how many chains there are

A chunk is a packed sequence: the three passes of `prepare_multipass` are scans of this same engine,
on offsets of its own making, and only the axis is cut. For d×d matrices it does twice the products
of one walk, and as many more as there are chunks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ....program.matrix_operator import MatrixOperator
from ....program.operator import Leaf
from ...base.chunk_tables import cut_axis
from ...base.commands import Slot
from ...base.device_properties import processors
from ...base.executable import CommandList, Executable
from ...base.explained_plan import Plan
from ...base.layout import CollapsedDim, Layout, LeafStrides, lay_out, tensors_by_name
from ...base.persistent_tensors import make_lasting
from ...base.scan_spec import ScanSpec, TensorSpec
from ..kernel import Tile
from ..loader import load
from ..prepare import LoadedKernel, copy_spread, is_wide, unit
from ..tiles import forced_tile
from .kernel import MatrixKernel, Start, TilePort
from .source import source

Spec = ScanSpec[MatrixOperator]
Given = Sequence[TensorSpec | None]

# Programs per multiprocessor that are wanted, and the shortest axis that is cut for them: chosen by
# reason, not yet measured.
PROGRAMS = 2
LONG_AXIS = 64


def prepare_auto(spec: Spec, tensors: Given) -> Executable:
    """In chunks where chains are too few to fill the GPU and sequences are long enough (on
    average: of packed ones no more is known without waiting for the GPU)."""
    few = spec.chains < PROGRAMS * processors(spec.device)
    long = spec.length >= LONG_AXIS * max(spec.sequence_count, 1)
    return prepare_multipass(spec, tensors) if few and long else prepare(spec, tensors)


def prepare(spec: Spec, tensors: Given, fresh: TensorSpec | None = None) -> Executable:
    """One kernel. `fresh`: a last tensor, in addition to those of the spec, marks the sequences
    that start from their first element in place of init."""
    start: Start = "either" if fresh is not None else "fresh" if spec.init is None else "given"
    given = tensors_by_name(spec, tensors)
    layout = lay_out(spec, given)
    built = build(spec, layout, start)
    commands = CommandList(spec, tensors)
    slots = commands.slots
    if fresh is not None:
        slots["fresh", 0] = commands.new_slot(fresh)
    copy_spread(commands, layout, given, built.names)
    outputs, finals = commands.allocate_results(layout)
    if spec.chains:
        op = spec.operator
        for role, k in built.names:
            if role == "scratch":
                size = built.kernel.scratch_size * built.grid[0]
                slots[role, k] = commands.allocate((size,), op.accumulator)
            elif role in ("identity", "init") and (role, k) not in slots:
                slots[role, k] = commands.constant(identity(op, k, spec.device))
        commands.launch(built, [*(slots[name] for name in built.names), *commands.offsets()])
    return commands.build(outputs, finals, lambda: plan_of(spec, layout, built))


def plan_of(spec: Spec, layout: Layout, built: LoadedKernel) -> Plan:
    return Plan(
        spec.operator.name,
        (math.prod(row.size for row in layout.rows), spec.length, 1),
        "triton (matrices)",
        "one element",
        f"{built.grid[0]} programs on {processors(spec.device)} multiprocessors",
        layout.bytes_moved(spec.batch),
        "elements are matrices of 8 to 64: a program walks a chain with the carry in registers",
    )


@functools.lru_cache(maxsize=128)
def identity(op: MatrixOperator, leaf: int, device: torch.device) -> torch.Tensor:
    """The identity's leaf on the device."""
    return make_lasting(lambda: op.identity_tensor(leaf).to(device), device)


# One kernel.


def build(spec: Spec, layout: Layout, start: Start) -> LoadedKernel:
    """The kernel and its arguments."""
    op = spec.operator
    fills = start == "fresh" and op.identity is not None and (spec.exclusive or bool(spec.final))
    tile = forced_tile() or choose_tile(op)
    kernel = MatrixKernel(
        op, tile, choose_slice(spec.device), spec.reverse, spec.exclusive,
        len(layout.rows), start, fills, spec.final, (),
        spec.sequences is not None, is_wide(layout, spec),
    )  # fmt: skip
    kernel = replace(kernel, ports=tuple(ports(spec, layout, kernel)))
    sequences = spec.sequence_count
    programs = math.prod(row.size for row in layout.rows) * sequences
    return LoadedKernel(
        load(source(kernel)), kernel, (programs, 1, 1), kernel.pointers,
        integers(kernel, spec, layout, sequences),
    )  # fmt: skip


def ports(spec: Spec, layout: Layout, kernel: MatrixKernel) -> list[tuple[str, int, TilePort]]:
    """The ports of every leaf that the kernel reads or writes, in the order of its pointers."""
    op, count, carried = kernel.operator, len(kernel.operator.state), kernel.carry_leaves
    read = {v - count for v in kernel.needed if v >= count}
    if kernel.start != "given":
        read |= set(carried)
    found: list[tuple[str, int, TilePort]] = []
    for (role, k), walk in layout.leaves.items():
        if (role == "input" and k not in read) or (role == "init" and k not in carried):
            continue
        leaf = op.outputs[k] if role == "output" else op.state[k]
        element = tuple(unit(s) for s in element_strides(leaf, walk))
        outer = tuple(None if row.by_name[role, k] else 0 for row in layout.rows)
        step = unit(walk.strides[spec.axis])
        found.append((role, k, TilePort(walk.dtype, leaf.shape, element, step, outer)))
    # The identity stands wherever there is nothing else: one tensor for all chains.
    if kernel.start == "fresh" and not kernel.fills:
        return found
    missing = "identity" if kernel.start == "fresh" else "init"
    for k in carried:
        if (missing, k) not in layout.leaves:
            leaf = op.state[k]
            element = (1,) if len(leaf.shape) == 1 else (None, 1)
            outer = (0,) * len(layout.rows)
            found.append((missing, k, TilePort(op.accumulator, leaf.shape, element, 0, outer)))
    return found


def element_strides(leaf: Leaf, walk: LeafStrides) -> list[int]:
    """The strides of the element's own dimensions, from the distances of its components."""
    if len(leaf.shape) == 1:
        return [walk.component_offsets[1]]
    return [walk.component_offsets[leaf.shape[1]], walk.component_offsets[1]]


def integers(kernel: MatrixKernel, spec: Spec, layout: Layout, sequences: int) -> list[int]:
    """The integer arguments: sizes, then the strides that the kernel asks for."""
    values = {"length": spec.length, "sequences": sequences}
    values.update({f"size{d}": row.size for d, row in enumerate(layout.rows)})
    found = [values[name] for name in kernel.sizes()]
    for role, k, which in kernel.strides():
        walk = layout.leaves.get((role, k))
        if walk is None:  # the identity, one for all
            found.append(kernel.operator.state[k].shape[1] if which == "element0" else 0)
        elif which == "step":
            found.append(walk.strides[spec.axis])
        elif which == "sequence":
            found.append(walk.sequence)
        elif which.startswith("element"):
            leaf = kernel.port[role, k]
            strides = element_strides(Leaf(leaf.dtype, leaf.shape), walk)
            found.append(strides[int(which.removeprefix("element"))])
        else:
            row: CollapsedDim = layout.rows[int(which.removeprefix("outer"))]
            found.append(row.by_name[role, k])
    return found


def choose_tile(op: MatrixOperator) -> Tile:
    """One chain, one step; as many warps as the largest leaf needs for its registers."""
    largest = max(math.prod(leaf.shape) for leaf in op.state)
    return Tile(1, 1, 1, min(8, max(1, largest // 128)), stages=1)


def choose_slice(device: torch.device) -> int:
    """The terms of a product that are summed at a time; only NVIDIA's dot needs slices."""
    if torch.version.hip is not None or device.type == "xpu":
        return 0
    return 32


# Several.


def prepare_multipass(spec: Spec, tensors: Given) -> Executable:
    """In chunks, if there is more than one."""
    chunk_length = choose_chunk(spec.length, spec.chains, processors(spec.device))
    if spec.length <= chunk_length or spec.chains == 0:
        return prepare(spec, tensors)
    op = spec.operator
    commands = CommandList(spec, tensors)
    chunks, starts, fresh = cut_axis(commands, chunk_length)
    leaves = op.aggregate_leaves(spec.final)
    inputs = [commands.slots["input", k] for k in range(len(op.inputs))]
    count = commands.spec_of(chunks).shape[0] - 1

    totals = replace(
        spec, operator=op.showing(()), exclusive=False, init=None, from_identity=False,
        final=leaves, sequences=count,
    )  # fmt: skip
    first = prepare(totals, specs_of(commands, [*inputs, chunks]))
    _, carries = commands.inline(first, [*inputs, chunks])

    given = None if spec.init is None else [k for k in leaves if k in spec.init]
    prefixes = ScanSpec(
        op.carries(leaves), totals.carry_batch, 0, spec.device, spec.reverse, True,
        init=None if given is None else tuple(leaves.index(k) for k in given),
        from_identity=given is None, sequences=spec.sequences,
        final=tuple(n for n, k in enumerate(leaves) if k in spec.final),
    )  # fmt: skip
    slots = [*carries, *(commands.slots["init", k] for k in given or ())]
    slots += [] if starts is None else [starts]
    before, finals = commands.inline(prepare_auto(prefixes, specs_of(commands, slots)), slots)
    in_order = [k for k in leaves if k in spec.final]
    finals = [finals[in_order.index(k)] for k in spec.final]

    def plan() -> Plan:
        why = f"{spec.chains} chains would not fill the GPU: the axis is cut; {first.plan.why}"
        engine = f"triton (matrices, chunks of {chunk_length})"
        return replace(first.plan, engine=engine, why=why)

    if not op.outputs:
        return commands.build([], finals, plan)

    rescan = replace(spec, init=leaves, from_identity=False, final=(), sequences=count)
    slots = [*inputs, *before, chunks]
    mark = None if given is not None else commands.spec_of(fresh)
    last = prepare(rescan, specs_of(commands, slots), mark)
    outputs, _ = commands.inline(last, slots if mark is None else [*slots, fresh])
    return commands.build(outputs, finals, plan)


def specs_of(commands: CommandList, slots: Sequence[Slot]) -> list[TensorSpec | None]:
    return [commands.specs[k] for k in slots]


def choose_chunk(length: int, chains: int, multiprocessors: int) -> int:
    """How many steps a chunk has: enough chunks to fill the GPU, but no more than √(2 · length),
    where walking the totals would take as long as walking the chunks."""
    wanted = -(-PROGRAMS * multiprocessors // max(chains, 1))
    return -(-length // max(1, min(wanted, math.isqrt(2 * length))))
