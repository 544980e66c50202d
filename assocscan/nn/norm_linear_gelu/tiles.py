"""Tiles of the fused LayerNorm → Linear → GELU kernel, and the candidates that are measured.

`python -m assocscan bench norm_linear_gelu` times every candidate against eager torch on a GPU and
prints which is fastest where: a measured choice goes into CHOSEN, with its device and date.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...errors import ScanTypeError, ScanValueError
from ...monoids.call_errors import checked_methods

SMALLEST_BLOCK = 16  # of a product of tiles in Triton
MOST_WARPS = 32


@checked_methods
class Tile(NamedTuple):
    """One form of the kernel of `NormLinearGELU`, for those who tune it: `NormLinearTile`.

    block_m, block_n, block_k: rows, outputs and features of a tile, powers of two from 16. warps:
    of a program. stages: how many tiles of features are under way.
    staged: x̂ is written by a kernel of its own; else the kernel normalises its rows itself.
    per_sm: how many programs a multiprocessor holds at once.
    persistent: as many programs as the GPU holds walk the tiles; else each has one tile. A program
    that normalises its rows always walks.
    tma_load, tma_store: x̂ and weights are read, y and z written through shared memory by TMA, whose
    descriptors take the host some 10 µs each.

    >>> from assocscan.nn import NormLinearGELU, NormLinearTile
    >>> tile = NormLinearTile(128, 128, 64, warps=8, stages=3, staged=True, per_sm=1)
    >>> layer = NormLinearGELU(1024, 4096, tile=tile)

    A tile that needs more shared memory or registers than the GPU has is refused by Triton when it
    is compiled. `python -m assocscan bench norm_linear_gelu` times those that were of use.
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
    tma_load: bool = True

    def programs(self, rows: int, columns: int, processors: int) -> tuple[int, int]:
        """How many programs run, and how many share a block of rows where they normalise it."""
        blocks, across = -(-rows // self.block_m), -(-columns // self.block_n)
        slots = processors * self.per_sm
        if self.staged:
            return (min(slots, blocks * across) if self.persistent else blocks * across), 1
        splits = max(1, min(across, slots // blocks))
        return blocks * splits, splits


def check_tile(tile: Any) -> None:
    """Raise where a tile is given that no kernel can be made of."""
    if tile is None:
        return
    if not isinstance(tile, Tile):
        raise ScanTypeError(f"tile is of type {type(tile).__name__}, expected a NormLinearTile")
    for name in ("block_m", "block_n", "block_k"):
        size = getattr(tile, name)
        if not is_power_of_two(size) or size < SMALLEST_BLOCK:
            raise ScanValueError(
                f"{name} of the tile is {size!r}, expected a power of two from {SMALLEST_BLOCK}"
            )
    if not is_power_of_two(tile.warps) or tile.warps > MOST_WARPS:
        raise ScanValueError(
            f"warps of the tile is {tile.warps!r}, expected a power of two up to {MOST_WARPS}"
        )
    for name in ("stages", "per_sm"):
        count = getattr(tile, name)
        if not isinstance(count, int) or count < 1:
            raise ScanValueError(f"{name} of the tile is {count!r}, expected 1 or more")


def is_power_of_two(n: Any) -> bool:
    return isinstance(n, int) and n > 0 and n & (n - 1) == 0


# What is measured by `bench norm_linear_gelu`, fastest first. For 8192 × 1024 → 4096 on an H100
# (2026-11-21), where eager torch takes 173 µs in bfloat16 and 1510 µs in float32:
# - 16 bits: 136 and 137 µs for 256 × 128 and 128 × 256 that walk with four stages and plain stores,
#   139 and 142 µs with three and TMA stores, 144 to 164 µs for 128 × 128, over 300 µs where the
#   programs normalise: they read their rows twice, and feed the tensor cores from registers.
# - float32: 923 µs for 128 × 64, 983 µs for 64 × 128, 1010 µs for 128 × 128, 1150 µs and more where
#   the programs normalise: their operands go through registers twice.
# - 512 rows make 128 tiles of 128 × 128 for 132 multiprocessors: 22 µs in bfloat16 with and
#   without TMA loads (eager 24), 72 µs in float32 for 128 × 64 (eager 112). Without is lighter on
#   the host, which is the limit there.
CANDIDATES: dict[int, tuple[Tile, ...]] = {
    2: (
        Tile(256, 128, 64, 8, 4, staged=True, per_sm=1, persistent=True),
        Tile(128, 128, 64, 8, 3, staged=True, per_sm=1, tma_load=False),
        Tile(128, 256, 64, 8, 4, staged=True, per_sm=1, persistent=True),
        Tile(256, 128, 64, 8, 3, staged=True, per_sm=1, persistent=True, tma_store=True),
        Tile(128, 128, 64, 4, 3, staged=True, per_sm=2, persistent=True),
        Tile(128, 128, 64, 4, 3, staged=True, per_sm=2),
        Tile(128, 128, 64, 4, 3, staged=True, per_sm=2, tma_load=False),
        Tile(64, 256, 64, 8, 3, staged=False, per_sm=1),
    ),
    4: (
        Tile(128, 64, 32, 4, 3, staged=True, per_sm=2),
        Tile(128, 64, 32, 4, 3, staged=True, per_sm=2, tma_load=False),
        Tile(64, 128, 32, 4, 3, staged=True, per_sm=2),
        Tile(128, 128, 32, 8, 3, staged=True, per_sm=1),
        Tile(64, 128, 32, 4, 3, staged=False, per_sm=2),
    ),
}

FEW_ROWS = 2048
# By item size and whether rows are few.
CHOSEN: dict[tuple[int, bool], Tile] = {
    (2, False): CANDIDATES[2][0],
    (2, True): CANDIDATES[2][1],
    (4, False): CANDIDATES[4][0],
    (4, True): CANDIDATES[4][1],
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
