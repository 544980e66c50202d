"""Tiles of the fused LayerNorm → Linear → GELU kernel, and the candidates that are measured.

`python -m assocscan bench norm_linear_gelu` times every candidate against eager torch on a GPU and
prints which is fastest where: a measured choice goes into CHOSEN, with its device and date.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """One form of the kernel.

    staged: x̂ is written by a kernel of its own; else the kernel normalises its rows itself.
    per_sm: how many programs a multiprocessor holds at once.
    persistent: as many programs as the GPU holds walk the tiles; else each has one tile. A program
    that normalises its rows always walks.
    tma_store: y and z are written through shared memory by TMA, which needs no pointers.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    staged: bool
    per_sm: int
    persistent: bool = False
    tma_store: bool = False

    def programs(self, rows: int, columns: int, processors: int) -> tuple[int, int]:
        """How many programs run, and how many share a block of rows where they normalise it."""
        blocks, across = -(-rows // self.block_m), -(-columns // self.block_n)
        slots = processors * self.per_sm
        if self.staged:
            return (min(slots, blocks * across) if self.persistent else blocks * across), 1
        splits = max(1, min(across, slots // blocks))
        return blocks * splits, splits


# What the choice was reasoned from; none of it is measured yet.
# - A normalising program reads its rows twice, 256 KB at K = 1024 in 16 bits, and feeds the tensor
#   cores from registers; a staged product takes both operands from shared memory by TMA, but x̂
#   costs a pass over x: some 13 of 170 µs at 8192 × 1024. So 16-bit products are staged.
# - In float32 the three TF32 products take their operands through registers anyway, and a pass over
#   x̂ would be wider: these programs normalise.
# - 128 × 256 reads shared memory least; as 132 programs that walk, the loads of the next tile run
#   under the GELU of the last. 128 × 128 leaves room for two programs on a multiprocessor, of which
#   one multiplies while the other computes GELU.
# - 512 rows make 64 tiles of 128 × 256 for 132 multiprocessors, and 256 of 64 × 128.
# - Registers, and bytes of local memory with z, as Triton 3.9 compiles for sm_90 (2026-11-21): in
#   16 bits 255 and 0 for 128 × 256 walking, 168 and 80 for 128 × 128 with 4 warps, 125 and 0 with
#   8, 127 and 0 for 64 × 128; in float32 250 and 0 for 128 × 128, 252 and 0 for 64 × 128.
CANDIDATES: dict[int, tuple[Tile, ...]] = {
    2: (
        Tile(128, 256, 64, 8, 3, staged=True, per_sm=1, persistent=True, tma_store=True),
        Tile(128, 256, 64, 8, 3, staged=True, per_sm=1, tma_store=True),
        Tile(128, 256, 64, 8, 4, staged=True, per_sm=1),
        Tile(256, 128, 64, 8, 3, staged=True, per_sm=1, persistent=True, tma_store=True),
        Tile(128, 128, 64, 4, 2, staged=True, per_sm=2, tma_store=True),
        Tile(128, 128, 64, 8, 2, staged=True, per_sm=2, tma_store=True),
        Tile(128, 128, 64, 4, 3, staged=True, per_sm=2),
        Tile(64, 128, 64, 4, 3, staged=True, per_sm=2, tma_store=True),
        Tile(64, 128, 64, 4, 4, staged=True, per_sm=2),
        Tile(256, 128, 64, 8, 4, staged=True, per_sm=1, persistent=True),
        Tile(256, 128, 64, 8, 3, staged=True, per_sm=1, tma_store=True),
        Tile(128, 256, 64, 8, 4, staged=True, per_sm=1, persistent=True),
        Tile(128, 128, 64, 4, 3, staged=True, per_sm=2, persistent=True),
        Tile(64, 64, 64, 4, 4, staged=True, per_sm=3),
        Tile(64, 64, 128, 4, 3, staged=True, per_sm=2),
        Tile(64, 256, 64, 8, 3, staged=False, per_sm=1),
        Tile(128, 128, 64, 8, 3, staged=False, per_sm=1, tma_store=True),
        Tile(64, 128, 64, 4, 3, staged=False, per_sm=2),
        Tile(64, 64, 64, 4, 4, staged=False, per_sm=3),
        Tile(64, 128, 128, 4, 2, staged=False, per_sm=2),
    ),
    4: (
        Tile(128, 128, 32, 8, 3, staged=False, per_sm=1),
        Tile(128, 128, 32, 8, 2, staged=False, per_sm=1),
        Tile(64, 128, 32, 4, 3, staged=False, per_sm=2),
        Tile(64, 128, 32, 4, 2, staged=False, per_sm=2),
        Tile(64, 64, 32, 4, 3, staged=False, per_sm=2),
        Tile(128, 64, 32, 8, 3, staged=False, per_sm=1),
        Tile(128, 128, 32, 8, 2, staged=True, per_sm=1, persistent=True),
        Tile(64, 128, 32, 4, 3, staged=True, per_sm=2),
        Tile(64, 128, 32, 4, 4, staged=True, per_sm=2),
        Tile(128, 128, 32, 8, 3, staged=True, per_sm=1),
        Tile(64, 256, 32, 8, 2, staged=True, per_sm=1),
        Tile(128, 64, 32, 4, 3, staged=True, per_sm=2),
        Tile(64, 128, 32, 4, 3, staged=True, per_sm=2, persistent=True),
        Tile(64, 64, 32, 4, 4, staged=True, per_sm=3),
    ),
}

FEW_ROWS = 2048
# By item size and whether rows are few. Reasoned, not yet measured.
CHOSEN: dict[tuple[int, bool], Tile] = {
    (2, False): CANDIDATES[2][0],
    (2, True): CANDIDATES[2][7],
    (4, False): CANDIDATES[4][0],
    (4, True): CANDIDATES[4][2],
}
# Where the candidates do not fit (less shared memory than sm_90 has), and in the interpreter.
SMALL = {
    2: Tile(64, 64, 32, 4, 3, staged=True, per_sm=2),
    4: Tile(64, 64, 32, 4, 2, staged=False, per_sm=2),
}
INTERPRETED = {
    2: Tile(16, 16, 16, 4, 1, staged=True, per_sm=1),
    4: Tile(16, 16, 16, 4, 1, staged=False, per_sm=1),
}


def choose(rows: int, itemsize: int, large: bool) -> Tile:
    """The tile for `rows` rows of this item size; `large`: the GPU has sm_90's shared memory."""
    return CHOSEN[itemsize, bool(rows < FEW_ROWS)] if large else SMALL[itemsize]
