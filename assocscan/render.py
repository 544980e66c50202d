"""Programs as C++ source: one table of operations, one of dtypes, one walk.

The text serves the CPU and, later, CUDA. Functions that C++ lacks, or that would reach undefined
behaviour (integer division by zero, wide shifts, casts out of range), are in `scalar.h`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .program import Instruction, Number, Program, decode

CPP_TYPES = {
    "b1": "bool", "u8": "uint8_t", "i8": "int8_t", "i16": "int16_t", "i32": "int32_t",
    "i64": "int64_t", "f32": "float", "f64": "double",
}  # fmt: skip

# {0}, {1}, {2} are operands, {T} the result's type. Small integers are computed as int and cut.
CPP_OPERATIONS = {
    "add": "({T})({0} + {1})", "sub": "({T})({0} - {1})", "mul": "({T})({0} * {1})",
    "neg": "({T})(-{0})", "div": "{0} / {1}",
    "and": "({T})({0} & {1})", "or": "({T})({0} | {1})", "xor": "({T})({0} ^ {1})",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}",
    "gt": "{0} > {1}", "ge": "{0} >= {1}",
    "where": "{0} ? {1} : {2}", "detach": "{0}",
    "not": "bit_not({0})", "cast": "cast<{T}>({0})",
}  # fmt: skip
FUNCTIONS = {
    "abs": "absolute", "min": "minimum", "max": "maximum",
    "fmin": "smaller_number", "fmax": "larger_number",
    "shl": "shift_left", "shr": "shift_right", "floordiv": "floor_divide",
    "truncdiv": "trunc_divide", "remainder": "remainder_of", "fmod": "fmod_of", "pow": "power",
    "gcd": "gcd_of", "isnan": "is_nan", "isinf": "is_inf", "signbit": "is_negative",
    "rsqrt": "reciprocal_sqrt", "sigmoid": "sigmoid", "round": "round_even",
    "round_f16": "round_f16", "round_bf16": "round_bf16", "floor": "round_down",
    "ceil": "round_up", "trunc": "round_to_zero", "sqrt": "square_root",
    "copysign": "copy_sign",
}  # fmt: skip
LIBRARY = frozenset(
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh erf erfc atan2 hypot".split()
)


def literal(value: Number, dtype: str) -> str:
    """A C++ literal with exactly this value."""
    if dtype == "b1":
        return "true" if value else "false"
    if dtype not in ("f32", "f64"):
        if value == -(1 << 63):
            return "INT64_MIN"
        return f"{int(value)}LL" if dtype == "i64" else f"({CPP_TYPES[dtype]}){int(value)}"
    suffix = "f" if dtype == "f32" else ""
    value = float(value)
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}__builtin_inf{suffix}()"
    exact = float(repr(value)) == value and abs(value) < 1e6 and value == int(value)
    return f"{value!r}{suffix}" if exact else f"{value.hex()}{suffix}"


def expression(instruction: Instruction, names: Sequence[str]) -> str:
    """The right-hand side of one instruction."""
    if instruction.op == "const":
        return literal(decode(instruction.literal), instruction.dtype)
    operands = [names[a] for a in instruction.args]
    if instruction.op in CPP_OPERATIONS:
        pattern = CPP_OPERATIONS[instruction.op]
        if instruction.dtype in ("f32", "f64"):
            pattern = pattern.removeprefix("({T})").removeprefix("(").removesuffix(")") if (
                pattern.startswith("({T})")
            ) else pattern  # fmt: skip
        return pattern.format(*operands, T=CPP_TYPES[instruction.dtype])
    function = FUNCTIONS.get(instruction.op)
    if function is None:
        assert instruction.op in LIBRARY, instruction.op
        function = f"std::{instruction.op}"
    return f"{function}({', '.join(operands)})"


def statements(
    program: Program, inputs: Sequence[str], outputs: Sequence[str], prefix: str = "v"
) -> list[str]:
    """Declarations of the program's values, then one assignment per output."""
    names = list(inputs)
    lines = []
    for k, i in enumerate(program.instructions):
        names.append(f"{prefix}{k}")
        lines.append(f"const {CPP_TYPES[i.dtype]} {names[-1]} = {expression(i, names)};")
    for target, value in zip(outputs, program.outputs, strict=True):
        lines.append(f"{target} = {names[value]};")
    return lines


def struct(name: str, fields: Sequence[tuple[str, str]]) -> str:
    """`struct State { float s0; float s1; };`"""
    body = " ".join(f"{type_} {field};" for type_, field in fields)
    return f"struct {name} {{ {body} }};"


def function(signature: str, result: str, body: Sequence[str]) -> str:
    """An inline function that fills and returns one `result`."""
    lines = "\n".join(f"    {line}" for line in body)
    return f"INLINE {result} {signature} {{\n    {result} y;\n{lines}\n    return y;\n}}"
