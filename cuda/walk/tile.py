"""The tile of a walk, and the number of steps that are prepared at a time."""

from __future__ import annotations

from dataclasses import replace

from ...engines.base.layout import scalar_size
from ..kernel import CudaKernel, LanesTile, lanes_stage_bytes
from ..lanes_tiles import RESERVED
from ..tile_choice_inputs import Choice, Shape

# Steps that are not associative (lanes_walk.cuh): a block is one warp, a chain per thread. The ring
# has three or four tiles of up to WALKED_ITEMS steps, so that WALKED_BYTES of a warp (read ahead,
# and written in that time) are under way: with more, warps drift apart, and memory is read in a
# worse order; with less, it is waited for. At most WALKED_WARPS warps are meant to be on a
# multiprocessor. Two chains per thread were slower, but for a backward pass in float32 (0.94 of a
# copy for 0.91). docs/performance/cuda.md, "Nonlinear recurrences".
WALKED_CHAINS, WALKED_ITEMS, WALKED_BYTES, WALKED_WARPS = 32, 32, 24 << 10, 8
# A warp copies 512 bytes by one instruction. So many steps are prepared at a time, but at least
# AHEAD, and more only where what they prepare has PREPARED numbers at most.
PIECES_BYTES, AHEAD, PREPARED = 512, 4, 80


def ahead(kernel: CudaKernel, numbers: int) -> int:
    """The number of steps of a walk that are prepared at a time, `numbers` for each."""
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
    warps = shape.rows * -(-shape.channels // WALKED_CHAINS)
    beside = max(1, min(-(-warps // shape.processors), WALKED_WARPS))
    room = shape.shared_memory // beside - 2 * RESERVED
    step = WALKED_CHAINS * (sum(shape.sizes) + shape.written)
    items = WALKED_ITEMS
    while items > 1 and 2 * items * step > WALKED_BYTES:
        items //= 2
    tile = LanesTile(WALKED_CHAINS, WALKED_CHAINS, 1, items, 3)
    if 3 * items * step <= WALKED_BYTES:
        tile = replace(tile, stages=4)
    while tile.items > 1 and tile.stages * lanes_stage_bytes(tile, shape.sizes) > room:
        tile = replace(tile, items=tile.items // 2)
    # Blocks that find a GPU half busy would else gather on the multiprocessors that are free first.
    return Choice(replace(tile, least=shape.shared_memory // (beside + 1) + 1), "WALKED")
