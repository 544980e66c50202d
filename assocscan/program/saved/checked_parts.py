"""Reads the parts that texts of operators consist of: lists, numbers, leaves and programs.

What does not fit is refused with ScanValueError (`refuse`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from ...errors import ScanValueError
from ..dtypes import SCALAR_DTYPES
from ..grammar import is_index, is_literal, why_not_program
from ..operator import Leaf
from ..operator_names import ascii_start as shown
from ..program_builder import Instruction, Key, Program

# Far above what is ever written: an operator has at most some ten thousand instructions.
MAX_INSTRUCTIONS = 1 << 20
MAX_LEAVES = 1 << 10
MAX_COMPONENTS = 1 << 16
MAX_RANK = 8

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SCALAR_DTYPES}


def refuse(why: str) -> NoReturn:
    raise ScanValueError(f"the text of an operator in a saved graph {why}")


def listed(value: Any, what: str, most: int, count: int | None = None) -> list[Any]:
    """A list of at most so many entries, or of exactly `count`."""
    if not isinstance(value, list):
        refuse(f"has {shown(value)} for {what}, expected a list")
    if len(value) > most or (count is not None and len(value) != count):
        wanted = f"at most {most}" if count is None else str(count)
        refuse(f"has {len(value)} entries for {what}, expected {wanted}")
    return value


def indices(value: Any, what: str, most: int, count: int) -> tuple[int, ...]:
    """A list of numbers below `count`."""
    for entry in listed(value, what, most):
        if not is_index(entry, count):
            refuse(f"has {shown(entry)} in {what}, expected a number from 0 to {count - 1}")
    return tuple(value)


def leaves(parts: dict[str, Any], role: str) -> tuple[Leaf, ...]:
    found = tuple(leaf(part, role) for part in listed(parts[role], role, MAX_LEAVES))
    if sum(one.components for one in found) > MAX_COMPONENTS:
        refuse(f"has more than {MAX_COMPONENTS} scalars in {role}")
    return found


def leaf(part: Any, role: str) -> Leaf:
    kind, sizes = listed(part, f"a leaf of {role}", 2, 2)
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        refuse(f"has the dtype {shown(kind)} in {role}")
    return Leaf(dtype, indices(sizes, f"a shape of {role}", MAX_RANK, MAX_COMPONENTS + 1))


def literals(value: Any, kinds: Sequence[str]) -> tuple[Key, ...] | None:
    """The identity: one number for each of these dtypes, or none at all."""
    if value is None:
        return None
    found = tuple(listed(value, "the identity", len(kinds), len(kinds)))
    for number, kind in zip(found, kinds, strict=True):
        if not is_literal(number, kind):
            refuse(f"has {shown(number)} in the identity, which is none of dtype {kind}")
    return found


def program(
    parts: dict[str, Any],
    role: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    reductions: Collection[str] = (),
) -> Program:
    """A program with these dtypes of its inputs and outputs; `reductions`: what it may contain
    besides the operations on scalars."""
    kinds, steps, results = listed(parts[role], role, 3, 3)
    read = Program(
        tuple(listed(kinds, f"the inputs of {role}", len(inputs), len(inputs))),
        tuple(instruction(step, role) for step in listed(steps, role, MAX_INSTRUCTIONS)),
        tuple(listed(results, f"the outputs of {role}", len(outputs), len(outputs))),
    )
    wrong = why_not_program(read, reductions)
    if wrong is not None:
        refuse(f"has a {role} whose {wrong}")
    for what, found, expected in (
        ("inputs", read.inputs, inputs),
        ("outputs", read.output_dtypes, outputs),
    ):
        if found != tuple(expected):
            refuse(
                f"has a {role} with the {what} {shown(', '.join(found))}, but its leaves are "
                f"{shown(', '.join(expected))}"
            )
    return read


def instruction(step: Any, role: str) -> Instruction:
    op, args, dtype, literal = listed(step, f"an instruction of {role}", 4, 4)
    return Instruction(op, tuple(listed(args, f"the operands of {role}", 3)), dtype, literal)
