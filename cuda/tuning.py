"""Which kernel and which tile, from the shape. The constants carry what chose them.

"prototype" stands for measurements of hand-written kernels of the same structure with a fixed
operator, on an H100 (132 multiprocessors, 3.00 TB/s copy), 2026-11-21.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ..operator import Operator
from ..render import LIBRARY
from .kernel import LanesTile, Mode, RowsTile, Tile

# One block per multiprocessor with nearly all of its shared memory: two blocks of half the size
# cost 1 to 10 % (prototype).
THREADS = 256
MAX_STAGES = 4
# A row of a tile in bytes against the rate: 64-byte rows cost 12 %, 256-byte rows bring 3 % over
# 128-byte ones (prototype, affine float32).
ROW_RATES = ((256, 1.0), (128, 0.97), (64, 0.87), (32, 0.7), (0, 0.5))
# Blocks that wait for one another against blocks that do not; not measured yet for RELAY.
AHEAD_RATE = 0.97
RELAY_RATE = 0.98
# Blocks per chain up to which prefixes are relayed: a hand-over is a poll of 1500 to 2800 cycles,
# a tile 7000 (prototype).
MOST_RELAYED = 2.0
# Kernels are unrolled over the steps and channels of a thread. What that may cost, in instructions
# per phase: a rotation with its sine and cosine compiled for 16 s when nothing limited it.
MOST_UNROLLED = 2000
HEAVY = {"div": 4, "sqrt": 4, "rsqrt": 4, "pow": 60, "sin": 60, "cos": 60, "tan": 80, "gcd": 40,
         "floordiv": 10, "truncdiv": 10, "remainder": 10, "fmod": 20, "sigmoid": 20}  # fmt: skip
LIBRARY_COST = 20
# Contiguous rows are cut where there are fewer than two per multiprocessor (prototype).
FEW_ROWS = 2.0


@dataclass(frozen=True)
class Shape:
    """What a choice depends on: sizes in elements, bytes per element of each input, words of a
    state, `cost` as `cost_of` an operator."""

    lanes: bool
    rows: int
    length: int
    channels: int
    words: int
    sizes: tuple[int, ...]
    processors: int
    shared_memory: int
    cost: int


@dataclass(frozen=True)
class Choice:
    """The tile; how the carry goes from tile to tile; tiles in a group of aggregates, 0 for the
    square root of a wave's tiles."""

    tile: Tile
    mode: Mode = "BLOCK"
    group: int = 0

    def radix(self, ranks: int) -> int:
        """The number of aggregates that a tile reads is least where groups are as many as the
        tiles of a group."""
        return max(1, min(self.group or max(2, math.isqrt(max(ranks - 1, 1)) + 1), ranks))


_FORCED: ContextVar[Choice | None] = ContextVar("forced_choice", default=None)


@contextmanager
def forced(choice: Choice) -> Iterator[None]:
    """Scans inside use this choice where tensors lie as it wants; for tests and measurements."""
    token = _FORCED.set(choice)
    try:
        yield
    finally:
        _FORCED.reset(token)


def forced_choice() -> Choice | None:
    return _FORCED.get()


def cost_of(op: Operator) -> int:
    """About how many instructions one step takes."""
    programs = (op.lift, op.combine, op.lower)
    return sum(
        HEAVY.get(i.op, LIBRARY_COST if i.op in LIBRARY else 1)
        for program in programs for i in program.instructions
    )  # fmt: skip


def choose(shape: Shape) -> Choice:
    """The kernel, tile and number of blocks per chain for a shape."""
    known = _FORCED.get()
    if known is not None and isinstance(known.tile, LanesTile) == shape.lanes:
        return known
    if not shape.lanes:
        return choose_rows(shape)
    return max(lanes_choices(shape), key=lambda scored: scored[0])[1]


def lanes_choices(shape: Shape) -> Iterator[tuple[float, Choice]]:
    """Choices for lanes with their expected rates."""
    per_thread = channels_per_thread(shape)
    block = per_thread
    n = shape.processors
    while block <= (128 if shape.words <= 3 else 64):
        tile = lanes_tile(shape, block, per_thread)
        if tile is not None:
            row = block * max(shape.sizes)
            rate = next(r for least, r in ROW_RATES if row >= least)
            blocks = -(-shape.channels // block)
            rate *= shape.channels / (blocks * block)
            chains = max(shape.rows * blocks, 1)
            tiles = -(-shape.length // tile.steps)
            yield rate * fill(chains, n), Choice(tile)
            if tiles > 1 and n / chains <= MOST_RELAYED:
                yield rate * fill(chains * tiles, n) * RELAY_RATE, Choice(tile, "RELAY")
            ranks = min(n // chains, tiles)
            if ranks > 1:
                waste = tiles / (-(-tiles // ranks) * ranks)
                yield rate * fill(ranks * chains, n) * waste * AHEAD_RATE, Choice(tile, "AHEAD")
        block *= 2


def fill(units: int, processors: int) -> float:
    """The rate at which units of work are done, one per multiprocessor at a time. Half of the
    multiprocessors still do 0.94 of what all do (prototype: 64 blocks reach 0.90 of copy, 32 reach
    0.65)."""
    waves, rest = divmod(units, processors)
    part = rest / processors
    rate = min(1.0, 2.7 * part, 0.88 + 0.12 * part)
    return units / processors / (waves + (part / rate if rest else 0.0))


def channels_per_thread(shape: Shape) -> int:
    """16 bytes of the widest leaf; fewer where the state is wide, for registers: states of six
    words spill with eight channels (prototype)."""
    wide = max(1, 16 // max(shape.sizes))
    limit = 8 if shape.words <= 3 else 4 if shape.words <= 6 else 2 if shape.words <= 12 else 1
    most = 1 << max(shape.channels - 1, 0).bit_length()
    return min(wide, limit, most)


def lanes_tile(shape: Shape, block: int, per_thread: int) -> LanesTile | None:
    """The deepest tile whose ring of three fits in shared memory."""
    columns = block // per_thread
    if columns > 32:
        return None
    groups, warps = THREADS // columns, THREADS // 32
    fixed = 4 * shape.words * block * 2 * (warps + 3) + 256
    rows = [columns * -(-per_thread * size // 4) * 4 for size in shape.sizes]
    for items in (16, 8, 4, 2, 1):
        if items > 1 and items * per_thread * shape.cost > MOST_UNROLLED:
            continue
        padding = [(row - items * row) % 128 if row < 128 else 0 for row in rows]
        stage = sum(
            -(-groups * (items * row + pad) // 128) * 128
            for row, pad in zip(rows, padding, strict=True)
        )
        stages = min((shape.shared_memory - fixed) // stage, MAX_STAGES)
        if stages >= 3:
            return LanesTile(THREADS, block, per_thread, items, stages)
    return None


def choose_rows(shape: Shape) -> Choice:
    """Rows: one block each where they are many, else all blocks on every row."""
    cut = shape.rows < FEW_ROWS * shape.processors
    widest = max(shape.sizes)
    threads = 512 if shape.words == 1 else 256
    items = rows_items(shape)
    lead = 5 if cut else 1
    stages = 8 if cut else 4
    if cut and shape.length * shape.rows <= threads * items * shape.processors * 3:
        lead, stages = 1, 3
    per_step = sum(shape.sizes)
    while stages > 2 and threads * items * per_step * stages > shape.shared_memory - 8192:
        stages -= 1
    lead = min(lead, stages - 1)
    chunk = max(16, 8192 // widest // (2 if len(shape.sizes) > 1 else 1) // 16 * 16)
    tile = RowsTile(threads, items, stages, chunk, 4, lead)
    return Choice(tile, "AHEAD" if cut and shape.length > tile.steps else "BLOCK")


def rows_items(shape: Shape) -> int:
    """Steps per thread: about 48 bytes of the widest leaf, an odd multiple of 16 if possible, so
    that vector loads from shared memory touch different banks."""
    widest = max(shape.sizes)
    most = max(1, min(48, MOST_UNROLLED // shape.cost))
    good = [n for n in range(1, most + 1) if n * widest % 32 == 16 and n * widest <= 96]
    return min(good, key=lambda n: abs(n * widest - 48), default=max(1, min(48 // widest, most)))
