"""`VectorTile`: the tile of a Triton program.

A thread has `items` adjacent states of a lane. A value that varies along the states is as many
tensors [lanes, threads], of one state of each thread; any other value is a tensor [lanes, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

from ...base.vectors.kernel import CHUNK
from .grouped_steps import GROUP

# The most states of a thread, the warps of a program, and the most lanes of a block: after a sketch
# in CUDA whose fastest sizes these were.
ITEMS, WARPS, MAX_LANES = 4, 4, 32
# How many carries a program keeps while it recomputes a chunk: one before each group of steps, and
# one before each step that is left over.
KEPT_CARRIES = CHUNK // GROUP + GROUP - 1


@dataclass(frozen=True)
class VectorTile:
    """states: of a lane, `items` of which a thread has; powers of two. warps: of a program."""

    lanes: int
    states: int
    items: int
    warps: int

    @property
    def threads(self) -> int:
        """Of a lane."""
        return self.states // self.items


def choose_tile(size: int) -> VectorTile:
    """For N states."""
    states = 1 << (size - 1).bit_length()
    items = max(1, min(ITEMS, states // GROUP))
    lanes = max(1, min(MAX_LANES, 32 * WARPS * items // states))
    warps = max(1, min(WARPS, lanes * states // (32 * items)))
    return VectorTile(lanes, states, items, warps)
