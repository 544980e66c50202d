"""Newton's method in one kernel: which scans it can solve, its tile, and the preparation of its
launch."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch

from ...autodiff.newton_operator import derive_newton
from ...engines.base.device_properties import processors
from ...engines.base.executable import CommandList, Executable
from ...engines.base.explained_plan import Plan
from ...engines.base.layout import CollapsedDim, Layout, lay_out, scalar_size, tensors_by_name
from ...engines.base.scan_spec import Name, ScanSpec, TensorSpec
from ...errors import BackendError, UnsupportedOperation
from ...program.operator import Operator
from .. import launcher, parameters
from ..kernel import CudaKernel, CudaLeaf, LanesTile, numbers_of, raw_words
from ..leaf_layout import copy_of, strides_of
from ..prepare import MAX_GRID, LoadedKernel, prepare_nothing
from .source import source

Spec = ScanSpec[Operator]
# What the kernel tells of a chain: its iterations, its windows that were walked, and its windows.
REPORT = 3
# The most numbers of a state: those of J and of the scan are in registers.
MOST_NUMBERS = 4
# Steps per thread, for states of one number; threads of more numbers have fewer.
ITEMS = 8
# The most warps of a block, and the most chains, which are adjacent in memory.
MOST_WARPS, MOST_CHAINS = 16, 8


def why_not(spec: Spec) -> str | None:
    """Why the kernel cannot solve this scan; None if it can."""
    op = spec.operator
    if spec.sequences is not None:
        return "sequences are packed"
    try:
        derive_newton(op)
    except UnsupportedOperation as error:
        return str(error)
    kinds = [op.combine.output_dtypes[c] for c in numbers_of(op)]
    if len(kinds) > MOST_NUMBERS:
        return f"a state has {len(kinds)} numbers, more than {MOST_NUMBERS}"
    if set(kinds) != {"f32"}:
        return "a state is not made of float32"
    return None


def prepare(spec: Spec, tensors: Sequence[TensorSpec | None]) -> Executable:
    """The commands of a solution: copies of inputs whose elements are spread widely, allocation of
    the results, one launch. `report` has REPORT numbers of every chain of the last run."""
    reason = why_not(spec)
    if reason is not None:
        raise BackendError(f"Newton's method has no kernel here: {reason}")
    given = tensors_by_name(spec, tensors)
    commands = CommandList(spec, tensors)
    layout = lay_out(spec, given)
    if spec.length == 0:
        return prepare_nothing(commands, layout)
    spread = [name for name, walk in layout.leaves.items() if walk.copy]
    for name in spread:
        copy = copy_of(given[name], spec, name, layout.order)
        commands.slots[name] = commands.copy(commands.slots[name], copy)
        given = {**given, name: copy}
    if spread:
        layout = lay_out(spec, given)
    built = build(spec, layout)
    outputs, finals = commands.allocate_results(layout)
    report = torch.zeros((spec.chains, REPORT), dtype=torch.int32, device=spec.device)
    commands.slots["report", 0] = commands.constant(report)
    if spec.chains:
        commands.launch(built, [commands.slots[name] for names in built.names for name in names])
    made = commands.build(outputs, finals, lambda: plan_of(spec, layout, built))
    made.report = report
    return made


def build(spec: Spec, layout: Layout) -> LoadedKernel:
    """The loaded kernel and its parameters."""
    lanes = layout.rows[-1] if layout.rows else None
    outer = layout.rows[:-1]
    chains = math.prod(row.size for row in layout.rows)
    if chains >= 2**31 - MAX_GRID:
        raise BackendError(f"the cuda backend cannot run: {chains} chains are too many")
    kernel = CudaKernel(
        spec.operator, choose_tile(spec, chains, lanes), "NEWTON", spec.reverse, False, len(outer),
        spec.initial_leaves, spec.final, (), (),
        tuple(
            (w.role, w.number, CudaLeaf(w.dtype, w.component_offsets, scalar_size(w.dtype)))
            for w in layout.leaves.values()
        ),
        newton=spec.newton,
    )  # fmt: skip
    tile = kernel.tile
    assert isinstance(tile, LanesTile)
    function = launcher.load(source(kernel), kernel, spec.device)
    values: dict[str, int | Sequence[int]] = dict.fromkeys(
        (field.name for field in parameters.COUNTS), 0
    )
    values |= {"length": spec.length, "channels": lanes.size if lanes else 1, "chains": chains,
               "outer_size": [row.size for row in outer] or [1]}  # fmt: skip
    for role in ("input", "output", "init", "boundary", "final"):
        values.update(strides_of(role, kernel, layout, spec, lanes, outer))
    resident = function.blocks_per_processor * processors(spec.device)
    names: list[list[Name]] = [*kernel.pointers(), [("report", 0)]]
    return LoadedKernel(
        kernel, function, min(resident, -(-chains // tile.block_channels)), names,
        struct.Struct(parameters.struct_format(parameters.fields(kernel))),
        parameters.shape_values(kernel, values), 0, 0, 1,
    )  # fmt: skip


def choose_tile(spec: Spec, chains: int, lanes: CollapsedDim | None) -> LanesTile:
    """How many chains share a block, how many warps it has, and how many steps a thread takes.

    A multiprocessor has one block. With few chains each has one to itself, whose windows are long.
    With more, adjacent chains share one: sectors of memory are read once, and windows are shorter."""
    count = len(numbers_of(spec.operator))
    share = -(-chains // processors(spec.device))  # of a multiprocessor
    together = 1
    while 2 * together <= min(share, MOST_CHAINS, lanes.size if lanes else 1):
        together *= 2
    items = max(1, ITEMS // count)
    warps = MOST_WARPS
    while warps > 1 and 32 // together * warps * items >= 2 * spec.length:
        warps //= 2
    return LanesTile(32 * warps, together, 1, items, 0)


def plan_of(spec: Spec, layout: Layout, built: LoadedKernel) -> Plan:
    tile = built.kernel.tile
    assert isinstance(tile, LanesTile)
    warps, chains = tile.threads // 32, tile.block_channels
    return Plan(
        spec.operator.name, (spec.chains, spec.length, 1), "cuda (newton)",
        f"{32 // chains * warps * tile.items} steps of {chains} chains, {warps} warps",
        f"{built.grid} blocks", layout.bytes_moved(spec.batch),
        "windows are solved by Newton's method, and walked where it does not converge",
    )  # fmt: skip
