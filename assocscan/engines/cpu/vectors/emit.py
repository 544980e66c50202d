"""Programs with a state axis as C++ loops over states and lanes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ....program.cpp_and_triton_expressions import CPP
from ....program.dtypes import FLOATS
from ....program.program_builder import Program, integer_range
from ....program.vectors.state_axis import REDUCTIONS, levels, varying

# Bools are 32-bit integers, as wide as floats (`engines/cpu/kernel.field_types`: why).
TYPES = CPP.types | {"b1": "int32_t"}


class Emission:
    """The statements that compute a program for all states n and all lanes w of one step.

    inputs: the expression of each input, in which [n] and [w] may occur.
    outputs: for each output, the statement that stores a value, given its expression.
    output_varies: whether an output is stored for every state; one that is not has to be the same
        for all.
    prefix: of the names of its arrays in the struct Tiles, of which there is a reference `s`.

    Values of level 0 that do not vary along the states are computed in a loop over the lanes; those
    of level 0 that do, in a loop over states and lanes, in which the reductions of level 1 are
    summed up; and so on. A value that a later loop reads is kept in an array: a local one if it
    does not vary along the states, else one of `fields`, since a stack may be too small for these.
    """

    def __init__(
        self,
        program: Program,
        input_varies: Sequence[bool],
        inputs: Sequence[str],
        outputs: Sequence[Callable[[str], str]],
        output_varies: Sequence[bool],
        prefix: str,
    ) -> None:
        self.program, self.inputs, self.prefix = program, inputs, prefix
        self.outputs, self.output_varies = outputs, output_varies
        self.varies = varying(program, input_varies)
        self.level = levels(program)
        self.count = len(program.inputs)
        # The loops in which each value is read: (level, whether it is a loop over the states).
        self.reads: list[set[tuple[int, bool]]] = [set() for _ in self.varies]
        for value, i in enumerate(program.instructions, self.count):
            where = self.loop_of(value)
            for a in i.args:
                self.reads[a].add(where)
        # Statements may overwrite inputs that vary, so they come after all loops that read such.
        self.first_store = max(
            (level for v in range(self.count) if self.varies[v] for level, _ in self.reads[v]),
            default=0,
        )
        for value, all_states in zip(program.outputs, output_varies, strict=True):
            self.reads[value].add(self.stored_in(value, all_states))

    def loop_of(self, value: int) -> tuple[int, bool]:
        """The loop that computes a value; a reduction is summed up in that of its operand."""
        i = self.program.instructions[value - self.count]
        if i.op in REDUCTIONS:
            return self.level[i.args[0]], True
        return self.level[value], self.varies[value]

    def stored_in(self, value: int, all_states: bool) -> tuple[int, bool]:
        return (
            (max(self.level[value], self.first_store), True)
            if all_states
            else (self.level[value], False)
        )

    def is_input(self, value: int) -> bool:
        return value < self.count

    def is_reduction(self, value: int) -> bool:
        return (
            not self.is_input(value)
            and self.program.instructions[value - self.count].op in REDUCTIONS
        )

    def needs_array(self, value: int) -> bool:
        """Whether a value outlives the loop that computes it. An input that does not vary along the
        states is copied to an array if a later loop reads it: a loop over the states would read it
        again for every state, and a statement of an earlier loop may have overwritten it."""
        if self.is_input(value):
            later = self.reads[value] - {(0, False)}
            return not self.varies[value] and bool(later) and "[w]" in self.inputs[value]
        if self.is_reduction(value):
            return True
        return any(where != self.loop_of(value) for where in self.reads[value])

    def fields(self) -> list[str]:
        """The arrays of values that vary, as fields of the struct Tiles."""
        return [
            f"alignas(64) {TYPES[kind]} {self.prefix}{value}[STATES][WIDTH];"
            for value, kind in enumerate(self.program.dtypes)
            if self.varies[value] and self.needs_array(value)
        ]

    def statements(self) -> list[str]:
        lines = []
        for value, kind in enumerate(self.program.dtypes):
            if self.needs_array(value) and not self.varies[value]:
                lines.append(f"alignas(64) {TYPES[kind]} v{value}[WIDTH];")
        for level in range(max((level for r in self.reads for level, _ in r), default=0) + 1):
            lines += self.lane_loop(level)
            lines += self.state_loop(level)
        return lines

    def lane_loop(self, level: int) -> list[str]:
        """Values of a level that do not vary; the first values of the reductions of the next."""
        body: list[str] = []
        names = self.names((level, False))
        if level == 0:
            for value in range(self.count):
                if self.needs_array(value):
                    body.append(f"v{value}[w] = {self.inputs[value]};")
        for value, i in enumerate(self.program.instructions, self.count):
            if i.op in REDUCTIONS:
                if self.level[value] == level + 1:
                    body.append(f"v{value}[w] = {start_of(i.op, i.dtype)};")
                continue
            if self.loop_of(value) == (level, False):
                self.compute(value, names, body)
        self.store((level, False), names, body)
        return self.lanes(body)

    def state_loop(self, level: int) -> list[str]:
        """Values of a level that vary, and the reductions of the next level."""
        body: list[str] = []
        names = self.names((level, True))
        for value, i in enumerate(self.program.instructions, self.count):
            if self.loop_of(value) != (level, True):
                continue
            if i.op in REDUCTIONS:
                operand, total = names[i.args[0]], f"v{value}[w]"
                body.append(f"{total} = {combined(i.op, total, operand)};")
            else:
                self.compute(value, names, body)
        self.store((level, True), names, body)
        if not body:
            return []
        inner = ["    " + line for line in self.lanes(body)]
        return ["for (int n = 0; n < STATES; ++n) {", *inner, "}"]

    def lanes(self, body: list[str]) -> list[str]:
        if not body:
            return []
        return [
            "#pragma GCC ivdep",
            "for (int w = 0; w < WIDTH; ++w) {",
            *("    " + line for line in body),
            "}",
        ]

    def names(self, where: tuple[int, bool]) -> list[str]:
        """The expression of every value inside a loop; its own values are named as they come."""
        names = []
        for value, kind in enumerate(self.program.dtypes):
            in_array = self.needs_array(value) and where != (0, False)
            if not self.is_input(value) and self.is_local(value, where):
                names.append(f"local{value}")
                continue
            text = (
                self.inputs[value] if self.is_input(value) and not in_array else self.place(value)
            )
            names.append(f"((bool){text})" if kind == "b1" else text)
        return names

    def is_local(self, value: int, where: tuple[int, bool]) -> bool:
        """Whether a loop computes a value as a local variable."""
        return not self.is_reduction(value) and self.loop_of(value) == where

    def place(self, value: int) -> str:
        """Where the array of a value has its element."""
        return f"s.{self.prefix}{value}[n][w]" if self.varies[value] else f"v{value}[w]"

    def compute(self, value: int, names: list[str], body: list[str]) -> None:
        i = self.program.instructions[value - self.count]
        text = CPP.expression(i, names, self.program.dtypes)
        body.append(f"const {CPP.types[i.dtype]} local{value} = {text};")
        if self.needs_array(value):
            body.append(f"{self.place(value)} = local{value};")

    def store(self, where: tuple[int, bool], names: list[str], body: list[str]) -> None:
        """The statements of the outputs of a loop. One may overwrite an input that another stores:
        inputs are copied first."""
        found = [
            (value, statement)
            for value, statement, all_states in zip(
                self.program.outputs, self.outputs, self.output_varies, strict=True
            )
            if self.stored_in(value, all_states) == where
        ]
        copies = {value: f"i{value}" for value, _ in found if self.is_input(value)}
        for value, name in copies.items():
            body.append(f"const {CPP.types[self.program.dtypes[value]]} {name} = {names[value]};")
        body.extend(statement(copies.get(value, names[value])) for value, statement in found)


def start_of(op: str, dtype: str) -> str:
    """What a reduction of no values gives."""
    if op == "sum_states":
        return CPP.literal(0, dtype)
    least, most = (-math.inf, math.inf) if dtype in FLOATS else integer_range(dtype)
    return CPP.literal(least if op == "max_states" else most, dtype)


def combined(op: str, total: str, value: str) -> str:
    if op == "sum_states":
        return f"{total} + {value}"
    return f"{'maximum' if op == 'max_states' else 'minimum'}({value}, {total})"
