"""The choice of mode and tile for lanes.

Choices are compared by their expected rate: the fraction of the memory's bandwidth that they reach.
The constants come from the measurements in docs/performance/cuda.md, "Constants of lanes".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from .kernel import LanesTile, lanes_stage_bytes
from .tile_choice_inputs import (
    COSTLY_RATE,
    COSTLY_THREADS,
    FULL_WARPS,
    MOST_RATE,
    MOST_THREADS,
    MOST_UNROLLED,
    SMALL_WORDS,
    THREADS,
    Choice,
    Shape,
    is_costly,
    looks,
    sharers,
)

MAX_ITEMS = 16
# (bytes of a row of a tile, rate): DRAM is faster with long rows.
ROW_RATES = ((256, 1.0), (128, 0.97), (64, 0.87), (32, 0.7), (0, 0.5))
# The rates of CHAINED and of LOOKBACK, relative to SERIAL with one block per multiprocessor. With
# fewer chains than blocks, blocks of CHAINED wait for each other (CHAINED_AT_ONCE).
CHAINED_RATE, CHAINED_AT_ONCE = 0.94, 0.94
LOOKBACK_RATE, LOOKBACK_RATE_PER_BLOCK = 0.97, 0.0013
# More than one chain per block: the fewer chains are left for the last round, the lower the rate.
WAVES_RATE, LAST_WAVE = 0.985, 0.1
# Rows of a tile of more than 256 bytes: tiles are shorter, and more.
LONG_ROW_RATE, WORKED_LONG_ROW = 0.95, 0.92
# If there are fewer chains than multiprocessors but more than pairs of multiprocessors (TPCs), some
# blocks are alone on a pair, and with deep rings they run ahead of the others. So the bytes of all
# rings together should be what memory delivers in IN_FLIGHT_SECONDS, plus IN_FLIGHT_BYTES. If there
# are more than PAIRED chains per multiprocessor, few blocks are alone, and the size of the rings
# matters only if a block reads more than DRIFT_BYTES. A ring of less than ENOUGH of the best size
# costs more than one that is too large.
PAIRED, DRIFT_BYTES, ENOUGH = 0.9, 1.5e6, 0.9
IN_FLIGHT_BYTES, IN_FLIGHT_SECONDS = 8.8e6, 1.9e-6
# The time that a block of SERIAL waits for its first tile, as a number of tiles.
ALONE_TILES = 2.0
# Instructions (as in `cost_of`) per second and multiprocessor. Of operators of at least WORKING
# instructions every element takes two combines, one to reduce and one to scan, and WORK_BESIDE;
# with WORKED instructions per second. The times of memory and of arithmetic then overlap in part.
COMPUTED, WORKED, WORKING, WORK_BESIDE, OVERLAP = 120e9, 170e9, 15, 20, 4
# States of more than WIDE words: prefixes take long, so that LOOKBACK reduces two tiles ahead where
# three fit (WIDE_AHEAD), and loses where blocks can take whole chains (WIDE_LOOKBACK). From VERY
# costly combines on, those of the warps that look back cost more than waiting in CHAINED.
WIDE, WIDE_AHEAD, WIDE_TWO_STAGES = 8, 1.02, 1.08
WIDE_LOOKBACK, WIDE_POLL, VERY = 0.95, 0.06, 400
# States of more than HUGE words need all registers that a thread can have.
HUGE, HUGE_THREADS = 24, 128
COPY_RATE = 0.88  # the rate of a plain copy, relative to the memory's bandwidth
# The fixed work of a thread per tile, in steps.
TILE_OVERHEAD = 2
# The rate of tiles that contain channels after the last one; they are scanned step by step.
PARTLY, WORKED_PARTLY, WORKED_AGAIN = 0.93, 0.85, 0.95
# Cells of less than 16 bytes are copied through the first-level cache, which shares its memory with
# shared memory: then a multiprocessor uses at most so much of it for shared memory.
CACHED_CELLS_MEMORY = 184 << 10
# The most blocks per chain in CHAINED: passing a prefix on takes a third of the time of a tile.
MOST_CHAINED = 2.0
# The most channels of a block in LOOKBACK: with 128, the warps of its three additional roles would
# leave only 96 registers per thread.
MOST_SHARED = 64
# LEAD: tiles that are reduced ahead. STAGES: tiles in the ring. In LOOKBACK every tile needs a
# look-back, so two larger tiles in the ring are faster (TWO_STAGES_RATE), but a block waits longer
# for its first tile (FIRST_TILE).
LEAD, STAGES = 1, 3
TWO_STAGES_RATE, FIRST_TILE = 1.03, 0.25
# The loss if some blocks have no tile in the last round; small, because the others then have more
# of the memory's bandwidth.
LAST_ROUND = 0.25
# Short axes: several smaller blocks per multiprocessor, each with its own chains, so that most
# copies start at once. States of more words and costly operators were not measured.
SIDE_THREADS, SIDE_STEPS, SIDE_WORDS = 128, 512, 3
SIDE_STAGES, SIDE_ROWS, MOST_BESIDE = (2, 3, 4), (128, 256), 3
# The most warps per multiprocessor: SIDE_WARPS leave 96 registers per thread; SIDE_WARPS_WIDE leave
# 128, for threads whose channels have more than SIDE_WIDE words of state.
SIDE_WARPS, SIDE_WARPS_WIDE, SIDE_WIDE = 20, 16, 16
RESERVED = 1 << 10  # bytes of shared memory that CUDA itself uses per block
SIDE_RATE = 1.06  # the rate relative to one block per multiprocessor
SIDE_LONG_ROW = 0.96  # a factor for rows of a tile of more than 128 bytes
SIDE_REFILLED = 0.9  # a factor for a ring of two tiles that is filled again
SIDE_EVEN = 0.8  # the exponent of the filled part of a chain's tiles
SIDE_OVERHEAD = 1.0  # TILE_OVERHEAD of these blocks
# SIDE_IDLE: the loss per missing part of a chain per multiprocessor, if all chains are scanned at
# once. SIDE_ROUNDS: the loss per empty part of the rounds, if there are several.
SIDE_IDLE, SIDE_ROUNDS = 0.2, 0.5
# SIDE_WAITING: the loss if no bytes are in flight; SIDE_IN_FLIGHT bytes per multiprocessor are
# enough for no loss.
SIDE_WAITING, SIDE_IN_FLIGHT = 0.3, 160 << 10
# The rate of CHAINED on short axes: at the start, blocks wait for each other's prefixes.
SHORT_CHAINED = 0.96
# Reductions: of all tiles but the last of a chain, main warps compute only the total (REDUCED_COST:
# of the instructions of a scan), and a tile is refilled before the next one is waited for: all of
# the ring is in flight, not two of three tiles (REDUCED_IN_FLIGHT: of the best size of all rings).
# REDUCED_RATES: the factors of the rates of scans; SIDE: of several blocks per multiprocessor,
# considered up to REDUCED_SIDE_STEPS (docs/performance/cuda.md, "Reductions").
REDUCED_COST, REDUCED_IN_FLIGHT, REDUCED_SIDE_STEPS = 0.5, 0.7, 512
REDUCED_RATES = {"SERIAL": 1.0, "SIDE": 1.0, "CHAINED": 1.0, "LOOKBACK": 1.0}


def choose_lanes(shape: Shape) -> Choice:
    """The choice with the highest expected rate."""
    best = max(lanes_choices(shape), key=lambda scored: adjusted(shape, *scored), default=None)
    # Very wide inputs: the smallest tile, from which the engine takes stages until it fits.
    return best[1] if best is not None else Choice(LanesTile(64, 1, 1, 1, 3))


def adjusted(shape: Shape, rate: float, choice: Choice) -> float:
    """The rate by which choices are compared: in reductions, with the factor of their kind."""
    if not shape.is_reduction:
        return rate
    return rate * REDUCED_RATES["SIDE" if choice.tile.blocks > 1 else choice.mode]


def lanes_choices(shape: Shape) -> Iterator[tuple[float, Choice]]:
    """All choices for lanes, each with its expected rate."""
    yield from choices_of_threads(shape, THREADS if shape.words <= HUGE else HUGE_THREADS)
    if is_costly(shape):
        for score, choice in choices_of_threads(shape, COSTLY_THREADS):
            few = choice.mode != "LOOKBACK" and warps(choice) <= FULL_WARPS
            if few or shape.words <= SMALL_WORDS:
                yield COSTLY_RATE * score, choice
    if is_costly(shape) and shape.words <= SMALL_WORDS:
        for score, choice in choices_of_threads(shape, MOST_THREADS):
            yield MOST_RATE * score, choice
    if is_short(shape):
        yield from side_choices(shape)


def warps(choice: Choice) -> int:
    """The warps of a block, of all roles."""
    assert isinstance(choice.tile, LanesTile)
    roles = {"SERIAL": 1, "CHAINED": 2, "LOOKBACK": 3, "WALKED": 0}[choice.mode]
    return choice.tile.threads // 32 + -(-choice.tile.block_channels // 32) * roles


def choices_of_threads(shape: Shape, threads: int) -> Iterator[tuple[float, Choice]]:
    """The choices with this number of main threads, each with its expected rate."""
    per_thread = channels_per_thread(shape)
    block = per_thread
    n = shape.processors
    while block <= (128 if shape.words <= 6 else 64):
        row = block * max(shape.sizes)
        rate = next(r for least, r in ROW_RATES if row >= least)
        blocks = -(-shape.channels // block)
        used = shape.channels / (blocks * block)
        works = shape.cost >= WORKING
        full = 1.0
        if shape.channels % block:
            full = 1 - (1 - WORKED_PARTLY) / blocks if works else PARTLY
            rate *= WORKED_PARTLY if works else PARTLY
        rate *= used
        chains = max(shape.rows * blocks, 1)
        tiles = lanes_tiles(shape, threads, block, per_thread, STAGES)
        if not tiles:
            break
        alone = rate * fill(chains, n) * last_wave(chains, n)
        long = shape.length * block * sum(shape.sizes) >= DRIFT_BYTES
        alike = n / 2 < chains < PAIRED * n or (
            chains <= n and long and computed(shape, n, used) > 2
        )
        if alike and shape.words <= WIDE:
            ring = in_flight(shape) / chains
            enough = [tile for tile in tiles if tiles[tile] >= ENOUGH * ring] or list(tiles)
            tile = min(enough, key=lambda tile: abs(tiles[tile] - ring))
            alone /= 1 + ALONE_TILES * tile.steps / shape.length
            yield limited(alone, shape, chains, used), Choice(tile)
            alone = 0.0
        long_row = 1.0
        if row > 256:
            long_row = WORKED_LONG_ROW if works else LONG_ROW_RATE
        alone *= long_row
        deepest = 1 + TILE_OVERHEAD / max(tile.items for tile in tiles)
        for tile in tiles:
            count = -(-shape.length // tile.steps)
            # The last tile may be mostly empty; smaller tiles avoid that, but have more overhead.
            even = shape.length / (count * tile.steps) * deepest / (1 + TILE_OVERHEAD / tile.items)
            yield limited(alone * even, shape, chains, used * even), Choice(tile)
            few = n / chains <= MOST_CHAINED or shape.cost >= VERY
            if count > 1 and few and (block <= 64 or shape.words <= 3):
                chained = CHAINED_RATE * long_row * rate * even * fill(chains * count, n)
                if works:
                    chained *= full / WORKED_PARTLY if shape.channels % block else 1.0
                    chained *= WORKED_AGAIN if chains > n and shape.words <= WIDE else 1.0
                elif chains < n:
                    chained *= CHAINED_AT_ONCE
                chained *= SHORT_CHAINED if is_short(shape) else 1.0
                yield limited(chained, shape, chains * count, used * even), Choice(tile, "CHAINED")
        if block <= MOST_SHARED and shape.cost < VERY:
            two = lanes_tiles(shape, threads, block, per_thread, 2)
            larger = two if len(two) > len(tiles) else {}
            for of in (tiles, larger):
                for tile in of:
                    deepest = 1 + TILE_OVERHEAD / max(t.items for t in of)
                    yield from shared_choices(shape, tile, chains, rate * deepest, used)
            if shape.words > WIDE:
                deep = lanes_tiles(shape, threads, block, per_thread, STAGES, 2)
                for tile in deep:
                    deepest = 1 + TILE_OVERHEAD / max(t.items for t in deep)
                    ahead = WIDE_AHEAD * rate * deepest
                    yield from shared_choices(shape, tile, chains, ahead, used)
        block *= 2


def is_short(shape: Shape) -> bool:
    """Whether several blocks per multiprocessor are considered (`side_choices`)."""
    most = REDUCED_SIDE_STEPS if shape.is_reduction else SIDE_STEPS
    return shape.length <= most and shape.words <= SIDE_WORDS and not is_costly(shape)


def side_choices(shape: Shape) -> Iterator[tuple[float, Choice]]:
    """The choices with several blocks per multiprocessor, in SERIAL, with their expected rates."""
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
    """The number of blocks for which a multiprocessor has enough shared memory and registers."""
    memory = ring_memory(shape, tile.channels) + RESERVED
    most_warps = SIDE_WARPS_WIDE if tile.channels * shape.words > SIDE_WIDE else SIDE_WARPS
    return min(
        MOST_BESIDE,
        memory // (ring + fixed_bytes(shape, tile) + RESERVED),
        most_warps // warps(Choice(tile)),
    )


def side_rate(shape: Shape, tile: LanesTile, ring: int, chains: int) -> float:
    """The factor of the rate of several blocks per multiprocessor, if all tiles are full."""
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
    """The choice of LOOKBACK with this tile, and its expected rate; none if a chain has one
    block."""
    n = shape.processors
    count = -(-shape.length // tile.steps)
    ranks = min(n // chains, count)
    if ranks > 1:
        rounds = -(-count // ranks)
        even = shape.length / (count * tile.steps) / (1 + TILE_OVERHEAD / tile.items)
        even *= 1 - LAST_ROUND * (1 - count / (rounds * ranks))
        if tile.stages == 2:
            first = FIRST_TILE if shape.cost < WORKING else 0.1
            two_stages = TWO_STAGES_RATE if shape.words <= WIDE else WIDE_TWO_STAGES
            even *= two_stages / (1 + first / rounds)
        per_block = LOOKBACK_RATE_PER_BLOCK * (1.0 if shape.words <= 3 else 1.15)
        shared = fill(ranks * chains, n) * (LOOKBACK_RATE - per_block * ranks)
        if shape.words > WIDE:
            shared *= WIDE_LOOKBACK / (1 + WIDE_POLL * polls(shape, tile, ranks))
        shared *= rate * even
        yield limited(shared, shape, ranks * chains, used * even), Choice(tile, "LOOKBACK")


def polls(shape: Shape, tile: LanesTile, ranks: int) -> int:
    """The polls of a look-back over so many tiles, of which each waits for the one before."""
    lanes = sharers(tile.block_channels)
    group, wave = (lanes * each for each in looks(shape.words, tile.block_channels))
    of_group = Choice(tile, "LOOKBACK").radix(ranks, shape.words, tile.block_channels)
    return -(-(of_group - 1) // group) + -(-(-(-ranks // of_group) - 1) // wave)


def in_flight(shape: Shape) -> float:
    """The best number of bytes in flight, of all blocks together."""
    read = sum(shape.sizes)
    best = IN_FLIGHT_BYTES + IN_FLIGHT_SECONDS * shape.bandwidth
    return best * (REDUCED_IN_FLIGHT if shape.is_reduction else read / (read + shape.written))


def limited(rate: float, shape: Shape, blocks: int, used: float) -> float:
    """The expected rate: at most the rate of memory, and that of arithmetic. `used`: the filled
    part of the tiles."""
    arithmetic = computed(shape, blocks, used)
    if shape.cost >= WORKING:
        rate = max(rate, 1e-3)
        return math.pow(rate**-OVERLAP + arithmetic**-OVERLAP, -1 / OVERLAP)
    # The second term decides between choices that are limited by arithmetic alike.
    return min(rate, arithmetic) + 0.1 * rate


def computed(shape: Shape, blocks: int, used: float) -> float:
    """The rate that arithmetic allows, relative to the memory's."""
    at_once = blocks / -(-blocks // shape.processors)
    each = COMPUTED / shape.cost
    if shape.cost >= WORKING:
        each = WORKED / (2 * shape.cost + WORK_BESIDE)
    elements = used * at_once * each
    elements /= REDUCED_COST if shape.is_reduction else 1.0
    return elements * (sum(shape.sizes) + shape.written) / (COPY_RATE * shape.bandwidth)


def fill(units: int, processors: int) -> float:
    """The rate at which units of work are done, one per multiprocessor at a time. Half of the
    multiprocessors still do 0.94 of what all do."""
    waves, rest = divmod(units, processors)
    part = rest / processors
    rate = min(1.0, 2.7 * part, 0.88 + 0.12 * part)
    return units / processors / (waves + (part / rate if rest else 0.0))


def last_wave(chains: int, processors: int) -> float:
    """The factor, besides `fill`, for blocks that scan several chains one after another."""
    if chains <= processors:
        return 1.0
    rest = chains % processors
    idle = 1 - rest / processors if rest else 0.0
    return WAVES_RATE * (1 - LAST_WAVE * idle / (chains / processors))


def channels_per_thread(shape: Shape) -> int:
    """The channels per thread: 16 bytes of the widest leaf; fewer for wide states, because of the
    registers: states of six words spill with eight channels."""
    wide = 1 << max(16 // max(shape.sizes), 1).bit_length() - 1
    limit = 8 if shape.words <= 3 else 4 if shape.words <= 6 else 2 if shape.words <= 12 else 1
    most = 1 << max(shape.channels - 1, 0).bit_length()
    return min(wide, limit, most)


def lanes_tiles(
    shape: Shape, threads: int, block: int, per_thread: int, stages: int, lead: int = LEAD
) -> dict[LanesTile, int]:
    """The tiles whose ring fits in shared memory, each with the bytes of its ring."""
    columns = block // per_thread
    if columns > 32:
        return {}
    memory = ring_memory(shape, per_thread)
    cells = [-(-per_thread * size // 4) * 4 for size in shape.sizes]
    found = {}
    for items in range(1, MAX_ITEMS + 1):
        tile = LanesTile(threads, block, per_thread, items, stages, lead)
        size = tile.stages * lanes_stage_bytes(tile, cells)
        if fixed_bytes(shape, tile) + size <= memory:
            found[tile] = size
    return found


def ring_memory(shape: Shape, per_thread: int) -> int:
    """The shared memory that the blocks of a multiprocessor may use together."""
    cached = per_thread * max(shape.sizes) < 16
    return min(shape.shared_memory, CACHED_CELLS_MEMORY) if cached else shape.shared_memory


def fixed_bytes(shape: Shape, tile: LanesTile) -> int:
    """The bytes of a block's shared memory without its ring."""
    warps = tile.threads // 32
    return 4 * shape.words * tile.block_channels * (tile.lead + 1) * (warps + 2) + 256


def unrolled(tile: LanesTile, cost: int) -> int:
    """The number of a thread's steps that are unrolled."""
    most = 1 if cost >= VERY else max(1, MOST_UNROLLED // (tile.channels * max(cost, 1)))
    return max(n for n in range(1, tile.items + 1) if tile.items % n == 0 and n <= most)
