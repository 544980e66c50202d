"""Which values of a step's program are computed for a group of steps at once.

Step by step all threads of a lane would compute what has one value for all its states, and each the
same. So a step's program is divided:

    early   follow from inputs that are known for all steps of the group, and have one value for all
            states
    core    what varies along the states, reductions over them, and what the carry follows from
    late    the other values: they follow from core values

Early and late values are computed as tiles [lanes, steps of a group], a step for each thread of a
lane; core values step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....program.program_builder import Program
from ....program.vectors.state_axis import REDUCTIONS, varying

# The steps of a group: 4 for the 4 threads of a lane with 16 states.
GROUP = 4
# A forward kernel asks for a step's memory, which comes into the L2 cache, so many steps before it
# is read; a backward kernel a chunk before. SECTOR: the bytes that a request brings. MAX_ROUNDS: of
# requests; each takes five registers.
FETCHED, SECTOR, MAX_ROUNDS = 32, 32, 4
EARLY, CORE, LATE, CONSTANT = "early", "core", "late", "constant"


@dataclass(frozen=True)
class GroupedProgram:
    """kinds: EARLY, CORE, LATE or CONSTANT, of every value, inputs first.
    by_step: the outputs that are wanted step by step."""

    program: Program
    kinds: tuple[str, ...]
    varies: tuple[bool, ...]
    by_step: frozenset[int]

    @property
    def early_by_step(self) -> list[int]:
        """The early values that are wanted step by step."""
        values = [self.program.outputs[n] for n in self.by_step]
        return self.crossing(EARLY, CORE, values)

    def meets_states(self, v: int) -> bool:
        """Whether, step by step, all that is computed of an early value varies along the states."""
        users = [
            k for k, i in enumerate(self.program.instructions, len(self.program.inputs))
            if v in i.args and self.kinds[k] == CORE
        ]  # fmt: skip
        outputs = [self.program.outputs[n] for n in self.by_step]
        return v not in outputs and all(self.varies[k] for k in users)

    @property
    def early_needed(self) -> list[int]:
        """The early values that others follow from, or that are outputs."""
        late = self.crossing(EARLY, LATE, self.program.outputs)
        return sorted({*self.crossing(EARLY, CORE, ()), *late})

    @property
    def core_for_group(self) -> list[int]:
        """The core values that are wanted of all steps at once."""
        outputs = enumerate(self.program.outputs)
        return self.crossing(CORE, LATE, [v for n, v in outputs if n not in self.by_step])

    def crossing(self, source: str, target: str, more: Sequence[int]) -> list[int]:
        """The values of one kind that values of another follow from; of `more` those of it."""
        count = len(self.program.inputs)
        used = set(more)
        for k, i in enumerate(self.program.instructions, count):
            if self.kinds[k] == target:
                used.update(i.args)
        return sorted(v for v in used if self.kinds[v] == source)


def group_program(
    program: Program, input_varies: Sequence[bool], serial: frozenset[int], by_step: frozenset[int]
) -> GroupedProgram:
    """The kinds of the values of a program. serial: its inputs that are known step by step.
    by_step: its outputs that are wanted so."""
    count = len(program.inputs)
    varies = varying(program, input_varies)
    kinds = [CORE if c in serial or varies[c] else EARLY for c in range(count)]
    for k, i in enumerate(program.instructions, count):
        follows = i.op in REDUCTIONS or varies[k] or any(kinds[a] == CORE for a in i.args)
        kinds.append(CORE if follows else EARLY if i.args else CONSTANT)
    needed = {program.outputs[n] for n in by_step}
    for k in range(len(kinds) - 1, count - 1, -1):
        i = program.instructions[k - count]
        if kinds[k] == CORE and not (varies[k] or i.op in REDUCTIONS or k in needed):
            kinds[k] = LATE
        elif kinds[k] == CORE:
            needed.update(i.args)
    return GroupedProgram(program, tuple(kinds), tuple(varies), by_step)
