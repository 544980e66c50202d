"""What a choice of kernel and tile depends on, and what it says.

"prototype" stands for measurements of hand-written kernels of the same structure with a fixed
operator, on an H100 (132 multiprocessors, 3.00 TB/s copy), 2026-11-21.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..program.operator import Operator
from ..program.render import LIBRARY
from .kernel import Mode, Tile

# One block per multiprocessor with nearly all of its shared memory: two blocks of half the size
# cost 1 to 10 % (prototype), but bring 4 on short axes (`lanes_tuning.py`).
THREADS = 256
# Operators that compute long: more warps hide that. On an H100 in float32 logaddexp goes from 0.60
# to 0.67 of copy on [8, 4096, 1536] with 384 threads, log_affine from 0.60 to 0.68, welford from
# 0.44 to 0.59; along rows of 2^18 logaddexp from 0.34 to 0.57, log_affine from 0.42 to 0.58 with
# 512, welford from 0.56 to 0.59 with 384 (2026-11-22). More than 16 warps leave each thread 96
# registers; blocks that share a chain, which have 18, gain 1 to 3 points and spill.
COSTLY, COSTLY_THREADS, COSTLY_WORDS, COSTLY_RATE, FULL_WARPS = 28, 384, 4, 1.1, 16
# Kernels are unrolled over the steps and channels of a thread. What that may cost, in instructions
# per phase: a rotation with its sine and cosine compiled for 16 s when nothing limited it.
MOST_UNROLLED = 2000
HEAVY = {"div": 4, "sqrt": 4, "rsqrt": 4, "pow": 60, "sin": 60, "cos": 60, "tan": 80, "gcd": 40,
         "floordiv": 10, "truncdiv": 10, "remainder": 10, "fmod": 20, "sigmoid": 20}  # fmt: skip
LIBRARY_COST = 20


@dataclass(frozen=True)
class Shape:
    """What a choice depends on: sizes in elements, bytes per element of each input, words of a
    state, bytes written per element, what the GPU has (bandwidth in bytes per second), `cost` as
    `cost_of` an operator."""

    lanes: bool
    rows: int
    length: int
    channels: int
    words: int
    sizes: tuple[int, ...]
    written: int
    processors: int
    shared_memory: int
    bandwidth: float
    cost: int


@dataclass(frozen=True)
class Choice:
    """The tile; how the carry goes from tile to tile; tiles in a group of aggregates, 0 for what
    takes the fewest looks."""

    tile: Tile
    mode: Mode = "SERIAL"
    group: int = 0

    def radix(self, ranks: int, words: int) -> int:
        """Tiles in a group, of `ranks` in a wave: all where one look finds those before; else what
        takes two looks; where the groups would be too many for one, what takes one look if they
        are then few enough for two. Groups of 16 reach 0.90 with 66 blocks per chain, groups of 12,
        9 and 8 reach 0.89, 0.86 and 0.82 (H100, 2026-11-21); with 132, groups of 9 reach 0.87, of 8
        and 17 0.86 and 0.85 (H200, 2026-11-22)."""
        group, wave = looks(words)
        few = ranks if ranks <= group + 1 else 2 * group
        if ranks > few * wave:
            few = group + 1 if ranks <= 2 * (group + 1) * wave else -(-ranks // wave)
        return max(1, min(self.group or few, ranks))


def looks(words: int) -> tuple[int, int]:
    """Slots that a lane of `group_lookback` and `wave_lookback` (lanes_prefix.cuh) polls together:
    four registers for three words of state."""
    return (8, 8) if words <= 3 else (4, 4) if words <= 6 else (2, 2) if words <= 12 else (1, 1)


def cost_of(op: Operator) -> int:
    """About how many instructions one step takes."""
    programs = (op.lift, op.combine, op.lower)
    return sum(
        HEAVY.get(i.op, LIBRARY_COST if i.op in LIBRARY else 1)
        for program in programs for i in program.instructions
    )  # fmt: skip


def is_costly(shape: Shape) -> bool:
    """Whether more warps than usual pay."""
    return shape.cost >= COSTLY and shape.words <= COSTLY_WORDS
