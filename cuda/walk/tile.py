"""The tile of a walk, and the number of steps that are prepared at a time."""

from __future__ import annotations

from dataclasses import replace

from ...engines.base.layout import scalar_size
from ..kernel import CudaKernel, LanesTile, lanes_stage_bytes
from ..lanes_tiles import RESERVED
from ..tile_choice_inputs import Choice, Shape
from .parts import SCHEDULERS, parts_of

# A block is one warp, with a channel for each lane. Two channels per lane were slower, except
# in the backward pass in float32 (0.94 of a copy's speed, 0.91 with one). Measured:
# docs/performance/cuda.md, "Nonlinear recurrences".
WALKED_CHANNELS = 32
# A tile has up to WALKED_ITEMS steps, and three or four tiles are in the ring, so that WALKED_BYTES
# of a warp are under way (copies that have not been walked yet, and the outputs of as many steps).
# With more, warps drift apart, and memory is read in a worse order; with less, it is waited for.
# Where parts of an axis are more than one warp for each scheduler, three tiles are enough.
WALKED_ITEMS, WALKED_BYTES = 32, 24 << 10
WALKED_WARPS = 8  # the most warps that a multiprocessor should have side by side
# AHEAD steps are prepared at a time, or more where rows are so short that AHEAD of them do not fill
# a copy instruction of the warp, which moves PIECES_BYTES. Prepared steps are in registers, so that
# more than AHEAD of them may have PREPARED numbers at most, all together.
PIECES_BYTES, AHEAD, PREPARED = 512, 4, 80


def ahead(kernel: CudaKernel, numbers: int) -> int:
    """The number of steps that are prepared at a time, if `ready_of` gives so many numbers for
    each."""
    assert isinstance(kernel.tile, LanesTile)
    rows = [
        kernel.tile.block_channels * len(leaf.offsets) * scalar_size(leaf.dtype)
        for role, k, leaf in kernel.leaves
        if role == "input" and k in kernel.inputs and leaf.wide and not leaf.still
    ]
    wanted = max(AHEAD, PIECES_BYTES // min(rows, default=PIECES_BYTES))
    while wanted > AHEAD and wanted * numbers > PREPARED:
        wanted //= 2
    return min(wanted, kernel.tile.items)


def choose_walk(shape: Shape) -> Choice:
    """The tile of a walk."""
    parts = parts_of(shape, WALKED_CHANNELS)
    warps = shape.rows * -(-shape.channels // WALKED_CHANNELS) * (parts.count if parts else 1)
    beside = max(1, min(-(-warps // shape.processors), WALKED_WARPS))
    room = shape.shared_memory // beside - 2 * RESERVED
    step = WALKED_CHANNELS * (sum(shape.sizes) + shape.written)
    items = WALKED_ITEMS
    while items > 1 and 2 * items * step > WALKED_BYTES:
        items //= 2
    tile = LanesTile(WALKED_CHANNELS, WALKED_CHANNELS, 1, items, 3)
    crowded = parts is not None and warps > SCHEDULERS * shape.processors
    if 3 * items * step <= WALKED_BYTES and not crowded:
        tile = replace(tile, stages=4)
    while tile.items > 1 and tile.stages * lanes_stage_bytes(tile, shape.sizes) > room:
        tile = replace(tile, items=tile.items // 2)
    # Shared memory for no more than `beside` blocks per multiprocessor: where a GPU is half busy,
    # more would gather on the multiprocessors that are free first.
    tile = replace(tile, least=shape.shared_memory // (beside + 1) + 1)
    return Choice(tile, "WALKED", parts=parts)
