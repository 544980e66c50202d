"""`Shape`, the input of the choice of a kernel and tile, and `Choice`, its result.

The measurements that chose the constants are in docs/performance/cuda.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..program.cpp_and_triton_expressions import LIBRARY
from ..program.operator import Operator
from ..program.rewriting.joint_functions import with_joint_functions
from .kernel import Mode, Tile

# Main threads of a block that has a multiprocessor to itself.
THREADS = 256
# Operators of at least COSTLY instructions and at most COSTLY_WORDS words use more warps: with
# COSTLY_THREADS they reach COSTLY_RATE times the rate. With more than FULL_WARPS warps a thread has
# only 96 registers; LOOKBACK, which would have 18 warps, would spill, except for states of up to
# SMALL_WORDS words. These use COSTLY_THREADS there too, and in all modes also MOST_THREADS, at
# MOST_RATE times the rate.
COSTLY, COSTLY_THREADS, COSTLY_WORDS, COSTLY_RATE, FULL_WARPS = 28, 384, 4, 1.1, 16
SMALL_WORDS, MOST_THREADS, MOST_RATE = 2, 512, 1.15
# Kernels are unrolled over the steps and channels of a thread: the most instructions per phase,
# which bounds the time to compile.
MOST_UNROLLED = 2000
HEAVY = {"exp": 9, "div": 4, "sqrt": 4, "rsqrt": 4, "pow": 60, "sin": 11, "cos": 11, "tan": 80,
         "gcd": 40, "floordiv": 10, "truncdiv": 10, "remainder": 10, "fmod": 20, "sigmoid": 20,
         "log1p_exp": 11, "log1p_signed_exp": 24, "exp_of_peak": 2, "log_of_sum": 20}  # fmt: skip
LIBRARY_COST = 20


@dataclass(frozen=True)
class Shape:
    """The properties of a scan and a GPU that a choice depends on.

    lanes: whether channels are contiguous (lanes_scan.cuh), not steps (rows_scan.cuh).
    rows, length, channels: the sizes of the scan.
    words: 32-bit words of a state.
    sizes: bytes per element of each input.
    written: bytes per element of all outputs.
    processors, shared_memory, bandwidth: multiprocessors, bytes per block, bytes per second.
    cost: `cost_of` the operator.
    walked: whether steps are not associative, so that each thread walks along its chains.
    wait: of a walk, the estimated ns between the states of two steps; 0: the axis is not cut.
    decides: of a walk, whether a step decides (`WalkStep.decides`).
    """

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
    walked: bool = False
    wait: float = 0.0
    decides: bool = False

    @property
    def is_reduction(self) -> bool:
        """Whether only finals are written."""
        return self.written == 0


@dataclass(frozen=True)
class Parts:
    """How an axis is cut: into `count` parts of `steps` steps, the last of which may be shorter.
    warm, trial: how many steps earlier a part is begun, and tried (`walk/parts_walk.cuh`); trial 0:
        it is not tried, else it is the smaller of the two. These early steps write outputs to the
        first places of the part; so no part may have fewer.
    residue: the most that the steps of a trial may leave of a difference, in 1/65536 of it.
    distant, distant_residue: the same for parts that are begun earlier; distant 0: none is.
    slow: of 32 channels, how many may exceed that; 0 unless steps decide.
    """

    count: int
    steps: int
    warm: int
    trial: int = 0
    residue: int = 1 << 13
    distant: int = 0
    distant_residue: int = 0
    slow: int = 0


@dataclass(frozen=True)
class Choice:
    """A kernel and its tile.

    mode: how the carry goes from tile to tile.
    group: in LOOKBACK for lanes, the tiles of a group of aggregates; 0: the number that needs the
        fewest polls (`radix`).
    parts: of a walk, the parts of the axis that are walked at the same time; None: it is not cut.
    """

    tile: Tile
    mode: Mode = "SERIAL"
    group: int = 0
    parts: Parts | None = None

    def radix(self, ranks: int, words: int, channels: int = 32) -> int:
        """The tiles of a group, of `ranks` tiles in a wave, for the fewest polls.

        A tile polls the earlier tiles of its group, and the groups of the wave. One poll reads
        several slots (`looks`, by each of the lanes that share a channel). All tiles are one group
        if one poll reads those before the last. Else groups have the tiles of two polls. If one
        poll cannot read so many groups, groups have the tiles of one poll, provided that two polls
        can read all groups; if they cannot, as many as make the groups fit in one poll.
        """
        group, wave = (sharers(channels) * each for each in looks(words, channels))
        few = ranks if ranks <= group + 1 else 2 * group
        if ranks > few * wave:
            few = group + 1 if ranks <= 2 * (group + 1) * wave else -(-ranks // wave)
        return max(1, min(self.group or few, ranks))


def sharers(channels: int) -> int:
    """The lanes of a warp that share a channel (`CHANNEL_LANES` in lanes_lookback.cuh)."""
    return max(1, 32 // channels)


def looks(words: int, channels: int = 32) -> tuple[int, int]:
    """The number of slots that a thread of `group_lookback`, and one of `wave_lookback`
    (lanes_lookback.cuh), reads in one poll. A slot needs 4 registers per 3 words of state. Lanes
    that share a channel read as many slots together as one lane would, or one each."""
    each = 8 if words <= 3 else 4 if words <= 6 else 2 if words <= 12 else 1
    if sharers(channels) > 1:
        each = max(1, 2 * each // sharers(channels))
    return each, each


def cost_of(op: Operator) -> int:
    """The approximate number of instructions of one step."""
    programs = (op.lift, op.combine, op.lower)
    return sum(
        HEAVY.get(i.op, LIBRARY_COST if i.op in LIBRARY else 1)
        for program in programs
        for i in with_joint_functions(program).instructions
    )


def is_costly(shape: Shape) -> bool:
    """Whether the scan is faster with more warps than usual."""
    return shape.cost >= COSTLY and shape.words <= COSTLY_WORDS
