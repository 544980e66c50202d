"""The parts of an axis that are walked at the same time (parts_walk.cuh): where there are some, and
what a state of theirs is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...engines.base.layout import Layout
from ...engines.base.scan_spec import ScanSpec
from ...program.cpp_and_triton_expressions import LIBRARY, inline
from ...program.operator import Operator
from ...program.program_builder import Program
from ..kernel import word_counts, word_statements
from ..tile_choice_inputs import HEAVY, LIBRARY_COST, Parts, Shape
from .step import LATENCY, OTHER, WalkStep, is_coarse, walk_step

# A chain has a counter for each part, and one more (`Counters`). They come first in the workspace:
# launches of other shapes must not find records there.
MOST_COUNTERS = 8192
COUNTER_BYTES = 4 * MOST_COUNTERS
# A class of workspaces of its own (`LoadedKernel.slot_class`): counters are zero between launches.
SLOT_CLASS = 3
# CHECK steps are whole tiles. Parts begin at multiples of CHECK, and keep a state every CHECK
# steps.
CHECK = 128
# Cycles from operands to result, and cycles per nanosecond, for `carry_of`.
CYCLES = (
    {op: 2 * cost for op, cost in HEAVY.items()}
    | LATENCY
    | {"sigmoid_exp2": 43, "tanh_exp2": 43, "fused": 4, "neg": 0}
)
CLOCK = 1.8
# A part has at least LEAST_STEPS steps, and an axis at most MOST parts, which one block may have to
# go through. A part is begun WARM steps before its first one; its trial, TRIAL.
LEAST_STEPS, MOST, WARM, TRIAL = 512, 64, 128, 64
# A state is forgotten once a difference as large as itself has shrunk to 2^-BITS of it, a rounding
# of float32. A part is walked if, by its trial, that takes at most as many steps as the part has:
# so many may be walked twice. If it takes longer, but at most 1/DISTANT of the axis, and there are
# MANY parts, the part is begun that much earlier. A difference below ROUNDINGS of the numbers is
# forgotten, too.
BITS, ROUNDINGS = 24, 2**-16
MANY, DISTANT = 16, 8
# Where a step decides, channels forget one by one, each at once. If a trial leaves a difference in
# SLOW of 32, the last one has forgotten after some TRIAL log(64) / log(32 / SLOW) = 510 steps, as
# many as the shortest part has.
SLOW = 19
# There are at most CROWD warps for each scheduler. Where there are more than one, a step takes
# CROWDED times its wait, or ISSUED times as long as its instructions take to issue if that is more.
CROWD, CROWDED, ISSUED = 1.5, 1.5, 2.6
# What cutting adds: the EARLY steps of a trial and before a part, and OVERHEAD ns of launches,
# records and edges. An axis is cut if the estimates for the parts and for their memory traffic are
# both at most WORTH of that for one walk, and less by SAVED ns, which mending some hundred short
# steps may cost.
EARLY, OVERHEAD, WORTH, SAVED = WARM + TRIAL, 20e3, 0.85, 30e3
# What is kept takes up to so many bytes or so much of the bytes that the walk moves, whichever is
# more.
MOST_KEPT, MOST_KEPT_OF_MOVED = 64 << 20, 1 / 16
# To issue the instructions of a step takes about so many ns of its `cost_of`.
ISSUE = 0.28
SCHEDULERS = 4  # of a multiprocessor


def carry_of(spec: ScanSpec[Operator], layout: Layout) -> tuple[float, bool]:
    """`Shape.wait` and `Shape.decides`. The wait is 0 if the axis must not be cut."""
    if spec.sequences is not None:
        return 0, False
    coarse = is_coarse(
        leaf.dtype for (role, _), leaf in layout.leaves.items()
        if role in ("input", "output") and leaf.strides[spec.axis] != 0
    )  # fmt: skip
    step = walk_step(spec.operator, spec.final, spec.exclusive, coarse)
    if not kept_of(step).forgotten:
        return 0, False
    n = len(step.program.inputs)
    ready = [0] * n
    for value, i in enumerate(step.program.instructions, n):
        before = max((ready[a] for a in i.args if a in step.moving or a < n), default=0)
        usual = 2 * LIBRARY_COST if i.op in LIBRARY else OTHER
        cycles = 18 if coarse and i.op == "tanh" else CYCLES.get(i.op, usual)
        ready.append(before + cycles if value in step.moving else 0)
    wait = max(ready[v] for v in step.program.outputs[: len(step.carried)]) / CLOCK
    return wait, step.decides


def parts_of(shape: Shape, channels: int) -> Parts | None:
    """How the axis of a walk is cut, of which a block has so many channels; None: it is not."""
    chains = shape.rows * -(-shape.channels // channels)
    if not shape.wait or chains == 0:
        return None
    lanes = shape.rows * shape.channels
    moved = lanes * (sum(shape.sizes) + shape.written)  # bytes per step
    kept = 4 * lanes * shape.words / CHECK
    if kept > MOST_KEPT_OF_MOVED * moved and kept * shape.length > MOST_KEPT:
        return None
    # In ns per step.
    memory, issue = 1e9 * moved / shape.bandwidth, ISSUE * shape.cost
    alone = max(shape.wait, issue)
    crowded = max(CROWDED * shape.wait, ISSUED * issue)
    schedulers = SCHEDULERS * shape.processors
    most = min(
        int(CROWD * schedulers) // chains, shape.length // LEAST_STEPS, MOST,
        MOST_COUNTERS // chains - 1,
    )  # fmt: skip
    whole = alone * shape.length
    found, least = None, min(WORTH * whole, whole - SAVED)
    for parts in range(2, most + 1):
        steps = -(-shape.length // parts)
        steps += -steps % CHECK
        while 0 < shape.length % steps < WARM:  # the last one
            steps += CHECK
        count = -(-shape.length // steps)
        step = crowded if chains * count > schedulers else alone
        time = max((steps + EARLY) * step + OVERHEAD, shape.length * memory)
        if time < least:
            found, least = Parts(count, steps, WARM, TRIAL), time
    if found is None:
        return None
    residue = residue_of(found.steps)
    distant = shape.length // DISTANT // CHECK * CHECK if found.count >= MANY else 0
    far = residue_of(distant) if distant else 0
    slow = SLOW if shape.decides else 0
    return replace(found, residue=residue, distant=distant, distant_residue=far, slow=slow)


def residue_of(steps: float) -> int:
    """`Parts.residue`: what a trial may leave of a difference that so many steps forget."""
    return int(2 ** (16 - BITS * TRIAL / steps))


@dataclass(frozen=True)
class Kept:
    """The components of a state that a step changes.

    forgotten: those that steps may forget.
    sums: those that only grow by something that does not depend on them.
    """

    forgotten: tuple[int, ...]
    sums: tuple[int, ...]


def kept_of(step: WalkStep) -> Kept:
    program = step.program
    changed = {c: v for c, v in zip(step.carried, program.outputs, strict=False) if v != c}
    sums = {c for c, value in changed.items() if is_sum(program, c, value)}
    return Kept(tuple(c for c in changed if c not in sums), tuple(sorted(sums)))


def is_sum(program: Program, c: int, value: int) -> bool:
    """Whether `value` is input c plus something, and nothing else reads either of them."""
    n = len(program.inputs)
    if value < n:
        return False
    made = program.instructions[value - n]
    added = made.args if made.op == "add" else made.args[2:] if made.op == "fused" else ()
    reads = [a for i in program.instructions for a in i.args] + list(program.outputs)
    return c in added and reads.count(c) == 1 and reads.count(value) == 1


def kept_words(op: Operator, kept: Kept) -> tuple[int, int]:
    """32-bit words of what is kept of a state, and of what may be forgotten of it."""
    kinds = op.combine.output_dtypes
    forgotten, sums = (
        sum(word_counts(kinds[c] for c in components))
        for components in (kept.forgotten, kept.sums)
    )  # fmt: skip
    return forgotten + sums, forgotten


def record_bytes(op: Operator, step: WalkStep, channels: int, parts: Parts) -> int:
    """The bytes of a `Record`."""
    kept, _ = kept_words(op, kept_of(step))
    words = 2 * kept + 1 + kept * (parts.steps // CHECK)
    return 4 * channels * words


def kept_source(op: Operator, step: WalkStep) -> str:
    """The constants and functions of parts_walk.cuh that depend on the operator."""
    kept = kept_of(step)
    kinds = op.combine.output_dtypes
    both = (*kept.forgotten, *kept.sums)
    packing, unpacking = word_statements([f"s{c}" for c in both], [kinds[c] for c in both])
    words, forgotten = kept_words(op, kept)
    sums = [f"s.s{c}" for c in kept.sums]
    return "\n".join(
        [
            f"constexpr int KEPT_WORDS = {words}, FORGOTTEN_WORDS = {forgotten};",
            f"constexpr bool HAS_SUMS = {str(bool(sums)).lower()};",
            f"constexpr int COUNTER_BYTES = {COUNTER_BYTES}, CHECK = {CHECK};",
            f"constexpr float ROUNDINGS = {ROUNDINGS}f;",
            inline("to_kept(const State& s, uint32_t* w)", packing),
            inline("from_kept(State& s, const uint32_t* w)", unpacking),
            inline("clear_sums(State& s)", ["(void)s;", *(f"{x} = 0;" for x in sums)]),
            inline("add_sums(State& s, const State& x)",
                   ["(void)s, (void)x;", *(f"s.s{c} = s.s{c} + x.s{c};" for c in kept.sums)]),
            inline("take_sums(State& s, const State& x)",
                   ["(void)s, (void)x;", *(f"s.s{c} = x.s{c};" for c in kept.sums)]),
            inline("difference(const State& s, const State& t, float negligible)",
                   ["(void)s, (void)t, (void)negligible;", "float sum = 0;",
                    *(difference(f"s{c}", kinds[c]) for c in kept.forgotten), "return sum;"],
                   "float"),
        ]
    )  # fmt: skip


def difference(field: str, kind: str) -> str:
    """The C++ statement that adds the difference of a field in s and t to `sum`: 0 if it is at most
    `negligible` of the numbers, or if both are NaN. That of two integers is NaN, which is never
    small, or 0."""
    s, t = f"s.{field}", f"t.{field}"
    if kind not in ("f32", "f64"):
        return f"if ({s} != {t}) sum += float_of(0x7fc00000);"
    size = "__builtin_fabsf" if kind == "f32" else "__builtin_fabs"
    return (
        f"if ({s} != {t} && ({s} == {s} || {t} == {t}) && "
        f"!({size}({s} - {t}) <= negligible * ({size}({s}) + {size}({t})))) "
        f"sum += (float){size}({s} - {t});"
    )
