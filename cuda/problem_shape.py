"""What a choice of kernel and tile depends on, and what it says.

The measurements that chose the constants are in docs/performance/cuda.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..program.operator import Operator
from ..program.render import LIBRARY
from .kernel import Mode, Tile

# Main threads of a block that has a multiprocessor to itself.
THREADS = 256
# Operators of at least COSTLY instructions and at most COSTLY_WORDS words take more warps: with
# COSTLY_THREADS they reach COSTLY_RATE times the rate. More than FULL_WARPS warps leave each thread
# 96 registers, which LOOKBACK with its 18 warps would spill.
COSTLY, COSTLY_THREADS, COSTLY_WORDS, COSTLY_RATE, FULL_WARPS = 28, 384, 4, 1.1, 16
# Kernels are unrolled over the steps and channels of a thread: the most instructions per phase,
# which bounds the time to compile.
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
        """Tiles in a group, of `ranks` in a wave: all where one poll finds those before; else what
        takes two polls; where the groups would be too many for one, what takes one poll if they
        are then few enough for two."""
        group, wave = looks(words)
        few = ranks if ranks <= group + 1 else 2 * group
        if ranks > few * wave:
            few = group + 1 if ranks <= 2 * (group + 1) * wave else -(-ranks // wave)
        return max(1, min(self.group or few, ranks))


def looks(words: int) -> tuple[int, int]:
    """Slots that a thread of `group_lookback` and `wave_lookback` (lanes_lookback.cuh) polls
    together: four registers for three words of state."""
    return (8, 8) if words <= 3 else (4, 4) if words <= 6 else (2, 2) if words <= 12 else (1, 1)


def cost_of(op: Operator) -> int:
    """About how many instructions one step takes."""
    programs = (op.lift, op.combine, op.lower)
    return sum(
        HEAVY.get(i.op, LIBRARY_COST if i.op in LIBRARY else 1)
        for program in programs
        for i in program.instructions
    )


def is_costly(shape: Shape) -> bool:
    """Whether more warps than usual pay."""
    return shape.cost >= COSTLY and shape.words <= COSTLY_WORDS
