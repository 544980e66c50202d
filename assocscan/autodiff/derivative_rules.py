"""Reverse-mode differentiation of a `Program`, one rule per scalar operation.

The formulas and the conventions at ties and zeros are torch's own, but for what
docs/how/derivatives.md lists, so that a gradient equals what autograd gives for the sequential
loop. A value that is not selected is not multiplied by zero, as
in torch, but left out (`selections`). A cotangent that is structurally zero is `None` and
costs nothing: no 0·x is ever emitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..errors import UnsupportedOperation
from ..program.dtypes import FLOATS
from ..program.program_builder import Builder, Program
from ..program.scalar_math import ScalarMath
from ..program.vectors.state_axis import REDUCTIONS, StateBuilder
from .selections import added, masked, masks_of

Cotangent = int | None
Rule = Callable[..., tuple[Cotangent, ...]]
TWO_OVER_ROOT_PI = 2.0 / math.sqrt(math.pi)

# Operations that pass no gradient: integer-valued, piecewise constant, or asked not to.
CONSTANT_OPS = frozenset(
    "floor ceil round trunc floordiv truncdiv eq ne lt le gt ge isnan isinf signbit and or xor not "
    "shl shr gcd detach const".split()
)


def _extremum(strict: str) -> Rule:
    """max and min: all to the chosen side, half to each at a tie. With a NaN neither side is
    chosen: all to both, as torch does.

    The selection of half is the outer one: the slope is no mask (`selections`) then, for which a
    backward scan would carry a flag.
    """

    def rule(m: ScalarMath, g: int, a: int, b: int, y: int) -> tuple[Cotangent, ...]:
        zero, half = m.number(0.0, g), m.mul(g, m.number(0.5, g))
        tie, exceeds = m.eq(a, b), m.builder.emit
        return (
            m.select(tie, half, m.select(exceeds(strict, b, a), zero, g)),
            m.select(tie, half, m.select(exceeds(strict, a, b), zero, g)),
        )

    return rule


def _fextremum(strict: str) -> Rule:
    """fmax and fmin: all to the chosen side, half to each at a tie; NaN is never chosen, and of two
    NaN the first is."""

    def rule(m: ScalarMath, g: int, a: int, b: int, y: int) -> tuple[Cotangent, ...]:
        zero, half = m.number(0.0, g), m.mul(g, m.number(0.5, g))
        tie = m.select(m.eq(a, b), half, zero)
        chosen = m.builder.emit
        left = m.or_(chosen(strict, a, b), m.isnan(b))
        right = m.or_(chosen(strict, b, a), m.and_(m.isnan(a), m.not_(m.isnan(b))))
        return m.select(left, g, tie), m.select(right, g, tie)

    return rule


def _pow(m: ScalarMath, g: int, a: int, b: int, y: int) -> tuple[Cotangent, ...]:
    zero, one = m.number(0.0, g), m.number(1.0, g)
    slope = m.mul(b, m.pow(a, m.sub(b, one)))
    base = m.select(m.eq(b, zero), zero, m.mul(g, slope))
    vanishes = m.and_(m.eq(a, zero), m.ge(b, zero))
    exponent = m.select(vanishes, zero, m.mul(g, m.mul(y, m.log(a))))
    return base, exponent


def _abs(m: ScalarMath, g: int, a: int, y: int) -> tuple[Cotangent, ...]:
    zero = m.number(0.0, g)
    negative = m.select(m.lt(a, zero), m.neg(g), zero)
    return (m.select(m.gt(a, zero), g, negative),)


def _copysign(m: ScalarMath, g: int, a: int, b: int, y: int) -> tuple[Cotangent, ...]:
    zero = m.number(0.0, g)
    same = m.eq(m.signbit(a), m.signbit(y))
    return m.select(m.eq(a, zero), zero, m.select(same, g, m.neg(g))), None


def _hypot(m: ScalarMath, g: int, a: int, b: int, y: int) -> tuple[Cotangent, ...]:
    zero = m.number(0.0, g)
    at_zero = m.eq(y, zero)
    return tuple(m.select(at_zero, zero, m.mul(g, m.div(v, y))) for v in (a, b))


def _atan2(m: ScalarMath, g: int, a: int, b: int, y: int) -> tuple[Cotangent, ...]:
    square = m.add(m.mul(a, a), m.mul(b, b))
    zero = m.number(0.0, g)
    scale = m.select(m.eq(square, zero), zero, m.div(g, square))
    return m.mul(scale, b), m.neg(m.mul(scale, a))


def _unary(slope: Callable[[ScalarMath, int, int, Callable[[float], int]], int]) -> Rule:
    """g · slope(a, y)."""

    def rule(m: ScalarMath, g: int, a: int, y: int) -> tuple[Cotangent, ...]:
        return (m.mul(g, slope(m, a, y, lambda v: m.number(v, g))),)

    return rule


def _over(divisor: Callable[[ScalarMath, int, int, Callable[[float], int]], int]) -> Rule:
    """g / divisor(a, y)."""

    def rule(m: ScalarMath, g: int, a: int, y: int) -> tuple[Cotangent, ...]:
        return (m.div(g, divisor(m, a, y, lambda v: m.number(v, g))),)

    return rule


def _erf_slope(m: ScalarMath, a: int, sign: float, n: Callable[[float], int]) -> int:
    return m.mul(n(sign * TWO_OVER_ROOT_PI), m.exp(m.neg(m.mul(a, a))))


RULES: dict[str, Rule] = {
    "add": lambda m, g, a, b, y: (g, g),
    "sub": lambda m, g, a, b, y: (g, m.neg(g)),
    "mul": lambda m, g, a, b, y: (m.mul(g, b), m.mul(g, a)),
    "div": lambda m, g, a, b, y: (m.div(g, b), m.neg(m.mul(g, m.div(m.div(a, b), b)))),
    "neg": lambda m, g, a, y: (m.neg(g),),
    "abs": _abs,
    "max": _extremum("gt"),
    "min": _extremum("lt"),
    "fmax": _fextremum("gt"),
    "fmin": _fextremum("lt"),
    "pow": _pow,
    "copysign": _copysign,
    "hypot": _hypot,
    "atan2": _atan2,
    "remainder": lambda m, g, a, b, y: (g, m.neg(m.mul(g, m.floordiv(a, b)))),
    "fmod": lambda m, g, a, b, y: (g, m.neg(m.mul(g, m.trunc(m.div(a, b))))),
    "exp": _unary(lambda m, a, y, n: y),
    "exp2": _unary(lambda m, a, y, n: m.mul(y, n(math.log(2.0)))),
    "expm1": _unary(lambda m, a, y, n: m.add(y, n(1.0))),
    "log": _over(lambda m, a, y, n: a),
    "log2": _over(lambda m, a, y, n: m.mul(a, n(math.log(2.0)))),
    "log10": _over(lambda m, a, y, n: m.mul(a, n(math.log(10.0)))),
    "log1p": _over(lambda m, a, y, n: m.add(a, n(1.0))),
    "sqrt": _over(lambda m, a, y, n: m.mul(y, n(2.0))),
    "rsqrt": _unary(lambda m, a, y, n: m.mul(n(-0.5), m.mul(y, m.mul(y, y)))),
    "sin": _unary(lambda m, a, y, n: m.cos(a)),
    "cos": _unary(lambda m, a, y, n: m.neg(m.sin(a))),
    "tan": _unary(lambda m, a, y, n: m.add(n(1.0), m.mul(y, y))),
    "asin": _unary(lambda m, a, y, n: m.rsqrt(m.sub(n(1.0), m.mul(a, a)))),
    "acos": _unary(lambda m, a, y, n: m.neg(m.rsqrt(m.sub(n(1.0), m.mul(a, a))))),
    "atan": _over(lambda m, a, y, n: m.add(m.mul(a, a), n(1.0))),
    "sinh": _unary(lambda m, a, y, n: m.cosh(a)),
    "cosh": _unary(lambda m, a, y, n: m.sinh(a)),
    "tanh": _unary(lambda m, a, y, n: m.sub(n(1.0), m.mul(y, y))),
    "asinh": _unary(lambda m, a, y, n: m.rsqrt(m.add(m.mul(a, a), n(1.0)))),
    "acosh": _unary(lambda m, a, y, n: m.rsqrt(m.sub(m.mul(a, a), n(1.0)))),
    "atanh": _over(lambda m, a, y, n: m.sub(n(1.0), m.mul(a, a))),
    "sigmoid": _unary(lambda m, a, y, n: m.mul(m.sub(n(1.0), y), y)),
    "erf": _unary(lambda m, a, y, n: _erf_slope(m, a, 1.0, n)),
    "erfc": _unary(lambda m, a, y, n: _erf_slope(m, a, -1.0, n)),
    "round_f16": lambda m, g, a, y: (g,),
    "round_bf16": lambda m, g, a, y: (g,),
}


def vjp(
    builder: Builder, program: Program, arguments: Sequence[int], seeds: Sequence[Cotangent]
) -> list[Cotangent]:
    """Cotangents of `program`'s inputs at `arguments`, from cotangents of its outputs.

    Raises UnsupportedOperation for an operation without a rule.
    """
    inlined = inline_values(builder, program, arguments)
    math_ = ScalarMath(builder)
    cotangents: list[Cotangent] = [None] * len(inlined)
    # The cotangents, one per state, of values that are the same for all states
    # (`program/vectors/state_axis`). They are summed over the states once they are complete.
    to_sum: list[Cotangent] = [None] * len(inlined)

    def total(value: int) -> Cotangent:
        part = to_sum[value]
        if part is not None and isinstance(builder, StateBuilder):
            accumulate(builder, cotangents, value, builder.sum_over_states(part))
        return cotangents[value]

    def is_summed(value: int, user: Cotangent) -> bool:
        """Whether a value that is the same for all states is used by one that is not."""
        if user is None or not isinstance(builder, StateBuilder):
            return False
        return builder.varies(user) and not builder.varies(inlined[value])

    for output, seed in zip(program.outputs, seeds, strict=True):
        accumulate(builder, to_sum if is_summed(output, seed) else cotangents, output, seed)
    n = len(program.inputs)
    for k in reversed(range(len(program.instructions))):
        g, i = total(n + k), program.instructions[k]
        if g is None or i.op in CONSTANT_OPS:
            continue
        operands = [inlined[a] for a in i.args]
        masks, g = masks_of(builder, g)
        for argument, part in zip(
            i.args, local_cotangents(math_, i.op, g, operands, inlined[n + k]), strict=True
        ):
            sums = to_sum if is_summed(argument, inlined[n + k]) else cotangents
            if part is not None:
                accumulate(builder, sums, argument, masked(builder, masks, part))
    return [total(value) for value in range(n)]


def jvp(
    builder: Builder, program: Program, arguments: Sequence[int], tangents: Sequence[Cotangent]
) -> list[Cotangent]:
    """Tangents of `program`'s outputs at `arguments`, from tangents of its inputs.

    An operation multiplies the tangent of an operand by a slope, and in `vjp` a cotangent by the
    same slope: so the rules of `vjp` serve here too. Raises UnsupportedOperation for an operation
    without a rule.
    """
    inlined = inline_values(builder, program, arguments)
    math_ = ScalarMath(builder)
    moved = [*tangents, *([None] * len(program.instructions))]
    for y, i in enumerate(program.instructions, len(program.inputs)):
        if i.op in CONSTANT_OPS:
            continue
        operands = [inlined[a] for a in i.args]
        for k, tangent in enumerate(moved[a] for a in i.args):
            if tangent is None:
                continue
            masks, t = masks_of(builder, tangent)
            if i.op == "cast":
                part = builder.cast(t, i.dtype) if i.dtype in FLOATS else None
            else:
                part = local_cotangents(math_, i.op, t, operands, inlined[y])[k]
            if part is not None:
                accumulate(builder, moved, y, masked(builder, masks, part))
    return [moved[value] for value in program.outputs]


def choose(builder: Builder, condition: int, first: Cotangent, other: Cotangent) -> Cotangent:
    """`first` where the condition holds, elsewhere `other`; None is zero."""
    some = other if first is None else first
    if some is None:
        return None
    zero = builder.const(0.0, builder.dtype(some))
    return builder.emit(
        "where", condition, zero if first is None else first, zero if other is None else other
    )


def or_zero(builder: Builder, value: Cotangent, kind: str) -> int:
    return builder.const(0, kind) if value is None else value


def local_cotangents(
    m: ScalarMath, op: str, g: int, operands: list[int], y: int
) -> tuple[Cotangent, ...]:
    """What one operation passes to each of its operands."""
    builder = m.builder
    if op == "cast":
        source = builder.dtype(operands[0])
        return (builder.cast(g, source) if source in FLOATS else None,)
    if op == "where":
        zero = m.number(0.0, g)
        return None, m.select(operands[0], g, zero), m.select(operands[0], zero, g)
    if builder.dtype(operands[0]) not in FLOATS:
        return (None,) * len(operands)
    if op in REDUCTIONS:
        return (reduction_cotangent(builder, op, g, operands[0], y),)
    if op not in RULES:
        raise UnsupportedOperation(f"{op} has no derivative rule")
    return RULES[op](m, g, *operands, y)


def reduction_cotangent(builder: Builder, op: str, g: int, a: int, y: int) -> int:
    """The cotangent of v[n], of which a reduction over the states is y.

    The largest and the smallest state: in equal parts to all that have this value, as torch does.
    NaN to all where y is NaN.
    """
    assert isinstance(builder, StateBuilder)
    if op == "sum_states":
        return g
    zero, one = (builder.const(v, builder.dtype(g)) for v in (0.0, 1.0))
    hit = builder.emit("eq", a, y)
    count = builder.sum_over_states(builder.emit("where", hit, one, zero))
    share = builder.emit("div", g, count)
    other = builder.emit("where", builder.emit("isnan", y), y, zero)
    return builder.emit("where", hit, share, other)


def inline_values(builder: Builder, program: Program, arguments: Sequence[int]) -> list[int]:
    """Every value of `program` (not only its outputs) in `builder`."""
    everything = Program(program.inputs, program.instructions, tuple(range(len(program.dtypes))))
    return builder.inline(everything, arguments)


def accumulate(builder: Builder, cotangents: list[Cotangent], value: int, part: Cotangent) -> None:
    """Add `part` to the cotangent of `value`; constants of zero add nothing."""
    if part is None or builder.literal(part) == 0:
        return
    known = cotangents[value]
    cotangents[value] = part if known is None else added(builder, known, part)
