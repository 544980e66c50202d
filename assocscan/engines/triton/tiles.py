"""Which tile a Triton kernel takes, from its operator, its shape and the GPU's size.

The measurements behind the constants: docs/performance/triton.md.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from ...program.operator import Operator
from ..base.forced_choices import Override
from .kernel import Tile

# Steps up to which a row is one tile, without a carry.
LONGEST_SINGLE_TILE = 8192
# Steps of a tile of a longer row.
LONG_ROW_STEPS = 4096
# Items of a row per thread.
ROW_ITEMS = 16
# Steps × rows of a program where rows are short.
SHORT_ROW_ITEMS = 1024
# 'Turned' rows are scanned in reverse or read one step further. From LEAST_TURNED steps on, a
# thread has two segments of VECTOR bytes of an input each (one segment for states of four scalars).
# A tile has at most TURNED_SEGMENTS, and TURNED_BYTES of an input where rows are short. Only for
# states of up to TURNED_WIDTH float32: for others Triton 3.6 compiled some kernels for minutes, and
# in some it spilled thousands of bytes per thread.
VECTOR, LEAST_TURNED, TURNED_SEGMENTS, TURNED_BYTES = 16, 64, 512, 4096
TURNED_WIDTH = 4
# Segments of a long row where rows are few.
FEW_LONG_ROWS = 2048
# (scalars of fewer than 4 bytes, inputs: one, two or more) → the tile where there are many lanes.
LANES = {
    (False, 1): Tile(32, 4, 8, 1, stages=4),
    (False, 2): Tile(64, 4, 8, 2, stages=3),
    (False, 3): Tile(128, 4, 4, 4, stages=4),
    (True, 1): Tile(32, 8, 8, 1, stages=4),
    (True, 2): Tile(32, 4, 8, 1, stages=4, masked=True),
    (True, 3): Tile(32, 4, 8, 1, stages=3),
}
# The same where there are few.
FEW_LANES = {
    (False, 1): Tile(16, 32, 8, 4, stages=4),
    (False, 2): Tile(16, 16, 8, 1, stages=4, masked=True),
    (False, 3): Tile(8, 32, 4, 2, stages=4),
    (True, 1): Tile(16, 32, 16, 2, stages=4),
    (True, 2): Tile(16, 16, 16, 4, stages=3),
    (True, 3): Tile(32, 16, 4, 4, prefetch=True),
}
# The same where half of the multiprocessors have no program: more bytes in flight for each.
FEWEST_LANES = {
    **FEW_LANES,
    (False, 1): Tile(16, 32, 16, 4, stages=4),
    (False, 2): Tile(16, 32, 16, 4, stages=3),
    (False, 3): Tile(16, 32, 8, 4, stages=4),
}
# The same for chunks of the axis, in the multi-pass engine.
CHUNKED_LANES = {
    (False, 1): Tile(64, 4, 8, 2, stages=3),
    (False, 2): Tile(64, 4, 8, 1, stages=3),
    (False, 3): Tile(64, 4, 4, 2, stages=4),
    (True, 1): Tile(64, 4, 8, 1, stages=3),
    (True, 2): Tile(64, 4, 8, 1, stages=3),
    (True, 3): Tile(32, 16, 4, 4, prefetch=True),
}
# Of few lanes and a long axis, one input of 2 bytes, states of two words at most: where three such
# tiles have room in shared memory.
FEW_NARROW_LANES = Tile(32, 64, 16, 8, stages=3)
# Of complex numbers in adjacent lanes.
COMPLEX_LANES = Tile(16, 4, 8, 2, stages=3)
# The most scalars of all inputs, at all items, that a tile of lanes loads. With more, threads had
# too few registers, and Triton 3.6 compiled for more than a minute.
LANES_LOADS = 128
# Of a look-back, where a program has one tile. LOOKBACK_LANES: scalars of 4 bytes and more;
# NARROW_LOOKBACK: fewer bytes; EIGHT_LOOKBACK: eight lanes. A thread has inputs of at most
# LOOKBACK_WORDS scalars of 4 bytes, twice as many of 2.
LOOKBACK_LANES, NARROW_LOOKBACK = Tile(16, 16, 32, 4), Tile(32, 16, 32, 4)
EIGHT_LOOKBACK, LOOKBACK_WORDS = Tile(8, 32, 32, 4), 64
# Words of a state at most; scalars that are read at one step, beyond which passes are faster.
LOOKBACK_WIDTH, LOOKBACK_READ = 4, 2
# The most steps of a chunk of the multi-pass engine.
CHUNK = 4096
# Shared memory for the stages of a tile of lanes, so that two programs share a multiprocessor.
STAGE_BYTES = 100 << 10
SCAN_BYTES = 4 << 10  # left for what `tl.associative_scan` exchanges
# Steps that are not associative: chains of a program (one thread each); the most steps that are
# unrolled, whose inputs are loaded before the steps before them are computed; the most of these
# inputs, for which there are registers.
WALKED_CHAINS, WALKED_ITEMS, WALKED_LOADS = 64, 16, 64
# Operations that loop: `tl.associative_scan` takes straight-line code only.
LOOPS = frozenset({"gcd"})
# The most instructions of an unrolled segment, which bounds the time of compilation.
UNROLLED_INSTRUCTIONS = 1500

_OVERRIDE: Override[Tile] = Override()


@dataclass(frozen=True)
class Shape:
    """What the choice depends on. `length`: of the axis, or of its chunks. `chains`: the size of
    the innermost dimension (lanes) or the number of rows; `outer`: how many such groups there are.
    `bytes`: those of the widest input's scalar, `read`: those of all inputs at one step.
    `shared`: the bytes of shared memory that a program can have. `cut`: the axis is in chunks,
    or `packed` sequences. `turned`: rows of a multiple of 16 steps are read in reverse or one step
    further, so that Triton loads several at once. `pairs`: complex numbers."""

    lanes: bool
    chains: int
    outer: int
    length: int
    bytes: int
    read: int
    processors: int
    exclusive: bool
    shared: int
    cut: bool = False
    packed: bool = False
    turned: bool = False
    pairs: bool = False


def forced(tile: Tile) -> AbstractContextManager[None]:
    """Every Triton kernel takes this tile: for tests and for measurements."""
    return _OVERRIDE.forced(tile)


def forced_tile() -> Tile | None:
    """The innermost forced tile."""
    return _OVERRIDE.current


def choose(op: Operator, shape: Shape, interpreted: bool) -> Tile:
    """The tile of this operator on this shape; a small one for the interpreter."""
    tile = forced_tile()
    if loops(op):
        return Tile(32 if tile is None else tile.chains, 1, 1, 1)
    if op.sequential:
        return walked_tile(op, shape, 4 if interpreted else WALKED_CHAINS, tile)
    if tile is not None:
        return tile
    if interpreted:
        if shape.lanes:
            return Tile(16, 32, 2, 1)
        return Tile(4, min(256, power_of_two(shape.length)), 1, 1)
    return lanes_tile(op, shape) if shape.lanes else rows_tile(op, shape)


def loops(op: Operator) -> bool:
    """Whether combining two elements loops: `tl.associative_scan` takes straight-line code only."""
    return any(i.op in LOOPS for i in op.combine.instructions)


def choose_chunk(length: int, chains: int, processors: int, interpreted: bool) -> int:
    """How many steps a chunk of the multi-pass engine has: a power of two, a multiple of every
    tile's steps."""
    tile = forced_tile()
    if interpreted:
        return 64 if tile is None else max(64, tile.steps)
    wanted = length * chains // (processors * 256)
    chunk = min(max(power_of_two(wanted), CHUNK // 4), CHUNK)
    return chunk if tile is None else max(chunk, tile.steps)


def lookback_tile(op: Operator, size: int, lanes: int, interpreted: bool) -> Tile:
    """The tile of a look-back over so many lanes, of inputs of this size in bytes."""
    tile = forced_tile()
    if tile is not None or interpreted:
        return tile or Tile(16, 4, 2, 1)
    best = NARROW_LOOKBACK if size < 4 else LOOKBACK_LANES
    best = EIGHT_LOOKBACK if lanes == EIGHT_LOOKBACK.chains else best
    items = best.items // power_of_two(max(1, width(op) // 2, size // 4))
    segments = best.chains * best.segments // (32 * best.warps)  # of a thread
    while items > 1 and segments * items * len(op.used_inputs) * min(size, 4) > 4 * LOOKBACK_WORDS:
        items //= 2
    return replace(best, items=items)


def walked_tile(op: Operator, shape: Shape, most: int, forced: Tile | None) -> Tile:
    """A thread for each chain, which walks along it. `forced` says how many there are."""
    chains = min(most, power_of_two(shape.chains)) if forced is None else forced.chains
    instructions = max(sum(len(p.instructions) for p in (op.lift, op.combine, op.lower)), 1)
    items = min(WALKED_ITEMS if most == WALKED_CHAINS else 4, power_of_two(shape.length))
    narrow = any(leaf.dtype.itemsize == 2 for leaf in op.inputs)  # converted in more registers
    loaded = max(len(op.used_inputs), 1) * (2 if narrow else 1)
    while items > 1 and (
        items * instructions > UNROLLED_INSTRUCTIONS or items * loaded > WALKED_LOADS
    ):
        items //= 2
    return Tile(chains, 1, items, warps(chains), prefetch=True)


def rows_tile(op: Operator, shape: Shape) -> Tile:
    """A tile [rows, steps], steps along memory. Exclusive scans read elements twice, and derived
    ones more inputs than they carry: half the items keep them in registers."""
    kinds = op.combine.output_dtypes
    narrow = shape.bytes > 1 and set(kinds) == {"f32"} and len(kinds) <= TURNED_WIDTH
    if shape.turned and narrow and shape.length >= LEAST_TURNED:
        return turned_rows_tile(op, shape)
    heavy = max(1, width(op) // 2) * (2 if shape.exclusive else 1)
    longest = LONGEST_SINGLE_TILE // power_of_two(heavy)
    segments = power_of_two(shape.length)
    single = segments <= longest
    if not (single or shape.cut or shape.packed) and shape.chains < shape.processors:
        segments = max(FEW_LONG_ROWS // power_of_two(heavy), 32)
        return Tile(1, segments, VECTOR // shape.bytes, warps(segments // 4), prefetch=True)
    if not single:
        segments = LONG_ROW_STEPS // power_of_two(heavy)
    segments = max(segments, 1)
    short = max(SHORT_ROW_ITEMS // power_of_two(heavy), 128)
    chains = max(1, min(short // segments, power_of_two(shape.chains)))
    per_thread = max(ROW_ITEMS // power_of_two(heavy), 1)
    return Tile(chains, segments, 1, warps(chains * segments // per_thread), prefetch=not single)


def turned_rows_tile(op: Operator, shape: Shape) -> Tile:
    """A tile [rows, segments] of rows that are read in reverse or one step further: a segment is
    what a thread loads in one piece."""
    heavy = power_of_two(max(1, width(op) // 2))
    items, length = VECTOR // shape.bytes, power_of_two(shape.length)
    segments = min(max(TURNED_SEGMENTS // heavy, 32), length // items)
    steps = segments * items
    short = TURNED_BYTES // (shape.bytes * heavy)
    chains = max(1, min(short // steps, power_of_two(shape.chains)))
    threads = chains * steps * shape.bytes * heavy // (2 * VECTOR)
    return Tile(chains, segments, items, warps(threads), prefetch=steps < length)


def lanes_tile(op: Operator, shape: Shape) -> Tile:
    """A tile [steps, lanes], lanes along memory.

    The best measured tiles, for many lanes by scalar size and number of inputs, for few lanes with
    narrow tiles of many segments, so that every multiprocessor has a program; then cut down for
    operators that are heavy and for shapes that are small.
    """
    kind = shape.bytes < 4, min(max(shape.read // shape.bytes, 1), 3)
    best, room = LANES[kind], min(STAGE_BYTES, shape.shared - SCAN_BYTES)
    if shape.pairs:
        best = COMPLEX_LANES
    elif shape.cut:
        best = CHUNKED_LANES[kind]
    elif programs(shape, best) < shape.processors // 2:
        best = FEW_LANES[kind]
        if kind == (True, 1) and width(op) <= 2 and has_room(FEW_NARROW_LANES, shape):
            best, room = FEW_NARROW_LANES, shape.shared - SCAN_BYTES
        elif programs(shape, FEWEST_LANES[kind]) <= shape.processors // 2:
            best, room = FEWEST_LANES[kind], shape.shared - SCAN_BYTES
    chains = min(power_of_two(shape.chains), best.chains)
    segments, items = best.segments, best.items
    instructions = max(len(op.lift.instructions) + len(op.combine.instructions) * 2, 1)
    while items > 1 and (
        items * instructions > UNROLLED_INSTRUCTIONS
        or items * shape.read > LANES_LOADS * shape.bytes
    ):
        items //= 2
    while segments * items > power_of_two(shape.length):
        items, segments = (items, segments // 2) if segments > 1 else (items // 2, segments)
    while items > 1 and best.stages * chains * segments * items * shape.read > room:
        items //= 2
    components = width(op)
    vector = 8 if components <= 2 else 2 if components <= 6 else 1
    vector = min(vector, best.chains * best.segments // (best.warps * 32))
    count = warps(chains * segments // vector)
    return Tile(chains, segments, items, count, best.prefetch, best.stages, best.masked)


def programs(shape: Shape, tile: Tile) -> int:
    """How many programs scan all lanes."""
    return shape.outer * -(-shape.chains // tile.chains)


def has_room(tile: Tile, shape: Shape) -> bool:
    """Whether the stages of this tile have room in the shared memory of a multiprocessor, and the
    axis is long beside them."""
    used = tile.stages * tile.chains * tile.steps * shape.read
    long = shape.length >= 2 * tile.stages * tile.steps
    return long and shape.chains >= tile.chains and used <= shape.shared - SCAN_BYTES


def width(op: Operator) -> int:
    """The size of a state in 4-byte words."""
    return sum(2 if kind in ("f64", "i64") else 1 for kind in op.combine.output_dtypes)


def warps(threads: int) -> int:
    """Warps for that many threads: a power of two up to 16."""
    return min(max(power_of_two(threads) // 32, 1), 16)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
