"""The tile for contiguous rows, and whether blocks share them. The constants carry what chose them.

"prototype" means what it does in `choice.py`.
"""

from __future__ import annotations

from .choice import COSTLY_THREADS, MOST_UNROLLED, THREADS, Choice, Shape, is_costly
from .kernel import RowsTile

# Contiguous rows are cut where there are fewer than two per multiprocessor (prototype).
FEW_ROWS = 2.0
# Rows of which every block has a few tiles: as many as the others, all in its ring or four of them:
# sums of 2^22 in bfloat16 reach 0.73 to 0.76 of copy, with the tiles of longer rows 0.71 (H200,
# 2026-11-22). What counts is that they are even; one to five tiles of 288 to 448 threads do alike.
# A block has at least LEAST_SHARE bytes of the widest leaf; where states are narrow and inputs of
# one leaf, at most MOST_SHARE: sums of 3 000 000 in float32 reach 0.90, with the tiles of longer
# rows 0.99.
EVEN_TILES, MOST_UNEVEN, LEAST_SHARE, MOST_SHARE = 5, 1.4, 4096, 80 << 10
# Tiles of rows that all blocks share which are reduced ahead. With nine tiles in the ring
# recurrences on [64, 2^20] reach 0.97 (float32) and 0.93 (bfloat16), of 2^27 1.00 and 0.98, with
# eight 0.93, 0.91, 0.97 and 0.95, with four ahead 1 to 3 points less; a second-order recurrence,
# wider and slower, 0.77 with nine and 0.81 with eight (H200, 2026-11-22). Looks begin when half of
# those are reduced: recurrences on [64, 2^20] in bfloat16 go from 0.92 to 0.95 of copy,
# second-order ones from 0.69 to 0.80 with larger tiles, 0.81 to 0.89 in float32; when all of them
# are, 0.65.
MOST_LEAD = 5
# Pieces of bulk copies under way, and their bytes. A look finds 160 tiles at most: two blocks per
# multiprocessor are too many. Sums of 2^23 in float32 reach 0.73 of copy by 264 blocks of 256
# threads with looks at once and four pieces, 0.82 by 132 of 448 with late looks, 0.89 with eight
# pieces; twelve are no better (H200, 2026-11-22).
FLIGHT, PIECE = 8, 8192
# Of shared memory, for what is not the ring.
RESERVED = 8192
# A ring of tiles of whole rows: 1.00 of copy with 147 KB, 0.98 with 98 KB for a recurrence, 0.95
# and 0.97 with 221 and 147 KB for its backward pass (H200, 2026-11-22); on an H100 all the same.
ROWS_RING = 150 << 10


def choose_rows(shape: Shape) -> Choice:
    """Rows: one block each where they are many, else all blocks on every row."""
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
    """The tile, its pieces of `PIECE` bytes over all inputs."""
    parts = 2 if len(shape.sizes) > 1 else 1
    chunk = max(16, min(PIECE // max(shape.sizes) // parts, threads * items) // 16 * 16)
    return RowsTile(threads, items, stages, chunk, FLIGHT, lead, blocks, lead // 2)


def cut_rows(shape: Shape) -> tuple[int, int, int, int]:
    """Threads, steps per thread, blocks per multiprocessor and most stages for rows that all blocks
    share."""
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
    """The same for rows of one block each."""
    threads, items, blocks = THREADS, rows_items(shape, 48), 1
    if shape.length > 128 * items:
        items = even_items(shape, items)
    else:  # one tile of fewer threads, and blocks side by side
        threads, blocks = 128, 2
        sizes = [k for k in odd_items(shape) if 128 * k >= shape.length]
        items = min(sizes, default=items)
    ring = ROWS_RING // blocks // (threads * items * sum(shape.sizes))
    return threads, items, blocks, max(4, min(6, ring))


def has_few_tiles(shape: Shape) -> bool:
    """Whether tiles of a row that blocks share should be looked for that are even."""
    share = shape.rows * shape.length * max(shape.sizes) / shape.processors
    return is_costly(shape) or shape.words > 3 or len(shape.sizes) > 1 or share <= MOST_SHARE


def even_tile(shape: Shape) -> RowsTile | None:
    """The tile of rows of which every block has a few tiles, as many as the others; None where no
    tile fills them."""
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
    """Steps per thread of which a row is nearly a whole number of tiles; a tile more costs what 250
    steps do: a recurrence on [12288, 8192] in bfloat16 takes two tiles of 6144 steps or four of
    2048, and its backward reaches 0.80 and 0.94 of copy (H200, 2026-11-22)."""

    def cost(items: int) -> int:
        steps = THREADS * items
        return -(-shape.length // steps) * (steps + 250)

    return min([k for k in odd_items(shape) if k <= most] or [most], key=cost)


def odd_items(shape: Shape) -> list[int]:
    """Steps per thread of which the widest leaf takes an odd multiple of 16 bytes up to 112: vector
    loads from shared memory then touch different banks."""
    widest = max(shape.sizes)
    most = max(1, min(56, MOST_UNROLLED // shape.cost))
    return [n for n in range(1, most + 1) if n * widest % 32 == 16 and n * widest <= 112]


def rows_items(shape: Shape, near: int) -> int:
    """Steps per thread: about `near` bytes of the widest leaf."""
    widest = max(shape.sizes)
    fallback = max(1, min(48 // widest, MOST_UNROLLED // shape.cost))
    return min(odd_items(shape), key=lambda n: abs(n * widest - near), default=fallback)
