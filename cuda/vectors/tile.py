"""`VectorTile`: how a block's threads share lanes, states and steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...engines.base.vectors.kernel import CHUNK


@dataclass(frozen=True)
class VectorTile:
    """A tile has CHUNK steps. channels, spread, each and group are powers of two.

    threads: of a block. spread: how many neighbouring threads share the states of a lane. channels:
    how many adjacent lanes a thread has. each: how many states of each of them. stages: how many
    tiles of inputs are in shared memory or on their way there. blocks: how many a multiprocessor
    holds at least. group: how many steps' states the backward pass has in registers at a time.
    sums_by_group: whether gradients of rows are summed over the block after every group, not once
    for the tile. widens: whether rows of 16 bits are widened in shared memory.
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

    def __post_init__(self) -> None:
        for n in (self.spread, self.channels, self.each, self.group):
            assert n & (n - 1) == 0, self  # values of neighbours are loaded together

    @property
    def lanes(self) -> int:
        return self.threads // self.spread * self.channels

    @property
    def states(self) -> int:
        return self.spread * self.each

    @property
    def together(self) -> int:
        """How many steps' sums over the states the threads of a lane exchange at a time."""
        return min(self.spread, self.group)

    @property
    def row_together(self) -> int:
        """How many steps' gradients of rows a warp sums at a time: so many that each of its threads
        is left with one sum, if there are enough steps."""
        return max(1, min(self.row_threads // self.each, self.together))

    @property
    def row_steps(self) -> int:
        """The steps after which gradients of rows are summed over a block."""
        return self.group if self.sums_by_group else CHUNK

    @property
    def row_threads(self) -> int:
        """The threads of a warp that have the same states, of different lanes."""
        return 32 // self.spread

    @property
    def row_lanes(self) -> int:
        """The lanes of a warp."""
        return self.row_threads * self.channels

    @property
    def shown(self) -> str:
        return (
            f"{self.lanes} lanes x {self.states} states x {CHUNK} steps, {self.threads} threads "
            f"of {self.channels} x {self.each}"
        )


# The states that a thread has of a lane; the threads of a block; the most lanes of a block where
# each thread has one.
EACH, THREADS, LANES = 4, 128, 32
# The threads that a multiprocessor holds, which share its registers. With fewer threads each could
# have more registers, but would wait longer for shared memory.
RESIDENT = 384
# Where the axis is cut, a thread has two lanes: rows are read once for both, and the number of
# segments makes up for the fewer blocks. Such a thread needs more registers, so there are fewer.
CUT_RESIDENT = 256
# Up to so many states, a block of a backward pass may have all RESIDENT threads. With more states
# its sums of rows, of which each warp has its own in shared memory, would take too much of it.
FEW_STATES = 16


def states_and_each(size: int) -> tuple[int, int]:
    """The states of a tile for N = size states, N rounded up to a power of two, and the states of a
    thread. At most 32 threads share a lane."""
    states = 1 << (size - 1).bit_length()
    return states, max(min(states, EACH), states // 32)


def whole_tiles(size: int, backward: bool) -> list[VectorTile]:
    """The tiles for N states where a block walks chains from end to end, the best first. Which of
    them fit depends on the operator."""
    states, each = states_and_each(size)
    if backward and each == EACH and states // each < 32:
        # With two lanes per thread, a warp has half as many sums of rows to exchange. Each block
        # leaves its part of those sums to torch; blocks with all threads of a multiprocessor have
        # the most lanes, so there are the fewest blocks and parts.
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
        *(whole_tiles(size, backward)[:1] if backward else ()),
        tile_of(states, each, 2, backward, THREADS // 2, THREADS // 2 * 3),
        tile_of(states, each, 1, backward, THREADS, RESIDENT),
        tile_of(states, each, 1, backward, THREADS, CUT_RESIDENT),
    ]


def tile_of(
    states: int, each: int, channels: int, backward: bool, threads: int, resident: int
) -> VectorTile:
    """A tile of at most `threads` threads. For each THREADS of them it has at most LANES lanes, or
    twice as many where a thread has two. resident: the threads that a multiprocessor holds."""
    spread = states // each
    threads = max(32, min(threads, LANES * threads // THREADS * spread) // 32 * 32)
    # The states of all steps of a group are in registers. (With fewer than four steps, the carries
    # before the groups would take too much shared memory.)
    group = 8 if channels * each <= EACH else 4
    # Where a thread has one lane and goes forward, converting takes no longer than the wider loads.
    widens = backward or channels > 1
    return VectorTile(
        threads, spread, channels, each, 2 if backward else 3, resident // threads, group,
        widens=widens,
    )  # fmt: skip


def variants(tile: VectorTile) -> Iterator[VectorTile]:
    """The tile, then variants that need less and less shared memory. Last, where several blocks
    share a multiprocessor, variants with fewer: down to half (rounded down), but at least two."""
    fewer = replace(tile, stages=2)
    by_group = replace(fewer, sums_by_group=True)
    yield from dict.fromkeys((tile, fewer, by_group, replace(by_group, widens=False)))
    for blocks in range(tile.blocks - 1, max(tile.blocks // 2, 2) - 1, -1):
        yield replace(by_group, blocks=blocks)


# Estimates of the time of a scan. The unit: the same scan without a cut, if its blocks filled all
# places that the GPU has for them. If they fill only a share of the places, the time is
# share ** -IDLE. If the axis is cut, CUT * (1 + TOTALS * (1 - 1 / segments)) times that: all
# segments but one have totals. (docs/performance/vectors.md) Two kinds of pass walk no segment
# after the totals. Estimates: a reduction takes CUT times that, since totals take about as long as
# a walk that writes nothing at its steps; a backward pass for the gradient of init alone takes
# CUT * TOTALS times that.
IDLE = {False: 0.5, True: 0.7}  # forward, backward
CUT = {False: 0.89, True: 0.88}
TOTALS = {False: 0.83, True: 0.25}
# What each segment adds to the estimate, since its blocks combine the totals of those before it;
# the fewest chunks of steps of a segment; the most segments.
ONE_SEGMENT, CHUNKS, MOST_SEGMENTS = 1e-3, 4, 512


def busy(tile: VectorTile, blocks: int, processors: int) -> float:
    """The share of the places for blocks that is filled. If there are more blocks than places, they
    run in several rounds, and the share is an average over these."""
    places = tile.blocks * processors
    return blocks / (-(-blocks // places) * places)


def cost_whole(tile: VectorTile, backward: bool, blocks: int, processors: int) -> float:
    """The estimated time if chains are walked from end to end, by so many blocks."""
    return float(busy(tile, blocks, processors) ** -IDLE[backward])


def cost_cut(
    tile: VectorTile, backward: bool, blocks: int, segments: int, processors: int,
    reduces: bool = False,
) -> float:  # fmt: skip
    """The estimated time of a cut into segments, each of which so many blocks walk. reduces:
    whether nothing is walked after the totals (`VectorKernel.walks`)."""
    work = 1 + TOTALS[backward] * (1 - 1 / segments)
    if reduces:
        work = TOTALS[backward] if backward else 1
    whole = cost_whole(tile, backward, blocks * segments, processors)
    return CUT[backward] * work * whole + ONE_SEGMENT * segments


def choose_segments(
    tile: VectorTile, backward: bool, blocks: int, chunks: int, processors: int, most: int,
    reduces: bool = False,
) -> tuple[int, int, float]:  # fmt: skip
    """The best number of segments of the axis, at most `most` of them, the chunks of each, and the
    cost. reduces: as in `cost_cut`."""
    most = max(1, min(chunks // CHUNKS, MOST_SEGMENTS, most))

    def cost(count: int) -> float:
        return cost_cut(tile, backward, blocks, count, processors, reduces)

    best = min(range(1, most + 1), key=cost)
    each = -(-chunks // best)
    return -(-chunks // each), each, cost(best)
