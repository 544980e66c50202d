"""The CUDA engine: computes the layout of a scan, chooses a kernel and its tile, and prepares its
launch."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..engines.base.commands import Description, Slot
from ..engines.base.device_properties import processors, shared_memory
from ..engines.base.executable import CommandList, Executable
from ..engines.base.explained_plan import Plan
from ..engines.base.layout import (
    CollapsedDim,
    Given,
    Layout,
    lay_out,
    scalar_size,
    tensors_by_name,
)
from ..engines.base.scan_spec import Name, ScanSpec, TensorSpec, check_memory
from ..errors import BackendError
from ..program.operator import Operator
from . import launcher, parameters, workspace
from .choose_tile import choose
from .kernel import (
    ROLES,
    CudaKernel,
    LanesTile,
    Tile,
    slot_bytes,
    smaller,
    word_counts,
)
from .leaf_layout import copy_of, lanes_of, leaf_of, misfits, rounding, strides_of
from .packed_finals import fill_finals
from .source import source, step_of
from .tile_choice_inputs import Choice, Parts, Shape, cost_of
from .walk import parts

Spec = ScanSpec[Operator]


def prepare(spec: Spec, tensors: Sequence[TensorSpec | None]) -> Executable:
    """The commands of a scan: copies of inputs that no kernel can read, allocation of the results,
    and one launch. Raises BackendError if the device cannot run it; operators that no CUDA kernel
    supports must be excluded before (`why_not_operator`)."""
    given = tensors_by_name(spec, tensors)
    commands = CommandList(spec, tensors)
    if spec.length == 0:
        return prepare_nothing(commands, lay_out(spec, given))
    layout = lay_out(spec, given)
    copies = {
        name: copy_of(given[name], spec, name, layout.order) for name in misfits(spec, layout)
    }
    for name, copy in copies.items():
        commands.slots[name] = commands.copy(commands.slots[name], copy)
    if copies:
        given = {**given, **copies}
        layout = lay_out(spec, given)
    built = build(spec, given, layout)
    outputs, finals = commands.allocate_results(layout)
    if spec.sequences is not None:
        [commands.slots["offsets", 0]] = commands.offsets()
        if built.kernel.is_lanes:  # kernels of rows do that themselves
            add_finals(commands, finals)
    if spec.chains:
        commands.launch(built, [commands.slots[name] for names in built.names for name in names])
    made = commands.build(outputs, finals, lambda: plan_of(spec, layout, built, len(copies)))
    made.checks_offsets = spec.chains > 0 and not spec.operator.sequential
    return made


def add_finals(commands: CommandList, finals: Sequence[int]) -> None:
    """Write the final carry of an empty sequence (init or the identity) to all finals. The kernel,
    which runs later, overwrites those of sequences that are not empty."""
    spec = commands.spec
    if finals:
        init = [commands.slots["init", k] for k in spec.final if k in (spec.init or ())]
        commands.eager(
            "finals of empty sequences", functools.partial(fill_finals, spec), [*finals, *init]
        )


def prepare_nothing(commands: CommandList, layout: Layout) -> Executable:
    """The commands of a scan of length 0: empty outputs, and finals that are init or the
    identity."""
    outputs, finals = commands.allocate_results(layout)
    add_finals(commands, finals)
    spec = commands.spec
    return commands.build(
        outputs,
        finals,
        lambda: Plan(
            spec.operator.name, (spec.chains, 0, 1), "cuda", "none", "none", 0, "the axis is empty"
        ),
    )


@functools.lru_cache(maxsize=4096)
def is_pointwise(op: Operator, final: tuple[int, ...]) -> bool:
    """Whether no state is carried from step to step, as in some second derivatives."""
    return not op.aggregate_components(final) or not op.used_inputs


@functools.lru_cache(maxsize=4096)
def why_not_operator(op: Operator, final: tuple[int, ...]) -> str | None:
    """The reason why this engine has no kernel of an operator for any shape; None if it has."""
    if is_pointwise(op, final):
        return "nothing is carried from step to step"
    return too_large(op, final)


@functools.lru_cache(maxsize=4096)
def too_large(op: Operator, final: tuple[int, ...], most: int = 0) -> str | None:
    """The reason why an operator's elements are too large for this engine, or for so many words;
    None if they are not."""
    count = sum(word_counts(op.combine.output_dtypes[c] for c in op.aggregate_components(final)))
    most = most or (MAX_WALKED_WORDS if op.sequential else MAX_WORDS)
    if count > most:
        return f"an element of {op.name!r} has {4 * count} bytes, more than {4 * most}"
    read = sum(leaf.components * scalar_size(leaf.dtype) for leaf in op.inputs)
    if read > MAX_INPUT_BYTES:
        return f"{op.name!r} reads {read} bytes per element, more than {MAX_INPUT_BYTES}"
    written = sum(leaf.components * scalar_size(leaf.dtype) for leaf in op.outputs)
    if written > MAX_OUTPUT_BYTES:
        return f"{op.name!r} writes {written} bytes per element, more than {MAX_OUTPUT_BYTES}"
    return None


# Kernels count their tiles in 32 bits, with up to as many as a grid has blocks added.
MAX_GRID = 1 << 16
# Kernels add two numbers of sequences in 32 bits (boundaries.cuh).
MOST_SEQUENCES = 1 << 30
# The most 32-bit words of a state. From some 32 on registers spill, and it is faster than Triton's
# kernels still. That of a walk is in registers alone, parameters included.
MAX_WORDS, MAX_WALKED_WORDS = 128, 192
# The most bytes that a step reads and writes. With them, two of the smallest tiles (32 threads with
# one step each), with separate regions of inputs and outputs, fit in every GPU's shared memory.
MAX_INPUT_BYTES, MAX_OUTPUT_BYTES = 512, 1024


@dataclass(eq=False)
class LoadedKernel:
    """A loaded kernel with all parameters except addresses; a `GpuKernel`.

    grid: the number of blocks.
    names: the tensors of each role, then the offsets of packed sequences, in the order of the
        parameters.
    format: `struct Params` as a format of Python's `struct`.
    tail: the values of the parameters after the workspace (`parameters.shape_fields`).
    slot_bytes: the bytes of all slots in the workspace; 0 where blocks tell each other nothing. The
        launch is cooperative where it is not 0.
    group_slots_at: the first byte of the slots of groups, after the slots of tiles.
    slot_class: 1: slots of 8 bytes; 2: of 16 or more; 3: counters and records of parts
        (`walk/parts.py`). Each class has its own workspaces.
    parts: of a walk, how its axis is cut, if it is.
    """

    kernel: CudaKernel
    function: launcher.Function
    grid: int
    names: list[list[Name]]
    format: struct.Struct
    tail: list[int]
    slot_bytes: int
    group_slots_at: int
    slot_class: int
    parts: Parts | None = field(default=None, kw_only=True)

    def shown(self) -> str:
        waits = ", cooperative" if self.slot_bytes else ""
        return (
            f"CUDA {self.kernel.operator.name!r} ({self.kernel.mode.lower()}), {self.grid} blocks, "
            f"{self.kernel.shared_bytes} bytes shared{waits}"
        )

    version = 0  # the description never changes

    def described(self, slots: tuple[Slot, ...]) -> Description:
        device = torch.device("cuda", self.function.index)
        given, addresses = list(slots), []
        for names in self.names:
            addresses += [given.pop(0) for _ in names] or [-1]
        structure = self.format.pack(
            *[0] * (len(addresses) + len(parameters.WORKSPACE)), *self.tail
        )

        def space() -> torch.Tensor:
            return workspace.get(device, self.slot_class, self.slot_bytes).memory

        return ("cuda", self.function.function.ptr, device.index, self.grid, self.function.threads,
                self.function.shared_bytes, structure, tuple(addresses),
                int(self.slot_bytes > 0), workspace.HEADER_BYTES, self.group_slots_at,
                workspace.alarm(device), space)  # fmt: skip

    def launch(self, given: Sequence[torch.Tensor]) -> None:
        device = given[0].device
        addresses = [t.data_ptr() for t in given]
        if 0 in addresses:
            check_memory(addresses, given)
        workspace.check_alarm(device)
        at = 0
        for names in self.names:
            if names:
                at += len(names)
            else:  # a role without leaves has one address, which is not read
                addresses.insert(at, 0)
                at += 1
        header = slots = group_slots = capacity = 0
        alarm = workspace.alarm(device)
        with launcher.on(device):
            if self.slot_bytes:
                space = workspace.get(device, self.slot_class, self.slot_bytes)
                header, slots = space.header, space.slots
                group_slots, capacity = slots + self.group_slots_at, space.slot_bytes
            packed = self.format.pack(  # in the order of parameters.fields
                *addresses, header, slots, group_slots, alarm, capacity, *self.tail
            )
            self.function.launch(self.grid, packed, given, self.slot_bytes > 0)


# Modes in which no block waits for another.
ALONE = ("SERIAL", "WALKED")


def can_walk(spec: Spec, tensors: Sequence[TensorSpec | None]) -> bool:
    """Whether `prepare` can run steps that are not associative."""
    return is_walkable(spec, lanes_of(lay_out(spec, tensors_by_name(spec, tensors)), spec))


def is_walkable(spec: Spec, lanes: CollapsedDim | None) -> bool:
    return lanes is not None and spec.initial_leaves is not None


def needs_copies(spec: Spec, tensors: Sequence[TensorSpec | None]) -> bool:
    """Whether `prepare` would copy some tensors first, because no kernel can read their strides."""
    if all(t is None or t.is_dense for t in tensors[: len(spec.operator.inputs)]):
        return False
    return bool(misfits(spec, lay_out(spec, tensors_by_name(spec, tensors))))


MODES = {
    "SERIAL": "a block scans its chains tile by tile, with the carry in registers",
    "CHAINED": "tiles hand their prefix on to the next tile of the chain",
    "LOOKBACK": "blocks share a chain: prefixes come from the aggregates of the tiles before",
    "WALKED": "steps are not associative: each thread walks along its chains",
}


def plan_of(spec: Spec, layout: Layout, built: LoadedKernel, copies: int) -> Plan:
    kernel, tile = built.kernel, built.kernel.tile
    width = f" x {tile.block_channels} lanes" if isinstance(tile, LanesTile) else ""
    inner = layout.rows[-1].size if kernel.is_lanes else 1
    outer = math.prod(row.size for row in layout.rows) // inner
    copied = f"; {copies} inputs are copied first" if copies else ""
    cut = built.parts
    if cut is not None:
        copied = f", in {cut.count} parts of {cut.steps} steps at the same time{copied}"
    return Plan(
        spec.operator.name, (outer, spec.length, inner), f"cuda ({kernel.mode.lower()})",
        f"{tile.steps} steps{width}, {tile.threads} threads, {tile.stages} tiles under way",
        f"{built.grid} blocks", layout.bytes_moved(spec.batch), f"{MODES[kernel.mode]}{copied}",
    )  # fmt: skip


def build(spec: Spec, tensors: Given, layout: Layout) -> LoadedKernel:
    """The kernel and its parameters, for tensors that need no copy."""
    op = spec.operator
    lanes = lanes_of(layout, spec)
    outer = layout.rows[:-1] if lanes else layout.rows
    rows = math.prod(row.size for row in outer)
    channels = lanes.size if lanes else 1
    # To choose the tile, `inputs` and `words` of the kernel are needed, which do not depend on it:
    # this tile is a placeholder, and the leaves follow below.
    kernel = CudaKernel(
        op, LanesTile(256, 64, 4, 8, 3), "SERIAL", spec.reverse, spec.exclusive, len(outer),
        spec.initial_leaves, spec.final, spec.shifted, spec.boundary, (),
        spec.sequences is not None,
    )  # fmt: skip
    element_bytes = {name: len(w.component_offsets) * scalar_size(w.dtype)
                     for name, w in layout.leaves.items()}  # fmt: skip
    sizes = [
        n for (role, k), n in element_bytes.items()
        if role == "input" and k in kernel.inputs
        and not (op.sequential and layout.leaves[role, k].strides[spec.axis] == 0)
    ]  # fmt: skip
    written = sum(n for (role, _), n in element_bytes.items() if role == "output")
    if op.sequential:
        rows *= spec.sequence_count  # each is a chain of its own
    shape = Shape(
        lanes is not None, rows, spec.length, channels, kernel.words, tuple(sizes),
        written, processors(spec.device), shared_memory(spec.device),
        launcher.memory_bandwidth(spec.device), max(cost_of(op), 1), op.sequential,
        *(parts.carry_of(spec, layout) if op.sequential else ()),
    )  # fmt: skip
    if op.sequential and not is_walkable(spec, lanes):
        raise BackendError(
            "the cuda backend cannot run: it walks only where chains are adjacent in memory; "
            'backend="triton" runs this scan'
        )
    if lanes is None and not launcher.has_bulk_copies(spec.device):
        raise BackendError(
            "the cuda backend cannot run: rows that are contiguous along the axis need compute "
            'capability 9.0; backend="triton" runs on this GPU'
        )
    choice = choose(shape)
    while True:
        tile = choice.tile
        unit = rounding(spec, layout, lanes, tile)
        kernel = replace(
            kernel, tile=tile, mode=choice.mode, round=unit, in_parts=choice.parts is not None,
            leaves=tuple(
                leaf_of(walk, spec, lanes, outer, tile, tensors, unit > 1)
                for walk in layout.leaves.values()
            ),
        )  # fmt: skip
        if kernel.shared_bytes <= shape.shared_memory:
            break
        choice = replace(choice, tile=fitting(kernel, shape.shared_memory))
    function = launcher.load(source(kernel), kernel, spec.device)
    return assemble(spec, kernel, function, layout, lanes, outer, shape, choice)


def fitting(kernel: CudaKernel, most: int) -> Tile:
    """The next smaller tile of a kernel that needs too much shared memory."""
    found = smaller(kernel.tile)
    if found is None:
        raise BackendError(
            f"the cuda backend cannot run: a tile of {kernel.operator.name!r} needs "
            f"{kernel.shared_bytes} bytes of shared memory, a block can have {most}"
        )
    return found


def assemble(
    spec: Spec,
    kernel: CudaKernel,
    function: launcher.Function,
    layout: Layout,
    lanes: CollapsedDim | None,
    outer: Sequence[CollapsedDim],
    shape: Shape,
    choice: Choice,
) -> LoadedKernel:
    """The loaded kernel with its grid and parameters. How tiles are assigned to blocks:

                       ranks                             rest
    lanes, LOOKBACK    the blocks that share a chain     0
    lanes, CHAINED     from a block's tile to its next: `ranks` tiles on, and `rest` chains
    rows, LOOKBACK     from a block's tile to its next: `ranks` rows on, and `rest` tiles
    SERIAL             not read                          not read
    """
    tile = kernel.tile
    tiles = -(-(spec.length + -spec.length % kernel.round) // tile.steps)
    blocks = -(-shape.channels // tile.block_channels) if isinstance(tile, LanesTile) else 1
    chains = shape.rows * blocks
    is_lanes = isinstance(tile, LanesTile)
    resident = function.blocks_per_processor * shape.processors
    if choice.mode == "LOOKBACK" and not is_lanes:  # every block polls the slots of all others
        resident = min(resident, tile.blocks * shape.processors)
    counted = chains if choice.mode == "WALKED" else chains * tiles
    if max(counted, shape.rows) >= 2**31 - MAX_GRID:
        raise BackendError(f"the cuda backend cannot run: {counted} tiles are too many")
    if spec.sequence_count >= MOST_SEQUENCES:
        raise BackendError(
            f"the cuda backend cannot run: {spec.sequence_count} sequences are too many"
        )
    cut = choice.parts
    ranks = max(1, min(resident // chains, tiles))
    if choice.mode == "LOOKBACK" and is_lanes:
        grid = ranks * chains
    else:
        jobs = cut.count if cut is not None else 1 if choice.mode in ALONE else tiles
        grid = min(resident, chains * jobs)
    rest = grid % chains
    channels = tile.block_channels if isinstance(tile, LanesTile) else 32
    radix = choice.radix(ranks, shape.words, channels)
    groups = -(-ranks // radix) if radix else 0
    if not is_lanes:
        ranks, rest = grid // tiles, grid % tiles
    slot = slot_bytes(shape.words)
    slot *= tile.block_channels if isinstance(tile, LanesTile) else 1
    slots = chains * tiles * slot if choice.mode not in ALONE else 0
    group_slots = 0
    if choice.mode == "LOOKBACK" and is_lanes:
        group_slots = -(-tiles // ranks) * groups * chains * slot
    if choice.mode == "CHAINED" and is_lanes:
        ranks = grid // chains
    slot_class = min(shape.words, 2)
    if cut is not None:
        last = spec.length - (cut.count - 1) * cut.steps
        assert cut.trial < cut.warm <= last <= cut.steps and not 0 < cut.distant <= cut.warm
        assert chains * (cut.count + 1) <= parts.MOST_COUNTERS
        steps = (cut.warm, cut.trial, cut.distant)
        assert cut.steps % parts.CHECK == 0 and not any(n % tile.items for n in steps)
        record = parts.record_bytes(spec.operator, step_of(kernel), channels, cut)
        slots, slot_class = parts.COUNTER_BYTES + chains * cut.count * record, parts.SLOT_CLASS
    blocks_inverse, blocks_shift = inverse(blocks)
    values: dict[str, int | Sequence[int]] = {
        "length": spec.length, "channels": shape.channels,
        "outer_size": [row.size for row in outer] or [1], "chains": chains, "tiles": tiles,
        "channel_blocks": blocks, "ranks": ranks, "rest": rest, "radix": radix, "groups": groups,
        "blocks_inverse": blocks_inverse, "blocks_shift": blocks_shift,
        "sequences": spec.sequence_count,
    }  # fmt: skip
    if cut is not None:
        values |= {
            "parts": cut.count,
            "part_steps": cut.steps,
            "warm": cut.warm,
            "trial": cut.trial,
            "residue": cut.residue,
            "distant": cut.distant,
            "distant_residue": cut.distant_residue,
            "slow": cut.slow,
            "record_bytes": record,
        }
    for role in ROLES:
        values.update(strides_of(role, kernel, layout, spec, lanes, outer))
    format_ = struct.Struct(parameters.struct_format(parameters.fields(kernel)))
    names: list[list[Name]] = [*kernel.pointers(), *([[("offsets", 0)]] if kernel.packed else [])]
    return LoadedKernel(
        kernel, function, grid, names, format_,
        parameters.shape_values(kernel, values), slots + group_slots, slots, slot_class, parts=cut,
    )  # fmt: skip


def inverse(divisor: int) -> tuple[int, int]:
    """(m, s) with n // divisor = m n >> s for all n < 2^31, and m < 2^32."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift
