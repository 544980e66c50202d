"""`VectorTile`: how a block's threads share lanes, states and steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...engines.base.vectors.kernel import CHUNK


@dataclass(frozen=True)
class VectorTile:
    """threads: of a block. spread: the neighbouring threads that share a lane's states. channels:
    the lanes of a thread. each: the states that a thread has of each of its lanes.
    stages: the tiles of inputs that are in shared memory or on their way there. blocks: how many a
    multiprocessor holds at least. group: the steps whose states the backward pass has in registers
    at a time. sums_by_group: whether gradients of rows are summed over a block after each of these
    groups, not after the tile. widens: whether rows of 16 bits are widened in shared memory.
    A tile has CHUNK steps.
    """

    threads: int
    spread: int
    channels: int
    each: int
    stages: int
    blocks: int
    group: int
    sums_by_group: bool = False
    widens: bool = True

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
    def row_steps(self) -> int:
        """The steps after which gradients of rows are summed over a block."""
        return self.group if self.sums_by_group else CHUNK

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


# The states that a thread has of a lane; the threads of a block; the most lanes of a block where
# each thread has one.
EACH, THREADS, LANES = 4, 128, 32
# The threads of a multiprocessor that the registers are shared out for: with fewer of them, threads
# wait longer for shared memory.
RESIDENT = 384
# Where the axis is cut, a thread has two lanes: rows are read once for both, and the number of
# segments makes up for the fewer blocks. Then there are registers for fewer threads.
CUT_RESIDENT = 256
# States up to which one block of a backward pass has all RESIDENT threads: sums of rows take shared
# memory for each warp.
FEW_STATES = 16


def states_and_each(size: int) -> tuple[int, int]:
    """The states of a tile for N states, and those of a thread; a lane has at most 32 threads."""
    states = 1 << (size - 1).bit_length()
    return states, max(min(states, EACH), states // 32)


def whole_tiles(size: int, backward: bool) -> list[VectorTile]:
    """The tiles for N states where a block walks chains from end to end, the best first. Which of
    them fit depends on the operator."""
    states, each = states_and_each(size)
    if backward and each == EACH and states // each < 32:
        # Two lanes per thread halve the sums of rows over a warp. A block of all threads of a
        # multiprocessor has the most lanes, so the fewest blocks leave parts of those sums.
        large = (RESIDENT, RESIDENT // 2) if states <= FEW_STATES else ()
        return [
            tile_of(states, each // 2, 2, backward, threads, RESIDENT)
            for threads in (*large, THREADS)
        ]
    half = tile_of(states, each, 1, backward, THREADS // 2, RESIDENT // 2)
    return [tile_of(states, each, 1, backward, THREADS, RESIDENT), half]


def cut_tiles(size: int, backward: bool) -> list[VectorTile]:
    """The same where the axis is cut into segments."""
    states, each = states_and_each(size)
    return [
        tile_of(states, each, 2, backward, THREADS, CUT_RESIDENT),
        tile_of(states, each, 2, backward, THREADS // 2, THREADS // 2 * 3),
        tile_of(states, each, 1, backward, THREADS, RESIDENT),
        tile_of(states, each, 1, backward, THREADS, CUT_RESIDENT),
    ]


def tile_of(
    states: int, each: int, channels: int, backward: bool, threads: int, resident: int
) -> VectorTile:
    """A tile of at most so many threads, and of LANES lanes for each THREADS of them, or twice as
    many where a thread has two."""
    spread = states // each
    threads = max(32, min(threads, LANES * threads // THREADS * spread) // 32 * 32)
    return VectorTile(threads, spread, channels, each, 2 if backward else 3, resident // threads, 8)


def variants(tile: VectorTile) -> Iterator[VectorTile]:
    """The tile, then with less and less shared memory; where several blocks share a multiprocessor,
    then with fewer of them, but at least half."""
    fewer = replace(tile, stages=2)
    by_group = replace(fewer, sums_by_group=True)
    yield from dict.fromkeys((tile, fewer, by_group, replace(by_group, widens=False)))
    for blocks in range(tile.blocks - 1, max(tile.blocks // 2, 2) - 1, -1):
        yield replace(by_group, blocks=blocks)


# Estimates of the time of a scan, relative to one whose chains keep all processors busy, each
# walked from end to end: where blocks take only a share of the places for blocks, share ** -IDLE;
# of one that is cut, CUT * (1 + TOTALS) times that, with the totals of all segments but one.
# (docs/performance/vectors.md)
IDLE = {False: 0.5, True: 0.7}  # forward, backward
CUT = {False: 0.89, True: 0.88}
TOTALS = {False: 0.83, True: 0.25}
# What one more segment costs, whose block combines the totals before it. The chunks of steps that a
# segment has at least.
ONE_SEGMENT, CHUNKS, MOST_SEGMENTS = 1e-3, 4, 512


def busy(tile: VectorTile, blocks: int, processors: int) -> float:
    """The share of the places for blocks that are taken, on average over the turns that so many
    blocks take."""
    places = tile.blocks * processors
    return blocks / (-(-blocks // places) * places)


def cost_whole(tile: VectorTile, backward: bool, blocks: int, processors: int) -> float:
    """Of walking chains from end to end, by so many blocks."""
    return float(busy(tile, blocks, processors) ** -IDLE[backward])


def cost_cut(
    tile: VectorTile, backward: bool, blocks: int, segments: int, processors: int
) -> float:
    """Of a cut into segments, each of which so many blocks walk."""
    totals = TOTALS[backward] * (1 - 1 / segments)
    whole = cost_whole(tile, backward, blocks * segments, processors)
    return CUT[backward] * (1 + totals) * whole + ONE_SEGMENT * segments


def choose_segments(
    tile: VectorTile, backward: bool, blocks: int, chunks: int, processors: int, most: int
) -> tuple[int, int, float]:
    """The best number of segments of the axis, at most `most` of them, the chunks of each, and the
    cost."""
    most = max(1, min(chunks // CHUNKS, MOST_SEGMENTS, most))

    def cost(count: int) -> float:
        return cost_cut(tile, backward, blocks, count, processors)

    best = min(range(1, most + 1), key=cost)
    each = -(-chunks // best)
    return -(-chunks // each), each, cost(best)
