"""How much an operator computes per element, and which limit of a GPU that is nearest to.

Counted are the instructions of one lift, one combine and one lower, without what no output needs:
the least that any scan does. (A kernel that combines its tiles twice does more.) Each takes slots
of the FP32 units, and functions also of the special function units. The slots of the functions that
the CUDA engine has of its own, and of exp, log and log1p, were counted in machine code for sm_90a;
others are estimates in their usual range, divisions and square roots being correctly rounded.
Multiply-adds count as two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from assocscan.api.bind_arguments import bind
from assocscan.monoids.monoid import Monoid
from assocscan.program.operator import Operator
from assocscan.program.program_builder import Program
from assocscan.program.rewriting.joint_functions import with_joint_functions

from .device_limits import EXPONENTIALS_PER_CLOCK

FP32_PER_CLOCK = 128  # of a multiprocessor, NVIDIA since Ampere's sm_86 and on sm_90
FREE = frozenset(("const", "detach", "cast", "round_f16", "round_bf16"))
# Of one result: slots of FP32 units, special functions.
FUNCTIONS: dict[str, tuple[int, int]] = {
    "exp": (8, 1), "exp2": (4, 1), "expm1": (14, 1), "log": (26, 0), "log2": (8, 1),
    "log10": (27, 0), "log1p": (29, 0), "tanh": (16, 2), "sigmoid": (14, 2), "div": (8, 1),
    "log1p_exp": (9, 1), "log1p_signed_exp": (21, 1), "exp_of_peak": (1, 1),
    "log_of_sum": (18, 0), "sqrt": (6, 1), "rsqrt": (3, 1), "sin": (15, 0), "cos": (15, 0),
    "erf": (24, 1),
    "pow": (40, 2), "hypot": (16, 1), "atan2": (30, 1),
    "floordiv": (16, 1), "truncdiv": (16, 1), "remainder": (20, 1), "fmod": (20, 1),
}  # fmt: skip
# The slots of gcd depend on the values. Assumed are a running divisor and numbers up to 100: about
# four rounds of Euclid's algorithm, each of ten slots and one special function in 64 bits. These 40
# slots are written as 10, since `slots` multiplies by 4 for 64 bits.
FUNCTIONS["gcd"] = (10, 4)


class Arithmetic(NamedTuple):
    """Slots of FP32 units and special functions, of one element or of many."""

    fp32: int
    special: int

    def times(self, count: int) -> Arithmetic:
        return Arithmetic(self.fp32 * count, self.special * count)


class Limit(NamedTuple):
    """The nearest limit: its name, and the least time that it allows in milliseconds."""

    name: str
    ms: float


def arithmetic_of(op: Monoid, xs: Any, axis: int) -> Arithmetic | None:
    """Of one element; None for operators without a scalar program."""
    program = bind(op, xs, axis, False, True, None, False, None).traced.operator
    if type(program) is not Operator:
        return None
    carried = program.carry_components(())
    parts = (program.lift.select(carried), program.combine.select(carried), program.lower)
    counts = [slots(p) for p in parts]
    return Arithmetic(sum(c.fp32 for c in counts), sum(c.special for c in counts))


def slots(program: Program) -> Arithmetic:
    fp32 = special = 0
    for i in with_joint_functions(program).instructions:
        if i.op in FREE:
            continue
        usual, functions = FUNCTIONS.get(i.op, (1, 0))
        wide = i.dtype in ("i64", "u64")
        fp32 += usual * (4 if wide else 2 if i.dtype[0] in "iu" else 1)  # 64 integers per clock
        special += functions
    return Arithmetic(fp32, special)


def nearest_limit(
    arithmetic: Arithmetic | None, copy_ms: float, device: torch.device
) -> Limit | None:
    """Memory, FP32 or special functions, whichever takes longest; None where the rates are not
    known."""
    if arithmetic is None or device.type != "cuda" or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(device)
    clocks = properties.multi_processor_count * properties.clock_rate  # the latter in kHz: per ms
    return max(
        Limit("memory", copy_ms),
        Limit("FP32", arithmetic.fp32 / (FP32_PER_CLOCK * clocks)),
        Limit("special functions", arithmetic.special / (EXPONENTIALS_PER_CLOCK * clocks)),
        key=lambda limit: limit.ms,
    )
