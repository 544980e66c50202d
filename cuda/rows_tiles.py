"""The choice of mode and tile for contiguous rows.

The constants come from the measurements in docs/performance/cuda.md, "Constants of rows".
"""

from __future__ import annotations

from .kernel import RowsTile
from .tile_choice_inputs import COSTLY_THREADS, MOST_UNROLLED, THREADS, Choice, Shape, is_costly

# All blocks share each row if there are fewer rows per multiprocessor than this.
FEW_ROWS = 2.0
# Short rows get even tiles: every block has the same number of them, at most EVEN_TILES. A block
# has at least LEAST_SHARE bytes of the widest leaf, and at most MOST_SHARE if states are narrow and
# there is one input. MOST_UNEVEN: the most time they may take, relative to a perfect division.
EVEN_TILES, MOST_UNEVEN, LEAST_SHARE, MOST_SHARE = 5, 1.4, 4096, 80 << 10
# The most tiles that are reduced ahead in LOOKBACK. A look-back starts when half of them are
# reduced.
MOST_LEAD = 5
# Bulk copies in flight, and their bytes.
FLIGHT, PIECE = 8, 8192
# The bytes of shared memory that are kept free of the ring.
RESERVED = 8192
# The ring in SERIAL, in bytes.
ROWS_RING = 150 << 10


def choose_rows(shape: Shape) -> Choice:
    """One block per row (SERIAL) if there are many rows, else all blocks share each row
    (LOOKBACK)."""
    cut = shape.rows < FEW_ROWS * shape.processors
    tile = even_tile(shape) if cut and has_few_tiles(shape) else None
    if tile is None:
        threads, items, blocks, most = cut_rows(shape)
        cut = cut and shape.length > threads * items  # else there is nothing to share
        if not cut:
            threads, items, blocks, most = whole_rows(shape)
        per_step = items * sum(shape.sizes)
        while threads > 64 and 2 * threads * per_step > shape.shared_memory - RESERVED:
            threads -= 32
        per_tile = threads * per_step
        fitting = (shape.shared_memory // blocks - RESERVED) // max(per_tile, 1)
        stages = max(min(most, fitting), 2)
        lead = max(1, min(MOST_LEAD, stages - (2 if stages < 5 else 3))) if cut else 1
        tile = rows_tile(shape, threads, items, stages, lead, blocks)
    return Choice(tile, "LOOKBACK" if cut and shape.length > tile.steps else "SERIAL")


def rows_tile(
    shape: Shape, threads: int, items: int, stages: int, lead: int, blocks: int = 1
) -> RowsTile:
    """A tile whose bulk copies have about PIECE bytes."""
    parts = 2 if len(shape.sizes) > 1 else 1
    chunk = max(16, min(PIECE // max(shape.sizes) // parts, threads * items) // 16 * 16)
    return RowsTile(threads, items, stages, chunk, FLIGHT, lead, blocks, lead // 2)


def cut_rows(shape: Shape) -> tuple[int, int, int, int]:
    """For rows that all blocks share: threads, steps per thread, blocks per multiprocessor, and the
    most stages."""
    wide = max(shape.sizes) >= 4
    if is_costly(shape):
        if shape.words > 3:
            return COSTLY_THREADS, rows_items(shape, 48), 1, 6
        return 512, rows_items(shape, 80 if wide and len(shape.sizes) == 1 else 48), 1, 4
    if shape.words > 3:
        return 320 if wide else THREADS, rows_items(shape, 80), 1, 5
    if len(shape.sizes) > 1:
        return 320, rows_items(shape, 48), 1, 7
    return 384, rows_items(shape, 48), 1, 9


def whole_rows(shape: Shape) -> tuple[int, int, int, int]:
    """For rows that one block scans: the same four numbers as in `cut_rows`."""
    threads, items, blocks = THREADS, rows_items(shape, 48), 1
    if shape.length > 128 * items:
        items = even_items(shape, items)
    else:  # a row is one tile; two blocks with fewer threads per multiprocessor
        threads, blocks = 128, 2
        sizes = [k for k in odd_items(shape) if 128 * k >= shape.length]
        items = min(sizes, default=items)
    ring = ROWS_RING // blocks // (threads * items * sum(shape.sizes))
    return threads, items, blocks, max(4, min(6, ring))


def has_few_tiles(shape: Shape) -> bool:
    """Whether `even_tile` is tried: not for a cheap operator with a narrow state and one input, if
    each block has more than MOST_SHARE bytes."""
    share = shape.rows * shape.length * max(shape.sizes) / shape.processors
    return is_costly(shape) or shape.words > 3 or len(shape.sizes) > 1 or share <= MOST_SHARE


def even_tile(shape: Shape) -> RowsTile | None:
    """The best tile with which every block has the same small number of tiles; None if tiles would
    be too empty."""
    all_steps = shape.rows * shape.length
    per_step, wide = max(sum(shape.sizes), shape.written), max(shape.sizes)
    blocks = min(shape.processors, max(1, all_steps * wide // LEAST_SHARE))
    enough = 448 if is_costly(shape) else 320
    best: RowsTile | None = None
    least = MOST_UNEVEN
    for threads in range(128, (448 if shape.words <= 3 else 320) + 1, 32):
        for items in odd_items(shape) or [rows_items(shape, 48)]:
            size = threads * items
            count = -(-shape.rows * -(-shape.length // size) // blocks)
            stages = min(max(count, 2), (shape.shared_memory - RESERVED) // (size * per_step))
            if count > EVEN_TILES or stages < min(max(count, 2), 4):
                continue
            few = items * wide < 48
            if few and count > 1:
                continue
            cost = count * size * blocks / all_steps + 0.015 * abs(count - 3) + 0.05 * few
            cost += 0.2 * max(0, enough - threads) / enough
            if cost < least:
                best, least = rows_tile(shape, threads, items, stages, min(stages - 1, 2)), cost
    return best


def even_items(shape: Shape, most: int) -> int:
    """The steps per thread with the least cost, so that the last tile of a row is nearly full. One
    more tile costs as much as 250 steps."""

    def cost(items: int) -> int:
        steps = THREADS * items
        return -(-shape.length // steps) * (steps + 250)

    return min([k for k in odd_items(shape) if k <= most] or [most], key=cost)


def odd_items(shape: Shape) -> list[int]:
    """The steps per thread with which a thread's part of the widest leaf is an odd multiple of 16
    bytes, up to 112: vector loads from shared memory then use different banks."""
    widest = max(shape.sizes)
    most = max(1, min(56, MOST_UNROLLED // shape.cost))
    return [n for n in range(1, most + 1) if n * widest % 32 == 16 and n * widest <= 112]


def rows_items(shape: Shape, near: int) -> int:
    """The steps per thread whose bytes of the widest leaf are closest to `near`."""
    widest = max(shape.sizes)
    fallback = max(1, min(48 // widest, MOST_UNROLLED // shape.cost))
    return min(odd_items(shape), key=lambda n: abs(n * widest - near), default=fallback)
