"""`VectorTile`: the tile of a Triton program. A value is [lanes, states]; one that does not vary
along the states is [lanes, 1]."""

from __future__ import annotations

from dataclasses import dataclass

from ...base.vectors.kernel import CHUNK
from .grouped_steps import GROUP

# The values of a tile for each thread, the warps of a program, and the most lanes of a block: after
# a sketch in CUDA whose fastest sizes these were.
VALUES, WARPS, MAX_LANES = 4, 4, 32
# How many carries a program keeps while it recomputes a chunk: one before each group of steps, and
# one before each step that is left over.
KEPT_CARRIES = CHUNK // GROUP + GROUP - 1


@dataclass(frozen=True)
class VectorTile:
    """warps: of a program."""

    lanes: int
    states: int
    warps: int


def choose_tile(size: int) -> VectorTile:
    """For N states."""
    states = 1 << (size - 1).bit_length()
    lanes = max(1, min(MAX_LANES, 32 * WARPS * VALUES // states))
    warps = max(1, min(WARPS, lanes * states // (32 * VALUES)))
    return VectorTile(lanes, states, warps)
