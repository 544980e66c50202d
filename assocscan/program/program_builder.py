"""`Program`: straight-line scalar code in single-assignment form.

Every value is one scalar with one dtype (`f32`, `i64`, `b1`, …). A `Builder` is the only way to
make a program: each `emit` folds constants, applies the algebra that cannot change a result, and
returns an existing value for an equal expression, so the program is simplified as it grows;
`build` drops what no output needs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import UnsupportedOperation
from .dtypes import FLOATS, INT_BITS

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
PREDICATES = COMPARISONS | {"isnan", "isinf", "signbit"}
COMMUTATIVE = frozenset({"add", "mul", "and", "or", "xor", "eq", "ne"})

Number = float | int | bool
Key = str | int | bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One value: `op` applied to earlier values, or the constant `literal`."""

    op: str
    args: tuple[int, ...]
    dtype: str
    literal: Key | None = None


@dataclass(frozen=True)
class Program:
    """Inputs are values 0 … n−1; instruction k defines value n + k; outputs name values."""

    inputs: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The dtype of every value, inputs first."""
        return self.inputs + tuple(i.dtype for i in self.instructions)

    @cached_property
    def used_inputs(self) -> frozenset[int]:
        """The inputs that some output depends on."""
        used = {v for v in self.outputs if v < len(self.inputs)}
        for instruction in self.instructions:
            used.update(v for v in instruction.args if v < len(self.inputs))
        return frozenset(used)

    @property
    def output_dtypes(self) -> tuple[str, ...]:
        """The dtype of every output."""
        return tuple(self.dtypes[v] for v in self.outputs)

    def depending_on(self, inputs: Iterable[int]) -> frozenset[int]:
        """The values that depend on these inputs, and the inputs."""
        return depending(self.instructions, len(self.inputs), inputs)

    def select(self, outputs: Sequence[int]) -> Program:
        """The program that computes only these of its outputs."""
        builder = Builder(self.inputs)
        values = builder.inline(self, range(len(self.inputs)))
        return builder.build([values[k] for k in outputs])

    def __str__(self) -> str:
        n = len(self.inputs)
        lines = [f"program({', '.join(f'v{k}: {d}' for k, d in enumerate(self.inputs))})"]
        for k, i in enumerate(self.instructions, n):
            operands = " ".join(f"v{a}" for a in i.args) if i.args else str(i.literal)
            lines.append(f"  v{k}: {i.dtype} = {i.op} {operands}")
        lines.append(f"  return {', '.join(f'v{v}' for v in self.outputs)}")
        return "\n".join(lines)


def depending(
    instructions: Sequence[Instruction], first: int, inputs: Iterable[int]
) -> frozenset[int]:
    """These inputs, and the values that depend on them. `first`: the value of instruction 0."""
    found = set(inputs)
    for value, instruction in enumerate(instructions, first):
        if not found.isdisjoint(instruction.args):
            found.add(value)
    return frozenset(found)


def round_to(value: Number, dtype: str) -> Number:
    """`value` as the nearest (or wrapped) value of `dtype`."""
    if dtype == "b1":
        return bool(value)
    if dtype in INT_BITS:
        bits = INT_BITS[dtype]
        if isinstance(value, float):
            low, high = integer_range(dtype)
            if math.isnan(value):
                return 0
            return low if value <= low else high if value >= high else int(value)
        wrapped = int(value) & ((1 << bits) - 1)
        return wrapped - (1 << bits) if dtype[0] == "i" and wrapped >> (bits - 1) else wrapped
    try:
        if isinstance(value, int) and dtype == "f32":
            value = round_to_bits(value, 24)
        value = float(value)
        if dtype == "f64" or math.isinf(value) or math.isnan(value):
            return value
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def round_to_bits(value: int, bits: int) -> int:
    """The integer nearest to `value` with that many significant bits, ties to even."""
    drop = abs(value).bit_length() - bits
    if drop <= 0:
        return value
    kept, rest = divmod(abs(value), 1 << drop)
    half = 1 << (drop - 1)
    kept += rest > half or (rest == half and kept & 1 == 1)
    return (kept << drop) * (1 if value > 0 else -1)


def integer_range(dtype: str) -> tuple[int, int]:
    """The least and the greatest value of an integer dtype."""
    bits = INT_BITS[dtype]
    return (0, (1 << bits) - 1) if dtype[0] == "u" else (-(1 << bits - 1), (1 << bits - 1) - 1)


def encode(value: Number, dtype: str) -> Key:
    """A hashable form that tells −0.0 from 0.0 and equals itself for NaN."""
    value = round_to(value, dtype)
    return value.hex() if isinstance(value, float) else value


def decode(literal: Key | None) -> Number:
    """The number that `encode` wrote down."""
    assert literal is not None
    return float.fromhex(literal) if isinstance(literal, str) else literal


def _divide(a: Number, b: Number) -> Number | None:
    return a / b if isinstance(a, float) and b != 0 else None


def _min_max(choose: Callable[[Number, Number], Number]) -> Callable[..., Number | None]:
    def fold(a: Number, b: Number) -> Number | None:
        return choose(a, b) if a == a and b == b and a != b else None

    return fold


# Exact in IEEE terms: for f32, computing in double and rounding once gives the float32 result.
FOLDS: dict[str, Callable[..., Number | None]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divide,
    "neg": lambda a: -a,
    "abs": abs,
    "sqrt": lambda a: math.sqrt(a) if a >= 0 else None,
    "min": _min_max(min),
    "max": _min_max(max),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: (not a) if isinstance(a, bool) else ~a,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "isnan": lambda a: a != a,
    "isinf": lambda a: isinstance(a, float) and math.isinf(a),
    "signbit": lambda a: math.copysign(1.0, a) < 0 if isinstance(a, float) else a < 0,
}


class Builder:
    """Grows a program one simplified, deduplicated value at a time.

    most: how many instructions there may be, if not None; one more raises UnsupportedOperation. A
    product of large matrices is refused at once, not when it has been written in full.
    """

    most: int | None = None

    def __init__(self, inputs: Iterable[str]) -> None:
        self.inputs = tuple(inputs)
        self.instructions: list[Instruction] = []
        self._dtypes = list(self.inputs)
        self._literals: list[Number | None] = [None] * len(self.inputs)
        self._known: dict[Instruction, int] = {}
        self._emitted: dict[tuple[str, tuple[int, ...], str | None], int] = {}

    def dtype(self, value: int) -> str:
        return self._dtypes[value]

    def depending_on(self, inputs: Iterable[int]) -> frozenset[int]:
        """The values so far that depend on these inputs, and the inputs."""
        return depending(self.instructions, len(self.inputs), inputs)

    def instruction(self, value: int) -> Instruction | None:
        """The instruction that defines `value`; None for an input."""
        n = len(self.inputs)
        return None if value < n else self.instructions[value - n]

    def literal(self, value: int) -> Number | None:
        """The constant that `value` is, or None."""
        return self._literals[value]

    def const(self, value: Number, dtype: str) -> int:
        return self.append(Instruction("const", (), dtype, encode(value, dtype)))

    def emit(self, op: str, *args: int, dtype: str | None = None) -> int:
        """The value of `op` on earlier values; `dtype` is needed for casts only."""
        request = op, args, dtype
        value = self._emitted.get(request)
        if value is None:
            value = self._emitted[request] = self._new_value(op, args, dtype)
        return value

    def _new_value(self, op: str, args: tuple[int, ...], dtype: str | None) -> int:
        """What `emit` returns for a request that it has not had before."""
        if dtype is None:
            dtype = "b1" if op in PREDICATES else self.dtype(args[-1])
        simpler = self.simplify(op, args, dtype)
        if simpler is not None:
            return simpler
        if op in COMMUTATIVE:
            args = tuple(sorted(args))
        return self.append(Instruction(op, args, dtype))

    def cast(self, value: int, dtype: str) -> int:
        return self.emit("cast", value, dtype=dtype)

    def inline(self, program: Program, args: Sequence[int]) -> list[int]:
        """The outputs of `program` applied to values of this builder."""
        values = list(args)
        for i in program.instructions:
            values.append(self.repeat(i, values))
        return [values[v] for v in program.outputs]

    def repeat(self, i: Instruction, values: Sequence[int]) -> int:
        """The value of an instruction of another program, whose values are `values` here."""
        if i.op == "const":
            return self.append(i)
        return self.emit(i.op, *(values[a] for a in i.args), dtype=i.dtype)

    def build(self, outputs: Sequence[int]) -> Program:
        """The program of these outputs, without what none of them needs."""
        n = len(self.inputs)
        needed: set[int] = set()
        stack = [v for v in outputs if v >= n]
        while stack:
            value = stack.pop()
            if value not in needed:
                needed.add(value)
                stack.extend(a for a in self.instructions[value - n].args if a >= n)
        rename = {v: v for v in range(n)}
        kept: list[Instruction] = []
        for value in sorted(needed):
            i = self.instructions[value - n]
            rename[value] = n + len(kept)
            args = tuple(rename[a] for a in i.args)
            kept.append(Instruction(i.op, args, i.dtype, i.literal))
        return Program(self.inputs, tuple(kept), tuple(rename[v] for v in outputs))

    def append(self, instruction: Instruction) -> int:
        value = self._known.get(instruction)
        if value is None:
            if self.most is not None and len(self.instructions) >= self.most:
                raise UnsupportedOperation(
                    f"the element unrolls to more than {self.most} scalar operations"
                )
            value = len(self.inputs) + len(self.instructions)
            self.instructions.append(instruction)
            self._dtypes.append(instruction.dtype)
            literal = instruction.literal
            self._literals.append(None if literal is None else decode(literal))
            self._known[instruction] = value
        return value

    def simplify(self, op: str, args: tuple[int, ...], dtype: str) -> int | None:
        if op == "cast":
            return self._simplify_cast(args[0], dtype)
        constants = [self.literal(a) for a in args]
        if op == "where":
            if constants[0] is not None:
                return args[1] if constants[0] else args[2]
            return args[1] if args[1] == args[2] else None
        if op in FOLDS and None not in constants:
            folded = FOLDS[op](*constants)
            if folded is not None:
                return self.const(folded, dtype)
        if len(args) == 2:
            return self._simplify_binary(op, args, constants)
        if op in ("neg", "not"):
            inner = self.instruction(args[0])
            return inner.args[0] if inner is not None and inner.op == op else None
        if op in ("isnan", "isinf") and self.dtype(args[0]) not in FLOATS:
            return self.const(False, "b1")
        return None

    def _simplify_cast(self, value: int, dtype: str) -> int | None:
        source = self.dtype(value)
        if source == dtype:
            return value
        number = self.literal(value)
        if number is not None:
            out_of_range = isinstance(number, float) and round_to(number, dtype) != int_or(number)
            if dtype not in INT_BITS or not out_of_range:
                return self.const(number, dtype)
        inner = self.instruction(value)
        if inner is not None and inner.op == "cast" and self.dtype(inner.args[0]) == dtype:
            return inner.args[0] if _widens(dtype, source) else None
        return None

    def _simplify_binary(
        self, op: str, args: tuple[int, ...], constants: list[Number | None]
    ) -> int | None:
        a, b = args
        if a == b and op in ("min", "max", "and", "or"):
            return a
        if constants == [None, None]:
            return None
        integral = self.dtype(a) not in FLOATS
        left, right = (None if c is None else encode(c, self.dtype(a)) for c in constants)
        zero, minus_zero, one = (encode(v, self.dtype(a)) for v in (0.0, -0.0, 1.0))
        if op == "add" and (left == minus_zero or right == minus_zero):
            return b if left == minus_zero else a
        if op in ("sub", "shl", "shr") and right == zero:
            return a
        if op in ("mul", "div") and right == one:
            return a
        if op == "mul" and left == one:
            return b
        if self.dtype(a)[0] in "fi" and op in ("mul", "div"):
            minus_one = encode(-1, self.dtype(a))
            if right == minus_one:
                return self.emit("neg", a)
            if left == minus_one and op == "mul":
                return self.emit("neg", b)
        if op == "mul" and integral and zero in (left, right):
            return self.const(0, self.dtype(a))
        if self.dtype(a) == "b1" and op in ("and", "or", "xor"):
            return self._simplify_boolean(op, args, constants)
        return None

    def _simplify_boolean(
        self, op: str, args: tuple[int, ...], constants: list[Number | None]
    ) -> int | None:
        for known, other in ((constants[0], args[1]), (constants[1], args[0])):
            if known is None:
                continue
            if op == "xor":
                return self.emit("not", other) if known else other
            return other if bool(known) == (op == "and") else self.const(known, "b1")
        return None


def int_or(number: float) -> Number:
    """A finite float truncated as an integer cast does; NaN and inf unchanged."""
    return int(number) if math.isfinite(number) else number


def _widens(narrow: str, wide: str) -> bool:
    """Whether every value of `narrow` survives a cast to `wide` and back."""
    if narrow == "b1":
        return True
    if narrow == "f32":
        return wide == "f64"
    if narrow not in INT_BITS:
        return False
    if wide in INT_BITS:
        return (narrow[0] == "u" or wide[0] == "i") and INT_BITS[narrow] < INT_BITS[wide]
    return INT_BITS[narrow] <= {"f32": 16, "f64": 32}.get(wide, 0)
