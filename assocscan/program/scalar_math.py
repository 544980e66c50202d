"""Small formulas in scalar operations: what torch does in one operation and a table cannot.

`FORMULAS` are real operations (division modes, powers with constant exponents, clamp, sign);
`COMPLEX` are complex ones on (re, im) pairs, with torch's plain product and its scaled division.
"""

from __future__ import annotations

from collections.abc import Callable

from .dtypes import FLOATS
from .program_builder import Builder

Pair = tuple[int, int]
BOOLEAN = {"add": "or", "mul": "and", "max": "or", "min": "and", "sub": "xor"}
INTEGER_IDENTITIES = frozenset({"floor", "ceil", "round", "trunc"})


class ScalarMath:
    """Formulas that write into one builder."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def arithmetic(self, op: str, *values: int) -> int:
        """One scalar operation, with torch's meaning for bool and integers."""
        kind = self.builder.dtype(values[0])
        if kind == "b1":
            op = BOOLEAN.get(op, op)
        if kind not in FLOATS and op in INTEGER_IDENTITIES:
            return values[0]
        if op == "abs" and kind in ("u8", "b1"):
            return values[0]
        return self.builder.emit(op, *values)

    def number(self, value: float, like: int) -> int:
        return self.builder.const(value, self.builder.dtype(like))

    def __getattr__(self, op: str) -> Callable[..., int]:
        """`math.mul(a, b)` emits `mul`."""
        if op.startswith("__"):
            raise AttributeError(op)
        return lambda *values: self.arithmetic(op.rstrip("_"), *values)

    def select(self, condition: int, a: int, b: int) -> int:
        return self.builder.emit("where", condition, a, b)


def divide(m: ScalarMath, a: int, b: int, rounding_mode: str | None = None) -> int:
    if rounding_mode == "floor":
        return m.floordiv(a, b)
    if rounding_mode == "trunc":
        integral = m.builder.dtype(a) not in FLOATS
        return m.truncdiv(a, b) if integral else m.trunc(m.div(a, b))
    return m.div(a, b)


def power(m: ScalarMath, a: int, b: int) -> int:
    exponent = m.builder.literal(b)
    if m.builder.dtype(a) not in FLOATS:
        return m.mul(a, a) if exponent == 2 else m.pow(a, b)
    special: dict[float, Callable[[], int]] = {
        0.0: lambda: m.number(1.0, a),
        1.0: lambda: a,
        2.0: lambda: m.mul(a, a),
        3.0: lambda: m.mul(m.mul(a, a), a),
        0.5: lambda: m.sqrt(a),
        -0.5: lambda: m.rsqrt(a),
        -1.0: lambda: m.div(m.number(1.0, a), a),
        -2.0: lambda: m.div(m.number(1.0, a), m.mul(a, a)),
    }
    if exponent is not None and exponent in special:
        return special[exponent]()
    return m.pow(a, b)


def clamp(m: ScalarMath, x: int, *limits: int, bounds: tuple[str, ...]) -> int:
    for bound, limit in zip(bounds, limits, strict=True):
        x = m.max(x, limit) if bound == "min" else m.min(x, limit)
    return x


def sign(m: ScalarMath, x: int) -> int:
    if m.builder.dtype(x) == "b1":
        return x
    zero, one = m.number(0, x), m.number(1, x)
    if m.builder.dtype(x) == "u8":
        return m.select(m.gt(x, zero), one, zero)
    positive = m.select(m.gt(x, zero), one, zero)
    return m.select(m.lt(x, zero), m.number(-1, x), positive)


def relu(m: ScalarMath, x: int) -> int:
    zero = m.number(0, x)
    return m.select(m.le(x, zero), zero, x)


FORMULAS: dict[str, Callable[..., int]] = {
    "div": divide,
    "floor_divide": lambda m, a, b: m.floordiv(a, b),
    "reciprocal": lambda m, a: m.div(m.number(1.0, a), a),
    "pow": power,
    "clamp": clamp,
    "clamp_min": lambda m, x, low: m.max(x, low),
    "clamp_max": lambda m, x, high: m.min(x, high),
    "sign": sign,
    "sgn": sign,
    "square": lambda m, x: m.mul(x, x),
    "rsub": lambda m, a, b: m.sub(b, a),
    "relu": relu,
    "positive": lambda m, x: x,
    "_conj": lambda m, x: x,
    "_conj_physical": lambda m, x: x,
    "resolve_conj": lambda m, x: x,
}


def complex_multiply(m: ScalarMath, x: Pair, y: Pair) -> Pair:
    (a, b), (c, d) = x, y
    return m.sub(m.mul(a, c), m.mul(b, d)), m.add(m.mul(a, d), m.mul(b, c))


def complex_divide(m: ScalarMath, x: Pair, y: Pair) -> Pair:
    """Smith's scaled division: ratio and scale by the larger part of the denominator."""
    (a, b), (c, d) = x, y
    real_larger = m.ge(m.abs(c), m.abs(d))
    big, small = m.select(real_larger, c, d), m.select(real_larger, d, c)
    ratio = m.div(small, big)
    scale = m.div(m.number(1.0, a), m.add(big, m.mul(small, ratio)))
    p, q = m.select(real_larger, a, b), m.select(real_larger, b, a)
    real = m.mul(m.add(p, m.mul(q, ratio)), scale)
    cross = m.mul(m.sub(q, m.mul(p, ratio)), scale)
    zero = m.eq(big, m.number(0.0, a))
    imaginary = m.select(real_larger, cross, m.neg(cross))
    return m.select(zero, m.div(a, m.abs(big)), real), m.select(
        zero, m.div(b, m.abs(big)), imaginary
    )


def complex_exp(m: ScalarMath, x: Pair) -> Pair:
    radius = m.exp(x[0])
    return m.mul(radius, m.cos(x[1])), m.mul(radius, m.sin(x[1]))


def complex_log(m: ScalarMath, x: Pair) -> Pair:
    return m.log(m.hypot(*x)), m.atan2(x[1], x[0])


def complex_sqrt(m: ScalarMath, x: Pair) -> Pair:
    """The principal root: non-negative real part, the sign of the imaginary part kept."""
    a, b = x
    half, zero = m.number(0.5, a), m.number(0.0, a)
    root = m.sqrt(m.mul(m.add(m.hypot(a, b), m.abs(a)), half))
    other = m.select(m.eq(root, zero), zero, m.div(m.mul(m.abs(b), half), root))
    right = m.ge(a, zero)
    return m.select(right, root, other), m.copysign(m.select(right, other, root), b)


def complex_power(m: ScalarMath, x: Pair, y: Pair) -> Pair:
    real, imaginary = (m.builder.literal(v) for v in y)
    if imaginary == 0 and real in (2, 3):
        square = complex_multiply(m, x, x)
        return square if real == 2 else complex_multiply(m, square, x)
    return complex_exp(m, complex_multiply(m, y, complex_log(m, x)))


def complex_sgn(m: ScalarMath, x: Pair) -> Pair:
    radius, zero = m.hypot(*x), m.number(0.0, x[0])
    at_zero = m.eq(radius, zero)
    parts = [m.select(at_zero, zero, m.div(v, radius)) for v in x]
    return parts[0], parts[1]


def one(m: ScalarMath, like: int) -> Pair:
    return m.number(1.0, like), m.number(0.0, like)


COMPLEX: dict[str, Callable[..., Pair | int]] = {
    "add": lambda m, x, y: (m.add(x[0], y[0]), m.add(x[1], y[1])),
    "sub": lambda m, x, y: (m.sub(x[0], y[0]), m.sub(x[1], y[1])),
    "rsub": lambda m, x, y: (m.sub(y[0], x[0]), m.sub(y[1], x[1])),
    "mul": complex_multiply,
    "div": complex_divide,
    "neg": lambda m, x: (m.neg(x[0]), m.neg(x[1])),
    "_conj": lambda m, x: (x[0], m.neg(x[1])),
    "_conj_physical": lambda m, x: (x[0], m.neg(x[1])),
    "conj_physical": lambda m, x: (x[0], m.neg(x[1])),
    "resolve_conj": lambda m, x: x,
    "square": lambda m, x: complex_multiply(m, x, x),
    "reciprocal": lambda m, x: complex_divide(m, one(m, x[0]), x),
    "exp": complex_exp,
    "log": complex_log,
    "sqrt": complex_sqrt,
    "pow": complex_power,
    "sgn": complex_sgn,
    "abs": lambda m, x: m.hypot(*x),
    "angle": lambda m, x: m.atan2(x[1], x[0]),
    "eq": lambda m, x, y: m.and_(m.eq(x[0], y[0]), m.eq(x[1], y[1])),
    "ne": lambda m, x, y: m.or_(m.ne(x[0], y[0]), m.ne(x[1], y[1])),
}
