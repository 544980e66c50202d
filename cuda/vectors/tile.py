"""`VectorTile`: how a block's threads share lanes, states and steps."""

from __future__ import annotations

from dataclasses import dataclass

from ...engines.base.vectors.kernel import CHUNK


@dataclass(frozen=True)
class VectorTile:
    """threads: of a block. spread: the neighbouring threads that share a lane's states. channels:
    the lanes of a thread. each: the states that a thread has of each of its lanes.
    stages: the tiles of inputs that are in shared memory or on their way there. blocks: how many a
    multiprocessor holds at least. group: the steps whose states the backward pass has in registers
    at a time. A tile has CHUNK steps.
    """

    threads: int
    spread: int
    channels: int
    each: int
    stages: int
    blocks: int
    group: int

    @property
    def lanes(self) -> int:
        return self.threads // self.spread * self.channels

    @property
    def states(self) -> int:
        return self.spread * self.each

    @property
    def together(self) -> int:
        """The steps whose sums over the states are exchanged at a time."""
        return min(self.spread, self.group)

    @property
    def row_threads(self) -> int:
        """The threads of a warp that have the same states, of different lanes."""
        return 32 // self.spread

    @property
    def shown(self) -> str:
        return (
            f"{self.lanes} lanes x {self.states} states x {CHUNK} steps, {self.threads} threads "
            f"of {self.channels} x {self.each}"
        )


# The states that a thread has of a lane, the lanes of a block, and the threads of a multiprocessor
# that the registers are shared out for (measured: docs/performance/vectors.md).
EACH, LANES, RESIDENT = 4, 32, 384
# Blocks per multiprocessor below which twice as many threads share a lane in a forward scan: the
# GPU has more threads to run then.
FEW_BLOCKS = 1.5


def full_tile(size: int, backward: bool) -> VectorTile:
    """For N states, where there are blocks enough to fill a GPU."""
    states = 1 << (size - 1).bit_length()
    return tile_of(states, max(min(states, EACH), states // 32), backward)


def choose_tile(size: int, backward: bool, chains: int, processors: int) -> VectorTile:
    """For N states and this number of chains, each of which one block walks from end to end."""
    tile = full_tile(size, backward)
    if not backward and tile.each > 2 and chains < FEW_BLOCKS * LANES * processors:
        return tile_of(tile.states, max(tile.each // 2, tile.states // 32), backward)
    return tile


def tile_of(states: int, each: int, backward: bool) -> VectorTile:
    spread = states // each
    threads = min(128, LANES * spread)
    return VectorTile(threads, spread, 1, each, 2 if backward else 3, RESIDENT // threads, 8)


# Segments into which a long axis is cut where there are too few chains for a GPU: as many as fill
# it, but at least LEAST of them, since their totals cost about half a forward pass and a quarter of a
# backward one; of at least CHUNKS chunks of steps.
LEAST_FORWARD, LEAST_BACKWARD, CHUNKS = 3, 2, 4


def choose_segments(
    tile: VectorTile, backward: bool, blocks: int, chunks: int, processors: int
) -> tuple[int, int]:
    """The number of segments, and the chunks of each, where `blocks` blocks walk one segment."""
    count = min(tile.blocks * processors // max(blocks, 1), chunks // CHUNKS)
    if count < (LEAST_BACKWARD if backward else LEAST_FORWARD):
        return 1, chunks
    each = -(-chunks // count)
    return -(-chunks // each), each
