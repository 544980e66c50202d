"""Programs with a state axis: one scalar program for all states n = 0 … N−1 of a vector.

Some values of such a program vary along the states, the others have one value for all of them. A
value varies if one of its operands does. The operations of `REDUCTIONS` take a value that varies to
one that does not: they combine it over all states.

    sum_states    Σ_n v[n]
    max_states    the largest v[n], NaN where one is NaN
    min_states    the smallest
"""

from __future__ import annotations

from collections.abc import Sequence

from ..program_builder import Builder, Instruction, Program

REDUCTIONS = {"sum_states": "add", "max_states": "max", "min_states": "min"}


class StateBuilder(Builder):
    """A `Builder` that knows which values vary along the states.

    size: N. input_varies: for each input, whether it varies.
    """

    def __init__(self, inputs: Sequence[str], input_varies: Sequence[bool], size: int) -> None:
        super().__init__(inputs)
        self.size = size
        self._varies = list(input_varies)

    def varies(self, value: int) -> bool:
        return self._varies[value]

    def append(self, instruction: Instruction) -> int:
        value = super().append(instruction)
        if value == len(self._varies):
            self._varies.append(varies_after(instruction, self._varies))
        return value

    def simplify(self, op: str, args: tuple[int, ...], dtype: str) -> int | None:
        if op not in REDUCTIONS:
            return super().simplify(op, args, dtype)
        if self.varies(args[0]):
            return None
        # Of N equal values.
        if op == "sum_states":
            return self.emit("mul", args[0], self.const(self.size, dtype))
        return args[0]

    def sum_over_states(self, value: int) -> int:
        return self.emit("sum_states", value)


def varies_after(instruction: Instruction, varies: Sequence[bool]) -> bool:
    return instruction.op not in REDUCTIONS and any(varies[a] for a in instruction.args)


def varying(program: Program, input_varies: Sequence[bool]) -> list[bool]:
    """For each value of a program, whether it varies along the states."""
    found = list(input_varies)
    for instruction in program.instructions:
        found.append(varies_after(instruction, found))
    return found


def levels(program: Program) -> list[int]:
    """For each value, how many reductions it comes after, one inside the other.

    A program is computed in the order: values of level 0 that do not vary, values of level 0 that
    vary (a loop over the states, in which the reductions of level 1 are summed up), values of level
    1 that do not vary, and so on.
    """
    found = [0] * len(program.inputs)
    for instruction in program.instructions:
        level = max((found[a] for a in instruction.args), default=0)
        found.append(level + (instruction.op in REDUCTIONS))
    return found
