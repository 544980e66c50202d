"""Newton's method in one kernel: which scans it can solve, its tile, and the preparation of its
launch."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...autodiff.newton_operator import derive_newton
from ...engines.base.device_properties import processors, shared_memory
from ...engines.base.executable import CommandList, Executable
from ...engines.base.explained_plan import Plan
from ...engines.base.layout import (
    CollapsedDim,
    Given,
    Layout,
    LeafStrides,
    lay_out,
    scalar_size,
    tensors_by_name,
)
from ...engines.base.scan_spec import Name, ScanSpec, TensorSpec
from ...errors import BackendError, UnsupportedOperation
from ...program.operator import Operator
from .. import launcher, parameters
from ..kernel import CudaKernel, CudaLeaf, LanesTile
from ..leaf_layout import copy_of, strides_of
from ..prepare import MAX_GRID, LoadedKernel, prepare_nothing
from .source import numbers_of, source

Spec = ScanSpec[Operator]
# What the kernel tells of a chain: its iterations, its windows that were walked, and its windows.
REPORT = 3
# The most numbers of a state: those of J and of the scan are in registers.
MOST_NUMBERS = 4
# Steps per thread, for states of one number; threads of more numbers have fewer.
ITEMS = 8
# Warps per chain where a multiprocessor has one chain, and the most warps of a block.
MOST_WARPS, BLOCK_WARPS = 8, 16
# Chains that are adjacent in memory share a block, so that the sectors in which they lie are read
# once.
MOST_CHAINS = 4


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
    built = build(spec, layout, given)
    outputs, finals = commands.allocate_results(layout)
    report = torch.zeros((spec.chains, REPORT), dtype=torch.int32, device=spec.device)
    commands.slots["report", 0] = commands.constant(report)
    if spec.chains:
        commands.launch(built, [commands.slots[name] for names in built.names for name in names])
    made = commands.build(outputs, finals, lambda: plan_of(spec, layout, built))
    made.report = report
    return made


def build(spec: Spec, layout: Layout, given: Given) -> LoadedKernel:
    """The loaded kernel and its parameters."""
    lanes = layout.rows[-1] if layout.rows else None
    outer = layout.rows[:-1]
    chains = math.prod(row.size for row in layout.rows)
    if chains >= 2**31 - MAX_GRID:
        raise BackendError(f"the cuda backend cannot run: {chains} chains are too many")
    tile = choose_tile(spec, chains, lanes)
    kernel = CudaKernel(
        spec.operator, tile, "NEWTON", spec.reverse, False, len(outer), spec.initial_leaves,
        spec.final, (), (), (), newton=spec.newton,
    )  # fmt: skip
    leaves = tuple(leaf_of(w, spec, tile, lanes, outer, given) for w in layout.leaves.values())
    kernel = replace(kernel, leaves=leaves)
    if kernel.shared_bytes > shared_memory(spec.device):
        narrow = tuple((role, k, replace(leaf, wide=False)) for role, k, leaf in leaves)
        kernel = replace(kernel, leaves=narrow)
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


def leaf_of(
    walk: LeafStrides, spec: Spec, tile: LanesTile, lanes: CollapsedDim | None,
    outer: Sequence[CollapsedDim], given: Given,
) -> tuple[str, int, CudaLeaf]:  # fmt: skip
    """A leaf. It is wide if the rows of a block's chains are pieces of 4, 8 or 16 bytes, at
    multiples of their size."""
    name, size = (walk.role, walk.number), scalar_size(walk.dtype)
    row, wide = tile.block_channels * size, False
    if walk.role in ("input", "output") and lanes is not None:
        together = lanes.by_name[name] == 1 or tile.block_channels == 1
        distances = [
            walk.strides[spec.axis] * size,
            lanes.by_name[name] * size * tile.block_channels,
        ]
        distances += [dim.by_name[name] * size for dim in outer if name in dim.by_name]
        distances += [given[name].alignment] if name in given else []
        wide = (
            row in (4, 8, 16) and together and len(walk.component_offsets) == 1
            and lanes.size % tile.block_channels == 0 and walk.strides[spec.axis] != 0
            and all(d % row == 0 for d in distances)
        )  # fmt: skip
    return (*name, CudaLeaf(walk.dtype, walk.component_offsets, size, wide=wide))


def choose_tile(spec: Spec, chains: int, lanes: CollapsedDim | None) -> LanesTile:
    """How many chains share a block, how many warps work on one, and how many steps a thread has.

    With few chains there are many warps for each, whose windows are long; with many chains their
    number is what fills the GPU, and shorter windows need fewer iterations."""
    count = len(numbers_of(spec.operator))
    share = -(-chains // processors(spec.device))  # of a multiprocessor
    together = 1
    while 2 * together <= min(share, MOST_CHAINS, lanes.size if lanes else 1):
        together *= 2
    warps = MOST_WARPS
    while warps > 1 and warps * together > BLOCK_WARPS:
        warps //= 2
    items = max(1, ITEMS // count)
    while warps > 1 and 32 * warps * items >= 2 * spec.length:
        warps //= 2
    return LanesTile(32 * warps * together, together, 1, items, 0)


def plan_of(spec: Spec, layout: Layout, built: LoadedKernel) -> Plan:
    tile = built.kernel.tile
    assert isinstance(tile, LanesTile)
    warps = tile.threads // 32 // tile.block_channels
    return Plan(
        spec.operator.name, (spec.chains, spec.length, 1), "cuda (newton)",
        f"{32 * warps * tile.items} steps, {warps} warps for each of {tile.block_channels} chains",
        f"{built.grid} blocks", layout.bytes_moved(spec.batch),
        "windows are solved by Newton's method, and walked where it does not converge",
    )  # fmt: skip
