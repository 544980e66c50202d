"""What a program is: the operations there are, and the operands that each takes.

Programs that the package makes follow these rules by construction. One that is read from a graph
(`reading`) is held against them before anything is generated from it or run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .cpp_and_triton_expressions import LIBRARY
from .dtypes import FLOATS, INT_BITS
from .program_builder import PREDICATES, Instruction, Program, decode, encode

INTS = tuple(INT_BITS)
BITS = (*INTS, "b1")
NUMBERS = (*INTS, *FLOATS)
SCALARS = (*NUMBERS, "b1")

# The operations on operands of one dtype, by their number: the dtypes that each takes. The result
# has that dtype too, or is a bool. Integers have no `div`: it would trap.
UNARY: Mapping[str, Sequence[str]] = {
    "neg": SCALARS, "abs": SCALARS, "detach": SCALARS, "not": BITS,
    "isnan": SCALARS, "isinf": SCALARS, "signbit": SCALARS, "round_f16": ("f32",),
    "round_bf16": ("f32",),
} | dict.fromkeys(
    LIBRARY - {"atan2", "hypot"}
    | {"sqrt", "rsqrt", "sigmoid", "round", "floor", "ceil", "trunc"}, FLOATS,
)  # fmt: skip
BINARY: Mapping[str, Sequence[str]] = (
    dict.fromkeys(("add", "sub", "mul", "min", "max", "fmin", "fmax"), SCALARS)
    | dict.fromkeys(PREDICATES - {"isnan", "isinf", "signbit"}, SCALARS)
    | dict.fromkeys(("and", "or", "xor"), BITS)
    | dict.fromkeys(("shl", "shr", "gcd"), INTS)
    | dict.fromkeys(("floordiv", "truncdiv", "remainder", "fmod", "pow"), NUMBERS)
    | dict.fromkeys(("div", "copysign", "atan2", "hypot"), FLOATS)
)
ARITY = {"const": 0, "cast": 1, "where": 3} | dict.fromkeys(UNARY, 1) | dict.fromkeys(BINARY, 2)


def why_not_program(program: Program, reductions: Collection[str] = ()) -> str | None:
    """The first rule that a program breaks; None where it breaks none.

    reductions: operations on one number that the program may contain besides those of `ARITY`.
    """
    for number, kind in enumerate(program.inputs):
        if not isinstance(kind, str) or kind not in SCALARS:
            return f"input {number} has the dtype {kind!r}"
    kinds = list(program.inputs)
    for instruction in program.instructions:
        wrong = why_not_instruction(instruction, kinds, reductions)
        if wrong is not None:
            return f"value {len(kinds)} {wrong}"
        kinds.append(instruction.dtype)
    for number, value in enumerate(program.outputs):
        if not is_index(value, len(kinds)):
            return f"output {number} is value {value!r} of {len(kinds)}"
    return None


def why_not_instruction(
    instruction: Instruction, kinds: Sequence[str], reductions: Collection[str]
) -> str | None:
    """What is wrong with an instruction that follows values of these dtypes."""
    op, dtype = instruction.op, instruction.dtype
    if not isinstance(op, str) or not (op in ARITY or op in reductions):
        return f"has the unknown operation {op!r}"
    if not isinstance(dtype, str) or dtype not in SCALARS:
        return f"has the dtype {dtype!r}"
    operands = ARITY.get(op, 1)
    if len(instruction.args) != operands:
        return f"is {op!r} of {len(instruction.args)} operands, which takes {operands}"
    for place in instruction.args:
        if not is_index(place, len(kinds)):
            return f"has the operand {place!r}, expected one of the {len(kinds)} values before it"
    if op == "const":
        if is_literal(instruction.literal, dtype):
            return None
        return f"is the constant {instruction.literal!r}, which is none of dtype {dtype}"
    if instruction.literal is not None:
        return f"is {op!r} with the literal {instruction.literal!r}"
    given = [kinds[place] for place in instruction.args]
    fits = takes(op, given, dtype) if op in ARITY else given == [dtype] and dtype in NUMBERS
    if fits:
        return None
    return f"is {op!r} of {', '.join(given)} with the result {dtype}"


def takes(op: str, given: Sequence[str], result: str) -> bool:
    """Whether the operation takes operands of these dtypes and gives the result."""
    if op == "cast":
        return True
    if op == "where":
        return list(given) == ["b1", result, result]
    allowed = UNARY.get(op) or BINARY[op]
    wanted = "b1" if op in PREDICATES else given[0]
    return len(set(given)) == 1 and given[0] in allowed and result == wanted


def is_index(value: Any, count: int) -> bool:
    return type(value) is int and 0 <= value < count


def is_literal(value: Any, dtype: str) -> bool:
    """Whether this is what `encode` writes for a number of the dtype."""
    if type(value) is not (bool if dtype == "b1" else int if dtype in INTS else str):
        return False
    try:
        return bool(encode(decode(value), dtype) == value)
    except (ValueError, OverflowError):
        return False
