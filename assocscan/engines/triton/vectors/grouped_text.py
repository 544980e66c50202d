"""Texts of kernels that compute several steps at once what lanes have alike (`grouped_steps`).

Names in the text, besides those of `text`: x0_ the input part 0 of all steps of a group, x0_1 of
its step 1, each with n at the end for those of the next group; `step`, `flat_step` the numbers of
the steps; `times` their places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....program.dtypes import TRITON_MEMORY
from ....program.program_builder import Program
from ..emitter import picked
from .grouped_steps import CONSTANT, CORE, EARLY, GROUP, LATE, GroupedProgram
from .text import Value, VectorText


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
            lane_step = pair // {self.tile.threads} % {GROUP}
            thread_step = pair % {self.tile.threads} % {GROUP}
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
        mask = f", mask={self.flat(when)}, other=0" if when else ""
        loaded = f"tl.load({self.at(role, k, n, 'times', 'flat')}{mask})"
        return self.converted(f"tl.reshape({loaded}, {self.group_shape})", kind)

    def store_flat(self, role: str, k: int, n: int, value: str) -> None:
        """A part of a leaf at `times`, from [lanes, steps]."""
        value = self.flat(f"({value}).to({TRITON_MEMORY[self.kernel.port[role, k].dtype]})")
        self(f"tl.store({self.at(role, k, n, 'times', 'flat')}, {value}, mask=flat_present)")

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

    def take_loaded(self, used: frozenset[int]) -> None:
        """Give the inputs of a group what was loaded ahead for it."""
        alike, others = self.split_inputs(used)
        self.take_alike([f"x{c}_" for c in alike])
        self.take_rows(others)

    def take_alike(self, names: Sequence[str]) -> None:
        """Give these values of all steps of a group what was loaded ahead for them."""
        self.assign([tuple(names)], [tuple(f"{name}n" for name in names)])

    def take_rows(self, parts: Sequence[int]) -> None:
        """The part of `take_loaded` for inputs that vary along the states."""
        names = [f"x{c}_{j}" for c in parts for j in range(GROUP)]
        self.assign(
            [self.of_states(name) for name in names], [self.of_states(f"{name}n") for name in names]
        )

    def load_group(self, used: frozenset[int], low: str, when: str) -> None:
        """The inputs of the group of steps from `low` on; past the last step, its own once more.
        when: a condition, [1, 1]; empty where there are steps."""
        alike, others = self.split_inputs(used)
        self.load_alike(alike, low, when)
        self.load_rows(others, low, when)

    def load_rows(self, parts: Sequence[int], low: str, when: str) -> None:
        """Those of them that vary along the states. All are loaded at once, at the beginning of the
        group before: a load amid its steps would make them wait for memory, since a warp has few
        marks of what it waits for."""
        for j in range(GROUP if parts else 0):
            self(f"t = {self.place(self.bounded(f'{low} + {j}'), 'count')}")
            self.load_inputs(frozenset(parts), "t", f"_{j}n", when)

    def load_alike(self, parts: Sequence[int], low: str, when: str) -> None:
        """Those of them that have one value for all states, of all steps."""
        places = dict(enumerate(self.leaf_parts(self.op.inputs), self.width))
        self(f"times = {self.place(self.bounded(f'{low} + flat_step'), 'count')}")
        for c in parts:
            loaded = self.load_flat("input", *places[c], self.op.step_inputs[c], when)
            self(f"x{c}_n = {loaded}")

    def fetch_group(self, leaves: Iterable[tuple[str, int]], low: str) -> None:
        """Ask for the steps of a group from `low` on, which will be read some groups later. The
        states of a step are adjacent: a step each is left to the threads of a lane, or to lanes
        where all have the same states."""
        for kind in ("flat", "lane", "thread"):
            self(f"{kind}_times = {self.place(self.bounded(f'{low} + {kind}_step'), 'count')}")
        for role, k in dict.fromkeys(leaves):
            port = self.kernel.port[role, k]
            kind = "flat" if not port.state else "thread" if port.lane else "lane"
            of = "at" if port.state else "flat"
            self(f"scalar.fetch({self.at(role, k, 0, f'{kind}_times', of)})")

    def bounded(self, step: str) -> str:
        return f"tl.maximum(tl.minimum({step}, count - 1), 0)"

    # The values of a group.

    def names_at(self, names: Sequence[Value], j: int) -> list[Value]:
        """The names of a program's inputs at step j of a group, from those of all steps."""
        found = list(names)
        for c in self.varying(frozenset(range(len(self.op.step_inputs)))):
            if self.op.step_varies[c]:
                found[c] = self.of_states(f"x{c}_{j}")
        return found

    def group_values(self, known: Sequence[Value], prefix: str, program: Program) -> list[Value]:
        """The names of all values of a group's program: those of its inputs, then new ones."""
        numbers = range(len(known), len(program.dtypes))
        return [*known, *((f"{prefix}{k}",) for k in numbers)]

    def early(self, grouped: GroupedProgram, names: Sequence[Value]) -> None:
        self.define_all(grouped, (EARLY, CONSTANT), names)

    # A group's early values can be computed while the group before it is under way: none of them
    # waits for the carry, and each takes long.

    def early_ahead(self, grouped: GroupedProgram, names: Sequence[Value]) -> None:
        """The early values of the next group, from its inputs, under names with e at the end."""
        inputs = len(grouped.program.inputs)
        varying = self.varying(frozenset(range(inputs)))
        ahead = [
            (f"x{v}_n",) if v in varying else value if v < inputs else (f"{value[0]}e",)
            for v, value in enumerate(names)
        ]
        self.define_all(grouped, (EARLY, CONSTANT), ahead)
        for v in grouped.ready:
            if v in varying:
                self(f"x{v}_e = x{v}_n")

    def take_early(self, grouped: GroupedProgram, names: Sequence[Value]) -> None:
        """Give a group the early values that were computed ahead for it."""
        varying = self.varying(frozenset(range(len(grouped.program.inputs))))
        for v in grouped.ready:
            if v in varying or v >= len(grouped.program.inputs):
                self(f"{names[v][0]} = {names[v][0]}e")
        self.define_all(grouped, (CONSTANT,), names)

    def core(
        self, grouped: GroupedProgram, names: Sequence[Value], own: Mapping[int, Value], j: int,
        prefix: str,
    ) -> list[Value]:  # fmt: skip
        """The values of step j under names of their own, which are returned. own: names of inputs
        that are known at this step only."""
        program, inputs = grouped.program, len(grouped.program.inputs)
        found = self.names_at(names, j)
        for v, name in own.items():
            found[v] = name
        for v in grouped.picked:
            (early,) = names[v]  # one value for all states
            if found[v] == names[v] and self.differs(early):
                found[v] = (f"{prefix}{j}_o{v}",)
                one = picked(early, f"step == {j}", 1, program.dtypes[v])
                if self.tile.threads == GROUP and grouped.meets_states(v):
                    # It may be a tensor of all threads of a lane.
                    whole = f"tl.broadcast_to({early}, {self.group_shape})"
                    one = f"tl.gather({whole}, tl.full({self.shape(True)}, {j}, tl.int32), 1)"
                self(f"{found[v][0]} = {one}")
        for k in range(inputs, len(found)):
            if grouped.kinds[k] == CORE:
                found[k] = self.named(f"{prefix}{j}_{k}", grouped.varies[k])
        self.define_all(grouped, (CORE,), found)
        return found

    def differs(self, name: str) -> bool:
        """Whether a value has one for each step of a group: not inputs that are equal at all."""
        return not (name.startswith("x") and name[1:].isdigit())

    def hand(self, target: str, value: Value, j: int, first: bool) -> None:
        """Put the value of step j into a tile [lanes, steps]."""
        (name,) = value
        whole = f"tl.broadcast_to({name}, {self.group_shape})"
        self(f"{target} = {whole if first else f'tl.where(step == {j}, {whole}, {target})'}")

    def late(self, grouped: GroupedProgram, names: Sequence[Value]) -> None:
        self.define_all(grouped, (LATE,), names)

    def define_all(
        self, grouped: GroupedProgram, kinds: Sequence[str], names: Sequence[Value]
    ) -> None:
        """The values of these kinds, under their names."""
        program = grouped.program
        first = len(program.inputs)
        for k in range(len(program.instructions)):
            if grouped.kinds[first + k] in kinds:
                self.define(names, k, program, grouped.varies[first + k])
