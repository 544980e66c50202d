"""The tile and the number of blocks per chain for lanes.

Choices are compared by expected rates: fractions of what memory delivers. The measurements that
chose the constants are in docs/performance/cuda.md, "Constants of lanes".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from .kernel import LanesTile, lanes_stage_bytes
from .problem_shape import (
    COSTLY_RATE,
    COSTLY_THREADS,
    FULL_WARPS,
    MOST_UNROLLED,
    THREADS,
    Choice,
    Shape,
    is_costly,
)

MAX_ITEMS = 16
# The rate by the bytes of a row of a tile: DRAM wants long rows.
ROW_RATES = ((256, 1.0), (128, 0.97), (64, 0.87), (32, 0.7), (0, 0.5))
# The rates of CHAINED and of LOOKBACK, against SERIAL with a multiprocessor for each block. With
# fewer chains than blocks, CHAINED tiles of one round wait for each other (CHAINED_AT_ONCE).
CHAINED_RATE, CHAINED_AT_ONCE = 0.94, 0.94
LOOKBACK_RATE, LOOKBACK_RATE_PER_BLOCK = 0.97, 0.0013
# More than one chain per block: the fewer chains the last round has, the more it costs.
WAVES_RATE, LAST_WAVE = 0.985, 0.1
# Rows of a tile of more than 256 bytes: tiles are shorter, and more.
LONG_ROW_RATE = 0.95
# Where chains are fewer than multiprocessors but more than pairs of them (TPCs), blocks that have a
# pair to themselves run ahead of the others if their rings are deep. All rings together are to have
# what memory delivers in IN_FLIGHT_SECONDS, and IN_FLIGHT_BYTES more. Above PAIRED few pairs hold
# one block; there it matters only if a block reads more than DRIFT_BYTES. Less than ENOUGH of the
# best ring costs more than a larger one.
PAIRED, DRIFT_BYTES, ENOUGH = 0.9, 1.5e6, 0.9
IN_FLIGHT_BYTES, IN_FLIGHT_SECONDS = 8.8e6, 1.9e-6
# What a block that owns a chain loses by waiting for its first tile, in tiles.
ALONE_TILES = 2.0
# Elements per second and multiprocessor times `cost_of`.
COMPUTED = 120e9
COPY_RATE = 0.88  # of the memory's bandwidth
# What surrounds the steps of a thread in a tile, in steps.
TILE_OVERHEAD = 2
# Tiles that reach beyond the last channel are scanned step by step.
PARTLY = 0.93
# Cells of less than 16 bytes go through the first-level cache: shared memory must leave some of it.
CACHED_CELLS_MEMORY = 184 << 10
# Blocks per chain up to which CHAINED is considered: a hand-over takes a third of a tile's time.
MOST_CHAINED = 2.0
# Channels of a block in LOOKBACK: its three further roles leave 96 registers to the threads of 128
# channels.
MOST_SHARED = 64
# Tiles reduced ahead, and tiles in the ring. In LOOKBACK, which pays for a look-back per tile, two
# larger tiles are better; a block's first tile is waited for.
LEAD, STAGES = 1, 3
TWO_STAGES_RATE, FIRST_TILE = 1.03, 0.25
# What it costs if some blocks have no tile in the last round: the others have the memory.
LAST_ROUND = 0.25
# Short axes: smaller blocks side by side on a multiprocessor, each with chains of its own, so that
# most copies are started at once. States of more words and costly operators were not measured.
SIDE_THREADS, SIDE_STEPS, SIDE_WORDS = 128, 512, 3
SIDE_STAGES, SIDE_ROWS, MOST_BESIDE = (2, 3, 4), (128, 256), 3
# Warps that leave each thread 96 registers, and 128, for more than SIDE_WIDE words of a thread's
# channels.
SIDE_WARPS, SIDE_WARPS_WIDE, SIDE_WIDE = 20, 16, 16
RESERVED = 1 << 10  # bytes of a multiprocessor's shared memory that CUDA takes for a block
SIDE_RATE = 1.06  # against one block per multiprocessor
SIDE_LONG_ROW = 0.96  # of it, with rows of a tile of more than 128 bytes
SIDE_REFILLED = 0.9  # of it, with a ring of two tiles that is filled again
SIDE_EVEN = 0.8  # the power of the part of a chain's tiles that is full
SIDE_OVERHEAD = 1.0  # TILE_OVERHEAD here
# What is lost if all multiprocessors have a chain less than one, all chains being scanned at once;
# and if the last of several rounds is empty.
SIDE_IDLE, SIDE_ROUNDS = 0.2, 0.5
# What is lost if nothing is in flight, where SIDE_IN_FLIGHT bytes per multiprocessor are enough.
SIDE_WAITING, SIDE_IN_FLIGHT = 0.3, 160 << 10
# CHAINED begins with hand-overs from block to block: that weighs more on short axes.
SHORT_CHAINED = 0.96


def choose_lanes(shape: Shape) -> Choice:
    """The choice of the highest expected rate."""
    best = max(lanes_choices(shape), key=lambda scored: scored[0], default=None)
    # Very wide inputs: the smallest tile, from which the engine takes stages until it fits.
    return best[1] if best is not None else Choice(LanesTile(64, 1, 1, 1, 3))


def lanes_choices(shape: Shape) -> Iterator[tuple[float, Choice]]:
    """Choices for lanes with their expected rates."""
    yield from choices_of_threads(shape, THREADS)
    if is_costly(shape):
        for score, choice in choices_of_threads(shape, COSTLY_THREADS):
            if choice.mode != "LOOKBACK" and warps(choice) <= FULL_WARPS:
                yield COSTLY_RATE * score, choice
    if is_short(shape):
        yield from side_choices(shape)


def warps(choice: Choice) -> int:
    """Of a block of lanes, those of all roles."""
    assert isinstance(choice.tile, LanesTile)
    roles = {"SERIAL": 1, "CHAINED": 2, "LOOKBACK": 3}[choice.mode]
    return choice.tile.threads // 32 + -(-choice.tile.block_channels // 32) * roles


def choices_of_threads(shape: Shape, threads: int) -> Iterator[tuple[float, Choice]]:
    """The same for tiles of so many threads."""
    per_thread = channels_per_thread(shape)
    block = per_thread
    n = shape.processors
    while block <= (128 if shape.words <= 6 else 64):
        row = block * max(shape.sizes)
        rate = next(r for least, r in ROW_RATES if row >= least)
        blocks = -(-shape.channels // block)
        used = shape.channels / (blocks * block)
        rate *= used * (PARTLY if shape.channels % block else 1.0)
        chains = max(shape.rows * blocks, 1)
        tiles = lanes_tiles(shape, threads, block, per_thread, STAGES)
        if not tiles:
            break
        alone = rate * fill(chains, n) * last_wave(chains, n)
        long = shape.length * block * sum(shape.sizes) >= DRIFT_BYTES
        if n / 2 < chains < PAIRED * n or (chains <= n and long and computed(shape, n, used) > 2):
            ring = in_flight(shape) / chains
            enough = [tile for tile in tiles if tiles[tile] >= ENOUGH * ring] or list(tiles)
            tile = min(enough, key=lambda tile: abs(tiles[tile] - ring))
            alone /= 1 + ALONE_TILES * tile.steps / shape.length
            yield limited(alone, shape, chains, used), Choice(tile)
            alone = 0.0
        long_row = LONG_ROW_RATE if row > 256 else 1.0
        alone *= long_row
        deepest = 1 + TILE_OVERHEAD / max(tile.items for tile in tiles)
        for tile in tiles:
            count = -(-shape.length // tile.steps)
            # The last tile may be mostly empty; smaller ones cost more each.
            even = shape.length / (count * tile.steps) * deepest / (1 + TILE_OVERHEAD / tile.items)
            yield limited(alone * even, shape, chains, used * even), Choice(tile)
            if count > 1 and n / chains <= MOST_CHAINED and (block <= 64 or shape.words <= 3):
                chained = CHAINED_RATE * long_row * rate * even * fill(chains * count, n)
                chained *= CHAINED_AT_ONCE if chains < n else 1.0
                chained *= SHORT_CHAINED if is_short(shape) else 1.0
                yield limited(chained, shape, chains * count, used * even), Choice(tile, "CHAINED")
        if block <= MOST_SHARED:
            two = lanes_tiles(shape, threads, block, per_thread, 2)
            larger = two if len(two) > len(tiles) else {}
            for of in (tiles, larger):
                for tile in of:
                    deepest = 1 + TILE_OVERHEAD / max(t.items for t in of)
                    yield from shared_choices(shape, tile, chains, rate * deepest, used)
        block *= 2


def is_short(shape: Shape) -> bool:
    """Whether blocks side by side are for it."""
    return shape.length <= SIDE_STEPS and shape.words <= SIDE_WORDS and not is_costly(shape)


def side_choices(shape: Shape) -> Iterator[tuple[float, Choice]]:
    """Choices of several blocks per multiprocessor, of which each owns its chains."""
    per_thread, widest = channels_per_thread(shape), max(shape.sizes)
    short, long = SIDE_ROWS
    for block in (per_thread * columns for columns in (1, 2, 4, 8, 16, 32)):
        blocks = -(-shape.channels // block)
        chains = shape.rows * blocks
        if not short <= block * widest <= long or chains <= shape.processors:
            continue
        used = shape.channels / (blocks * block)
        rate = SIDE_RATE * used * (PARTLY if shape.channels % block else 1.0)
        rate *= SIDE_LONG_ROW if block * widest > short else 1.0
        for stages in SIDE_STAGES:
            for one, ring in lanes_tiles(shape, SIDE_THREADS, block, per_thread, stages).items():
                tile = replace(one, blocks=beside(shape, one, ring))
                if tile.blocks < 2:
                    continue
                even = shape.length / (-(-shape.length // tile.steps) * tile.steps)
                expected = rate * side_rate(shape, tile, ring, chains) * math.pow(even, SIDE_EVEN)
                yield limited(expected, shape, shape.processors, used * even), Choice(tile)


def beside(shape: Shape, tile: LanesTile, ring: int) -> int:
    """How many blocks a multiprocessor has the memory and the registers for."""
    memory = ring_memory(shape, tile.channels) + RESERVED
    most_warps = SIDE_WARPS_WIDE if tile.channels * shape.words > SIDE_WIDE else SIDE_WARPS
    return min(
        MOST_BESIDE,
        memory // (ring + fixed_bytes(shape, tile) + RESERVED),
        most_warps // warps(Choice(tile)),
    )


def side_rate(shape: Shape, tile: LanesTile, ring: int, chains: int) -> float:
    """What is left of the rate where several blocks share a multiprocessor, if tiles are full."""
    each = chains / shape.processors
    tiles, rounds = -(-shape.length // tile.steps), math.ceil(each / tile.blocks)
    rate = 1 / (1 + SIDE_OVERHEAD / tile.items)
    if rounds == 1:
        rate *= 1 - SIDE_IDLE * (1 - each / math.ceil(each))
    else:
        rate *= 1 - SIDE_ROUNDS * (1 - each / (rounds * tile.blocks))
    chain = tiles * ring / tile.stages
    at_once = min(tile.blocks, math.ceil(each)) * min(ring, chain)
    rate *= 1 - SIDE_WAITING * max(0.0, 1 - at_once / min(SIDE_IN_FLIGHT, each * chain))
    return rate * (SIDE_REFILLED if tile.stages == 2 and tiles * rounds > 2 else 1.0)


def shared_choices(
    shape: Shape, tile: LanesTile, chains: int, rate: float, used: float
) -> Iterator[tuple[float, Choice]]:
    """The choice of blocks that share chains, if it is one."""
    n = shape.processors
    count = -(-shape.length // tile.steps)
    ranks = min(n // chains, count)
    if ranks > 1:
        rounds = -(-count // ranks)
        even = shape.length / (count * tile.steps) / (1 + TILE_OVERHEAD / tile.items)
        even *= 1 - LAST_ROUND * (1 - count / (rounds * ranks))
        if tile.stages == 2:
            even *= TWO_STAGES_RATE / (1 + FIRST_TILE / rounds)
        per_block = LOOKBACK_RATE_PER_BLOCK * (1.0 if shape.words <= 3 else 1.15)
        shared = fill(ranks * chains, n) * (LOOKBACK_RATE - per_block * ranks)
        shared *= rate * even
        yield limited(shared, shape, ranks * chains, used * even), Choice(tile, "LOOKBACK")


def in_flight(shape: Shape) -> float:
    """The bytes that all blocks together are best to have under way."""
    read = sum(shape.sizes)
    return (IN_FLIGHT_BYTES + IN_FLIGHT_SECONDS * shape.bandwidth) * read / (read + shape.written)


def limited(rate: float, shape: Shape, blocks: int, used: float) -> float:
    """A rate of memory, where arithmetic allows it: `used` is the part of the elements that a tile
    has room for which exist."""
    # Of two that compute as fast, that which reads faster.
    return min(rate, computed(shape, blocks, used)) + 0.1 * rate


def computed(shape: Shape, blocks: int, used: float) -> float:
    """The rate that arithmetic allows, of memory's."""
    at_once = blocks / -(-blocks // shape.processors)
    elements = used * at_once * COMPUTED / shape.cost
    return elements * (sum(shape.sizes) + shape.written) / (COPY_RATE * shape.bandwidth)


def fill(units: int, processors: int) -> float:
    """The rate at which units of work are done, one per multiprocessor at a time. Half of the
    multiprocessors still do 0.94 of what all do."""
    waves, rest = divmod(units, processors)
    part = rest / processors
    rate = min(1.0, 2.7 * part, 0.88 + 0.12 * part)
    return units / processors / (waves + (part / rate if rest else 0.0))


def last_wave(chains: int, processors: int) -> float:
    """What chains of blocks that own several cost, beside what `fill` tells."""
    if chains <= processors:
        return 1.0
    rest = chains % processors
    idle = 1 - rest / processors if rest else 0.0
    return WAVES_RATE * (1 - LAST_WAVE * idle / (chains / processors))


def channels_per_thread(shape: Shape) -> int:
    """16 bytes of the widest leaf; fewer where the state is wide, for registers: states of six
    words spill with eight channels."""
    wide = 1 << max(16 // max(shape.sizes), 1).bit_length() - 1
    limit = 8 if shape.words <= 3 else 4 if shape.words <= 6 else 2 if shape.words <= 12 else 1
    most = 1 << max(shape.channels - 1, 0).bit_length()
    return min(wide, limit, most)


def lanes_tiles(
    shape: Shape, threads: int, block: int, per_thread: int, stages: int
) -> dict[LanesTile, int]:
    """The tiles whose ring fits in shared memory, with its bytes."""
    columns = block // per_thread
    if columns > 32:
        return {}
    memory = ring_memory(shape, per_thread)
    cells = [-(-per_thread * size // 4) * 4 for size in shape.sizes]
    found = {}
    for items in range(1, MAX_ITEMS + 1):
        tile = LanesTile(threads, block, per_thread, items, stages, LEAD)
        size = tile.stages * lanes_stage_bytes(tile, cells)
        if fixed_bytes(shape, tile) + size <= memory:
            found[tile] = size
    return found


def ring_memory(shape: Shape, per_thread: int) -> int:
    """The shared memory that the blocks of a multiprocessor are to have."""
    cached = per_thread * max(shape.sizes) < 16
    return min(shape.shared_memory, CACHED_CELLS_MEMORY) if cached else shape.shared_memory


def fixed_bytes(shape: Shape, tile: LanesTile) -> int:
    """What a block has in shared memory beside its ring."""
    warps = tile.threads // 32
    return 4 * shape.words * tile.block_channels * (tile.lead + 1) * (warps + 2) + 256


def unrolled(tile: LanesTile, cost: int) -> int:
    """Steps of a thread that are written out in a row."""
    most = max(1, MOST_UNROLLED // (tile.channels * max(cost, 1)))
    return max(n for n in range(1, tile.items + 1) if tile.items % n == 0 and n <= most)
