"""`VectorTile`: the tile of a Triton program.

A thread has `items` adjacent states of a lane. A value that varies along the states is `items`
tensors [lanes, threads], each with one state of every thread; any other is one tensor [lanes, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

from ...base.vectors.kernel import CHUNK
from .grouped_steps import GROUP

# The most states of a thread, warps of a program and lanes (docs/performance/vectors.md).
ITEMS, WARPS, MAX_LANES = 4, 4, 32
# How many carries a program keeps while it recomputes a chunk: one before each group of steps, and
# one before each step that is left over.
KEPT_CARRIES = CHUNK // GROUP + GROUP - 1


@dataclass(frozen=True)
class VectorTile:
    """states: of a lane, `items` of which a thread has; powers of two. warps: of a program. Where
    there are more threads than the warps have, the hardware's have several of them.
    full: whether all programs have `lanes` lanes, so that nothing is masked for them."""

    lanes: int
    states: int
    items: int
    warps: int
    full: bool = False

    @property
    def threads(self) -> int:
        """Of a lane."""
        return self.states // self.items


def choose_tile(size: int, backward: bool) -> VectorTile:
    """For N states. Backward passes have at most a warp for each lane: warps share the lanes
    evenly, and each sums gradients over its own."""
    states = 1 << (size - 1).bit_length()
    items = max(1, min(ITEMS, states // GROUP))
    lanes = max(1, min(MAX_LANES, 32 * WARPS * items // states))
    warps = max(1, min(WARPS, lanes * states // (32 * items)))
    return VectorTile(lanes, states, items, min(warps, lanes) if backward else warps)
