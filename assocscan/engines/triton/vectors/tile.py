"""`VectorTile`: the tile of a Triton program. A value is [lanes, states]; one that does not vary
along the states is [lanes, 1]."""

from __future__ import annotations

from dataclasses import dataclass

from ...base.vectors.kernel import CHUNK

# The values of a tile for each thread, the warps of a program, the most lanes of a block, and the
# steps of a group: after a sketch in CUDA whose fastest sizes these were.
VALUES, WARPS, MAX_LANES, TOGETHER = 4, 4, 32, 8


@dataclass(frozen=True)
class VectorTile:
    """together: the steps that the backward pass recomputes at a time, in registers. warps: of a
    program."""

    lanes: int
    states: int
    together: int
    warps: int

    @property
    def kept_carries(self) -> int:
        """How many carries a program keeps while it recomputes a chunk: one before each group of
        `together` steps, and one before each step that is left over."""
        return CHUNK // self.together + self.together


def choose_tile(size: int) -> VectorTile:
    """For N states."""
    states = 1 << (size - 1).bit_length()
    lanes = max(1, min(MAX_LANES, 32 * WARPS * VALUES // states))
    warps = max(1, min(WARPS, lanes * states // (32 * VALUES)))
    return VectorTile(lanes, states, TOGETHER, warps)
