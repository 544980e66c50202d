"""Newton's method in one kernel: which scans it can solve, its tile, and the preparation of its
launch."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch

from ...autodiff.newton_operator import derive_newton
from ...engines.base.device_properties import processors, shared_memory
from ...engines.base.executable import CommandList, Executable
from ...engines.base.explained_plan import Plan
from ...engines.base.layout import CollapsedDim, Layout, lay_out, scalar_size, tensors_by_name
from ...engines.base.scan_spec import Name, ScanSpec, TensorSpec
from ...errors import BackendError, UnsupportedOperation
from ...program.operator import Operator
from .. import launcher, parameters
from ..kernel import CudaKernel, CudaLeaf, LanesTile, newton_bytes, numbers_of, raw_words
from ..leaf_layout import copy_of, strides_of
from ..prepare import MAX_GRID, LoadedKernel, prepare_nothing
from .source import source

Spec = ScanSpec[Operator]
# What the kernel tells of a chain: its iterations, its windows that were walked, and its windows.
REPORT = 3
# The most numbers of a state: those of J and of the scan are in registers.
MOST_NUMBERS = 4
# The most steps per thread, for states of one number; threads of more numbers have fewer. Long ones
# need fewer iterations, but the inputs of as many steps in registers.
ITEMS, INPUT_WORDS = 32, 96
FEWEST_ITEMS = 8  # before a block of a short axis gets fewer warps
# The warps of a block, and the most chains, which are adjacent in memory.
WARPS, MOST_CHAINS = 8, 8


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

    Cost model: one block per multiprocessor; a block with n adjacent chains takes time ~ 1 + n
    (they share memory sectors); blocks beyond the number of multiprocessors run in further
    rounds."""
    op = spec.operator
    count, inputs = len(numbers_of(op)), raw_words(op)
    most = min(MOST_CHAINS, lanes.size if lanes else 1)
    together = min(
        (n for n in (1, 2, 4, 8) if n <= most),
        key=lambda n: -(-chains // (n * processors(spec.device))) * (1 + n),
    )
    items, warps = max(1, min(ITEMS // count, INPUT_WORDS // max(inputs, 1))), WARPS

    def tile() -> LanesTile:
        return LanesTile(32 * warps, together, 1, items, 0)

    while items > 1 and newton_bytes(op, tile()) > shared_memory(spec.device):
        items = -(-items // 2)
    while 32 // together * warps * items >= 2 * spec.length and items > 1:
        if items > FEWEST_ITEMS or warps == 1:
            items = -(-items // 2)
        else:
            warps //= 2
    return tile()


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
