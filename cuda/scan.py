"""The CUDA engine: lays a `ScanProblem` out, chooses a kernel and its tile, and launches it.

All that depends only on shapes, strides, alignment and flags is worked out once and kept
(`Prepared`), so that a warm call allocates its outputs, fills in the addresses and goes.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..caching.bounded import BoundedCache
from ..engines.base.layout import (  # fmt: skip
    CollapsedDim,
    Layout,
    Strides,
    gather_tensors,
    initial_leaves,
    lay_out,
    result_layout,
    scalar_size,
)
from ..engines.base.problem import ScanProblem, check_memory
from ..errors import BackendError
from ..program.operator import Operator
from . import launcher, parameters, workspace
from .choice import Choice, Shape, cost_of
from .kernel import (  # fmt: skip
    ROLES,
    CudaKernel,
    LanesTile,
    Tile,
    slot_bytes,
    smaller,
    word_counts,
)
from .leaves import Tensors, dense_strides, lanes_of, leaf_of, misfits, strides_of
from .sequences import fill_finals, marks_leaf, marks_of
from .source import source
from .tuning import choose, forced_choice

_PREPARED: BoundedCache[Any, Prepared] = BoundedCache()
_NEEDS_COPIES: BoundedCache[Any, bool] = BoundedCache()


@dataclass
class Prepared:
    """A kernel with every parameter but its addresses."""

    kernel: CudaKernel
    function: launcher.Function
    grid: int
    pointers: list[list[tuple[str, int]]]
    format: struct.Struct
    tail: list[int]
    outputs: list[tuple[tuple[int, ...], Strides, torch.dtype]]
    finals: list[tuple[tuple[int, ...], torch.dtype]]
    slot_bytes: int
    group_slots_at: int
    slot_class: int
    copies: list[tuple[tuple[str, int], tuple[int, ...], Strides]]
    low: tuple[int, ...]  # the addresses of inputs modulo 16, which the kernel is made for


def scan(problem: ScanProblem) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the problem in one kernel: its outputs, and the final carries asked for.

    Raises BackendError for what the device refuses. `why_not_operator` says which operators have no
    kernel here.
    """
    device = problem.device
    if problem.length == 0:
        return nothing(problem)
    tensors = gather_tensors(problem)
    prepared = prepare(problem, tensors)
    workspace.check_alarm(device)
    for name, size, strides in prepared.copies:
        copy = torch.empty_strided(size, strides, dtype=tensors[name].dtype, device=device)
        tensors[name] = copy.copy_(tensors[name].expand(size))
    outputs = [torch.empty_strided(s, st, dtype=d, device=device) for s, st, d in prepared.outputs]
    finals = [torch.empty(size, dtype=d, device=device) for size, d in prepared.finals]
    for k, t in enumerate(outputs):
        tensors["output", k] = t
    for k, t in zip(problem.final, finals, strict=True):
        tensors["final", k] = t
    if problem.offsets is not None:
        tensors["mark", 0] = marks_of(problem)
        fill_finals(problem, finals)
    if math.prod(problem.carry_batch) != 0:
        launch(prepared, [tensors[name] for names in prepared.pointers for name in names], device)
    return outputs, finals


@functools.lru_cache(maxsize=4096)
def is_pointwise(op: Operator, final: tuple[int, ...]) -> bool:
    """Whether no state is carried, as in some second derivatives: there is nothing to scan."""
    return not op.total(final) or not op.used_inputs


def nothing(problem: ScanProblem) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The empty outputs of an axis of length 0, and finals that are the init or the identity."""
    outputs, finals = result_layout(problem, gather_tensors(problem))
    device = problem.device
    carries = [torch.empty(size, dtype=d, device=device) for size, d in finals]
    fill_finals(problem, carries)
    return [torch.empty_strided(s, st, dtype=d, device=device) for s, st, d in outputs], carries


def prepared_for(problem: ScanProblem) -> Prepared:
    """What a scan of this problem would launch."""
    return prepare(problem, gather_tensors(problem))


def why_not(problem: ScanProblem) -> str | None:
    """What this engine does not do."""
    if problem.length == 0:
        return "nothing is carried from step to step"
    return why_not_operator(problem.operator, problem.final)


@functools.lru_cache(maxsize=4096)
def why_not_operator(op: Operator, final: tuple[int, ...]) -> str | None:
    """What this engine does not do at any shape."""
    if is_pointwise(op, final):
        return "nothing is carried from step to step"
    return too_large(op, final)


@functools.lru_cache(maxsize=4096)
def too_large(op: Operator, final: tuple[int, ...]) -> str | None:
    """Why elements are too large for this engine; None where they are not."""
    count = sum(word_counts(op.combine.output_dtypes[c] for c in op.total(final)))
    if count > MAX_WORDS:
        return f"an element of {op.name!r} has {4 * count} bytes, more than {4 * MAX_WORDS}"
    read = sum(leaf.components * scalar_size(leaf.dtype) for leaf in op.inputs)
    if read > MAX_INPUT_BYTES:
        return f"{op.name!r} reads {read} bytes per element, more than {MAX_INPUT_BYTES}"
    written = sum(leaf.components * scalar_size(leaf.dtype) for leaf in op.outputs)
    if written > MAX_OUTPUT_BYTES:
        return f"{op.name!r} writes {written} bytes per element, more than {MAX_OUTPUT_BYTES}"
    return None


MAX_WORDS = 24
# Two tiles of a warp, where outputs take no input's place, fit in the shared memory of every GPU.
MAX_INPUT_BYTES, MAX_OUTPUT_BYTES = 512, 1024


def launch(prepared: Prepared, given: Sequence[torch.Tensor], device: torch.device) -> None:
    """Run the kernel on the tensors in the order of its pointers."""
    addresses = [t.data_ptr() for t in given]
    if 0 in addresses:
        check_memory(addresses, given)
    at = 0
    for names in prepared.pointers:
        if names:
            at += len(names)
        else:  # a role without leaves
            addresses.insert(at, 0)
            at += 1
    header = slots = group_slots = alarm = capacity = 0
    with launcher.on(device):
        if prepared.slot_bytes:
            space = workspace.get(device, prepared.slot_class, prepared.slot_bytes)
            header, slots = space.header, space.slots
            group_slots, alarm = slots + prepared.group_slots_at, workspace.alarm(device)
            capacity = space.slot_bytes
        packed = prepared.format.pack(  # in the order of parameters.fields
            *addresses, header, slots, group_slots, alarm, capacity, *prepared.tail
        )
        prepared.function.launch(prepared.grid, packed, given, prepared.slot_bytes > 0)


def launch_warm(prepared: Prepared, given: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Run the kernel if the inputs, which are first, lie as those that it was made for."""
    for t, low in zip(given, prepared.low, strict=False):
        if t.data_ptr() & 15 != low:
            return False
    workspace.check_alarm(device)
    launch(prepared, given, device)
    return True


def key_of(problem: ScanProblem, tensors: Tensors) -> tuple[Any, ...]:
    """All that a launch depends on but the addresses."""
    return (
        problem.operator, problem.batch, problem.axis, problem.reverse, problem.exclusive,
        problem.init is None, problem.from_identity, problem.final, tuple(problem.ahead),
        problem.device, forced_choice(), problem.offsets is None,
        tuple((name, t.dtype, t.shape, t.stride(), t.data_ptr() & 15)
              for name, t in tensors.items()),
    )  # fmt: skip


def needs_copies(problem: ScanProblem) -> bool:
    """Whether tensors lie as no kernel reads them and would be copied first."""
    if all(t is None or t.is_contiguous() for t in problem.inputs):
        return False
    tensors = gather_tensors(problem)
    key = key_of(problem, tensors)
    known = _NEEDS_COPIES.get(key)
    if known is None:
        known = _NEEDS_COPIES.keep(key, bool(misfits(problem, lay_out(problem, tensors))))
    return known


def prepare(problem: ScanProblem, tensors: Tensors) -> Prepared:
    """The prepared launch for these shapes, strides, alignments and flags."""
    key = key_of(problem, tensors)
    known = _PREPARED.get(key)
    if known is None:
        known = _PREPARED.keep(key, build(problem, tensors))
    return known


def build(problem: ScanProblem, tensors: Tensors) -> Prepared:
    op = problem.operator
    layout = lay_out(problem, tensors)
    copies = [
        (name, *dense_strides(tensors[name], problem, name, layout.order))
        for name in misfits(problem, layout)
    ]
    if copies:  # allocations begin at multiples of 16 bytes: what a real copy's address tells
        tensors = dict(tensors)
        for name, size, strides in copies:
            tensors[name] = torch.empty_strided(
                size, strides, dtype=tensors[name].dtype, device=problem.device
            )
        layout = lay_out(problem, tensors)
    lanes = lanes_of(layout, problem)
    outer = layout.rows[:-1] if lanes else layout.rows
    rows = math.prod(row.size for row in outer)
    channels = lanes.size if lanes else 1
    kernel = CudaKernel(
        op, LanesTile(256, 64, 4, 8, 3), "SERIAL", problem.reverse, problem.exclusive, len(outer),
        initial_leaves(problem), problem.final, tuple(problem.ahead),
        tuple(k for k, t in problem.ahead.items() if t is not None), (),
        problem.offsets is not None,
    )  # fmt: skip
    sizes = [len(w.offsets) * scalar_size(w.dtype) for (role, k), w in layout.walks.items()
             if role == "input" and k in kernel.inputs]  # fmt: skip
    sizes += [4] if kernel.packed else []
    written = sum(len(w.offsets) * scalar_size(w.dtype) for (role, _), w in layout.walks.items()
                  if role == "output")  # fmt: skip
    shape = Shape(
        lanes is not None, rows, problem.length, channels, kernel.words, tuple(sizes),
        written, launcher.processors(problem.device), launcher.shared_memory(problem.device),
        launcher.memory_bandwidth(problem.device), max(cost_of(op), 1),
    )  # fmt: skip
    if lanes is None and not launcher.has_bulk_copies(problem.device):
        raise BackendError(
            "the cuda backend cannot run: rows that are contiguous along the axis need compute "
            'capability 9.0; backend="triton" runs on this GPU'
        )
    choice = choose(shape)
    while True:
        tile = choice.tile
        kernel = replace(
            kernel, tile=tile, mode=choice.mode,
            leaves=(
                *(leaf_of(walk, problem, lanes, outer, tile, tensors)
                  for walk in layout.walks.values()),
                ("mark", 0, marks_leaf(problem.length, lanes is not None)),
            ),
        )  # fmt: skip
        if kernel.shared_bytes <= shape.shared_memory:
            break
        choice = replace(choice, tile=fitting(kernel, shape.shared_memory))
    function = launcher.load(source(kernel), kernel, problem.device)
    return assemble(
        problem, tensors, kernel, function, layout, lanes, outer, shape, choice, copies
    )  # fmt: skip


def fitting(kernel: CudaKernel, most: int) -> Tile:
    """The kernel's next tile that needs less shared memory."""
    found = smaller(kernel.tile)
    if found is None:
        raise BackendError(
            f"the cuda backend cannot run: a tile of {kernel.operator.name!r} needs "
            f"{kernel.shared_bytes} bytes of shared memory, a block can have {most}"
        )
    return found


def assemble(
    problem: ScanProblem,
    tensors: Tensors,
    kernel: CudaKernel,
    function: launcher.Function,
    layout: Layout,
    lanes: CollapsedDim | None,
    outer: Sequence[CollapsedDim],
    shape: Shape,
    choice: Choice,
    copies: list[tuple[tuple[str, int], tuple[int, ...], Strides]],
) -> Prepared:
    """Everything that a launch needs but the addresses."""
    tile = kernel.tile
    tiles = -(-problem.length // tile.steps)
    blocks = -(-shape.channels // tile.block_channels) if isinstance(tile, LanesTile) else 1
    chains = shape.rows * blocks
    is_lanes = isinstance(tile, LanesTile)
    resident = function.blocks_per_processor * shape.processors
    if choice.mode == "LOOKBACK" and not is_lanes:  # every block looks at what all others publish
        resident = min(resident, tile.blocks * shape.processors)
    if max(chains * tiles, shape.rows) >= 2**31:
        raise BackendError(f"the cuda backend cannot run: {chains * tiles} tiles are over 2^31")
    ranks = max(1, min(resident // chains, tiles))
    if choice.mode == "LOOKBACK" and is_lanes:
        grid = ranks * chains
    else:
        grid = min(resident, chains if choice.mode == "SERIAL" else chains * tiles)
    rest = grid % chains
    radix = choice.radix(ranks, shape.words)
    groups = -(-ranks // radix) if radix else 0
    if not is_lanes:
        ranks, rest = grid // tiles, grid % tiles
    slot = slot_bytes(shape.words)
    slot *= tile.block_channels if isinstance(tile, LanesTile) else 1
    slots = chains * tiles * slot if choice.mode != "SERIAL" else 0
    group_slots = 0
    if choice.mode == "LOOKBACK" and is_lanes:
        group_slots = -(-tiles // ranks) * groups * chains * slot
    if choice.mode == "CHAINED" and is_lanes:
        ranks = grid // chains
    blocks_inverse, blocks_shift = inverse(blocks)
    values: dict[str, int | Sequence[int]] = {
        "length": problem.length, "channels": shape.channels,
        "outer_size": [row.size for row in outer] or [1], "chains": chains, "tiles": tiles,
        "channel_blocks": blocks, "ranks": ranks, "rest": rest, "radix": radix, "groups": groups,
        "blocks_inverse": blocks_inverse, "blocks_shift": blocks_shift,
    }  # fmt: skip
    for role in ROLES:
        values.update(strides_of(role, kernel, layout, problem, lanes, outer))
    return Prepared(
        kernel, function, grid, kernel.pointers(), struct.Struct(parameters.struct_format(kernel)),
        parameters.shape_values(kernel, values), layout.outputs, layout.finals,
        slots + group_slots, slots, min(shape.words, 2), copies,
        tuple(tensors[name].data_ptr() & 15 for name in kernel.pointers()[0] if name in tensors),
    )  # fmt: skip


def inverse(divisor: int) -> tuple[int, int]:
    """(m, s) with n // divisor = m n >> s for all n < 2^31, and m < 2^32."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift
