"""`StepGraph`: the values of one step, by who computes them.

A step is a program over the carry and the leaves. In the kernels, the threads take three turns at a
tile of steps:

    BEGIN   values that the same step and lane have for all states, and that need no carry:
            softplus(Δ + bias), Δ·u. One thread computes them for a step and a lane.
    MAIN    values of a state, or of the carry. The threads that share a lane compute them for
            their states, step after step. Here the sums over the states are taken.
    FINISH  what comes after such a sum: (Σ C·h + D·u)·silu(z). Again one thread for a step and a
            lane.

CONSTANT are the numbers that the program writes out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum

from ...errors import BackendError
from ...program.cpp_and_triton_expressions import LIBRARY
from ...program.program_builder import Instruction, Program
from ...program.vectors.state_axis import REDUCTIONS, varying

# Operations for which it pays that one thread computes them, and hands the result to the others.
EXPENSIVE = LIBRARY | {"sigmoid", "pow", "rsqrt", "sqrt", "div"}


class NotExpressible(BackendError):
    """These kernels cannot compute an operator; others may."""


class Turn(IntEnum):
    CONSTANT = 0
    BEGIN = 1
    MAIN = 2
    FINISH = 3


class StepGraph:
    """program: its values are numbered as there. varies: of its inputs, whether they vary along the
    states. main: the inputs that come from the step before. carried: the numbers of the outputs
    that go to the next step. results: the numbers of those that are stored or summed, each with
    whether its leaf has a value for each state. name: of the operator, for errors. narrow: inputs
    of 16 bits that MAIN would convert several times.

    turns, varies: of every value. handed: the values of BEGIN that MAIN reads from shared memory.
    Empty if all are cheap, unless passing them on saves MAIN the conversion of at least as many
    16-bit inputs (`narrow`) as there are such values. sums: the reductions over the states. lifted:
    values of MAIN, equal for all states of a lane, that FINISH reads.
    """

    def __init__(
        self, program: Program, varies: Sequence[bool], main: Collection[int],
        carried: Sequence[int], results: Mapping[int, bool], name: str,
        narrow: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.program, self.varies = program, varying(program, varies)
        self.inputs = len(program.inputs)
        self.turns = [
            Turn.MAIN if v in main or self.varies[v] else Turn.BEGIN for v in range(self.inputs)
        ]
        for v, i in enumerate(program.instructions, self.inputs):
            self.turns.append(self._turn(v, i))
            if self.varies[v] and self.turns[v] is Turn.FINISH:
                raise NotExpressible(
                    f"{name!r} computes values of single states from a sum over all states"
                )
        if any(self.turns[program.outputs[n]] is Turn.FINISH for n in carried):
            raise NotExpressible(f"the next state of {name!r} depends on a sum over all states")
        self.sums = [
            v for v, i in enumerate(program.instructions, self.inputs) if i.op in REDUCTIONS
        ]
        self.handed = self._handed(narrow)
        finished = [a for v, i in self.numbered(Turn.FINISH) if v not in self.sums for a in i.args]
        for n, has_states in results.items():
            v = program.outputs[n]
            if has_states and self.turns[v] is Turn.FINISH:
                raise NotExpressible(f"{name!r} gives single states a sum over all states")
            if not (has_states or self.varies[v]):
                finished.append(v)
        self.lifted = sorted({v for v in finished if self.turns[v] is Turn.MAIN})

    def instruction(self, value: int) -> Instruction:
        return self.program.instructions[value - self.inputs]

    def numbered(self, turn: Turn) -> list[tuple[int, Instruction]]:
        """The instructions of a turn with their values."""
        found = enumerate(self.program.instructions, self.inputs)
        return [(v, i) for v, i in found if self.turns[v] is turn]

    def _turn(self, value: int, i: Instruction) -> Turn:
        if i.op in REDUCTIONS:
            return Turn.FINISH
        turn = max((self.turns[a] for a in i.args), default=Turn.CONSTANT)
        return max(turn, Turn.MAIN) if self.varies[value] else turn

    def _handed(self, narrow: Collection[int]) -> list[int]:
        used = {a for _, i in self.numbered(Turn.MAIN) for a in i.args}
        used |= {a for v in self.sums for a in self.instruction(v).args}
        found = sorted({a for a in used if a >= self.inputs and self.turns[a] is Turn.BEGIN})
        seen, stack, read = set(found), list(found), set[int]()
        while stack:
            for a in self.instruction(stack.pop()).args:
                if a < self.inputs:
                    read.add(a)
                elif a not in seen:
                    seen.add(a)
                    stack.append(a)
        if any(self.instruction(v).op in EXPENSIVE for v in seen):
            return found
        spared = read.intersection(narrow) - used
        return found if len(spared) >= len(found) else []
