"""Texts of kernels that compute several steps at once what lanes have alike (`grouped_steps`).

Names in the text, besides those of `text`: x0_ the input part 0 of all steps of a group, x0_1 of
its step 1, each with n at the end for those of the next group; `step`, `flat_step` the numbers of
the steps; `times` their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....program.cpp_and_triton_expressions import TRITON
from ....program.dtypes import TRITON_MEMORY
from ....program.vectors.state_axis import REDUCTIONS
from ..emitter import picked
from .grouped_steps import CONSTANT, CORE, EARLY, GROUP, LATE, GroupedProgram
from .text import VectorText


class GroupedText(VectorText):
    """Loads, values and stores of a group of steps."""

    kernel: Any

    @property
    def group_shape(self) -> str:
        return f"[{self.tile.lanes}, {GROUP}]"

    def find_groups(self) -> None:
        """What the steps of groups have in common. `any_step`: as `load_constant_inputs` has it."""
        size = GROUP * self.tile.lanes
        self(f"""
            step = tl.arange(0, {GROUP})[None, :] + origin
            flat_step = tl.arange(0, {size}) % {GROUP}
            flat_present = {self.flat("present")}
        """)

    def flat(self, value: str) -> str:
        """One for each lane and step of a group, in one dimension: the threads of a lane have a
        step each, whatever is adjacent in memory, as tiles of lanes and states have their states.
        Triton would give a tile of lanes and steps another layout, and move every value."""
        size = GROUP * self.tile.lanes
        return f"tl.reshape(tl.broadcast_to({value}, {self.group_shape}), [{size}])"

    def find_flat(self, leaves: Sequence[tuple[str, int]]) -> None:
        """Where leaves are that are read or written for all steps of a group at once."""
        for role, k in dict.fromkeys(leaves):
            self(f"{role}{k}_flat = {self.flat(f'{role}{k}_at')}")

    def load_flat(self, role: str, k: int, n: int, kind: str, when: str) -> str:
        """A part of a leaf at `times`, as [lanes, steps]."""
        loaded = f"tl.load({self.at(role, k, n, 'times', 'flat')}, mask={when}, other=0)"
        return self.converted(f"tl.reshape({loaded}, {self.group_shape})", kind)

    def store_flat(self, role: str, k: int, n: int, value: str, when: str) -> None:
        """A part of a leaf at `times`, from [lanes, steps]."""
        value = self.flat(f"({value}).to({TRITON_MEMORY[self.kernel.port[role, k].dtype]})")
        self(f"tl.store({self.at(role, k, n, 'times', 'flat')}, {value}, mask={when})")

    # The inputs of a group.

    def split_inputs(self, used: frozenset[int]) -> tuple[list[int], list[int]]:
        """The parts of the inputs that vary along the axis: those with one value for all states,
        and those that vary along them, too."""
        found = self.varying(used)
        varies = self.op.step_varies
        return [c for c in found if not varies[c]], [c for c in found if varies[c]]

    def input_leaves(self, parts: Sequence[int]) -> list[tuple[str, int]]:
        places = dict(enumerate(self.leaf_parts(self.op.inputs), self.width))
        return [("input", places[c][0]) for c in parts]

    def group_names(self, used: frozenset[int]) -> list[str]:
        """The names of the inputs of a group."""
        alike, others = self.split_inputs(used)
        return [f"x{c}_" for c in alike] + [f"x{c}_{j}" for c in others for j in range(GROUP)]

    def load_group(self, used: frozenset[int], low: str, when: str, end: str = "n") -> None:
        """The inputs of the group of steps from `low` on; past the last step, its own once more.
        when: a condition, [1, 1]."""
        alike, others = self.split_inputs(used)
        self.load_alike(alike, low, when, end)
        for j in range(GROUP if others else 0):
            self(f"t = {self.place(self.bounded(f'{low} + {j}'), 'count')}")
            self.load_inputs(frozenset(others), "t", f"_{j}{end}", when)

    def load_alike(self, parts: Sequence[int], low: str, when: str, end: str = "n") -> None:
        """Those of them that have one value for all states."""
        places = dict(enumerate(self.leaf_parts(self.op.inputs), self.width))
        self(f"times = {self.place(self.bounded(f'{low} + flat_step'), 'count')}")
        inside = f"flat_present & {self.flat(when)}"
        for c in parts:
            loaded = self.load_flat("input", *places[c], self.op.step_inputs[c], inside)
            self(f"x{c}_{end} = {loaded}")

    def bounded(self, step: str) -> str:
        return f"tl.maximum(tl.minimum({step}, count - 1), 0)"

    # The values of a group.

    def names_at(self, names: Sequence[str], j: int) -> list[str]:
        """The names of a program's inputs at step j of a group, from those of all steps."""
        found = list(names)
        for c in self.varying(frozenset(range(len(self.op.step_inputs)))):
            if self.op.step_varies[c]:
                found[c] = f"x{c}_{j}"
        return found

    def early(self, grouped: GroupedProgram, names: Sequence[str]) -> None:
        self.define(grouped, (EARLY, CONSTANT), names)

    def core(
        self, grouped: GroupedProgram, names: Sequence[str], own: Mapping[int, str], j: int,
        prefix: str,
    ) -> list[str]:  # fmt: skip
        """The values of step j under names of their own, which are returned. own: names of inputs
        that are known at this step only."""
        program, inputs = grouped.program, len(grouped.program.inputs)
        found = self.names_at(names, j)
        for v, name in own.items():
            found[v] = name
        for v in grouped.picked:
            if found[v] == names[v] and self.differs(names[v]):
                where = f"step == {j}"
                found[v] = f"{prefix}{j}_o{v}"
                self(f"{found[v]} = {picked(names[v], where, 1, program.dtypes[v])}")
        for k in range(inputs, len(found)):
            if grouped.kinds[k] == CORE:
                found[k] = f"{prefix}{j}_{k}"
        self.define(grouped, (CORE,), found)
        return found

    def differs(self, name: str) -> bool:
        """Whether a value has one for each step of a group: not inputs that are equal at all."""
        return not (name.startswith("x") and name[1:].isdigit())

    def hand(self, target: str, value: str, j: int, first: bool) -> None:
        """Put the value of step j into a tile [lanes, steps]."""
        value = f"tl.broadcast_to({value}, {self.group_shape})"
        self(f"{target} = {value if first else f'tl.where(step == {j}, {value}, {target})'}")

    def late(self, grouped: GroupedProgram, names: Sequence[str]) -> None:
        self.define(grouped, (LATE,), names)

    def define(self, grouped: GroupedProgram, kinds: Sequence[str], names: Sequence[str]) -> None:
        """The values of these kinds, under their names."""
        program = grouped.program
        for k, i in enumerate(program.instructions, len(program.inputs)):
            if grouped.kinds[k] not in kinds:
                continue
            if i.op in REDUCTIONS:
                text = self.reduced(i.op, i.dtype, names[i.args[0]])
            else:
                text = TRITON.expression(i, names, program.dtypes)
            self(f"{names[k]} = {text}")
