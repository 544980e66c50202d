"""Texts of kernels that take several steps as a group (`grouped_steps`): what has one value for all
states of a lane is computed for all steps of a group at once.

Names in the text, besides those of `text`: x0_ the input part 0 of all steps of a group, x0_1 of
its step 1; with n at the end those that are loaded ahead, with e early values that are computed
ahead; `step`, `flat_step` the numbers of the steps; `times` their places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from ....program.dtypes import FLOATS, TRITON_MEMORY
from ....program.program_builder import Program
from ..emitter import picked
from .exchange import Exchange
from .grouped_steps import CONSTANT, CORE, EARLY, GROUP, LATE, GroupedProgram
from .memory import Value
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
            lane_step = pair // {self.tile.threads} % {GROUP}
            thread_step = pair % {self.tile.threads} % {GROUP}
        """)
        if not self.tile.full:
            self(f"flat_present = {self.flat('present')}")
        self.threads_of_lane.find_partners()

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
        mask = "" if self.tile.full else ", mask=flat_present"
        self(f"tl.store({self.at(role, k, n, 'times', 'flat')}, {value}{mask})")

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
        uniform, others = self.split_inputs(used)
        self.take_uniform([f"x{c}_" for c in uniform])
        self.take_with_states(others)

    def take_uniform(self, names: Sequence[str]) -> None:
        """Give these values of all steps of a group what was loaded ahead for them."""
        self.assign([tuple(names)], [tuple(f"{name}n" for name in names)])

    def take_with_states(self, parts: Sequence[int]) -> None:
        """`take_loaded` of the inputs that vary along the states."""
        names = [f"x{c}_{j}" for c in parts for j in range(GROUP)]
        self.assign(
            [self.of_states(name) for name in names], [self.of_states(f"{name}n") for name in names]
        )

    def load_group(self, used: frozenset[int], low: str, when: str) -> None:
        """The inputs of the group of steps from `low` on; past the last step, its own once more.
        when: a condition, [1, 1]; empty where there are steps."""
        uniform, others = self.split_inputs(used)
        self.load_uniform(uniform, low, when)
        self.load_with_states(others, low, when)

    def load_with_states(
        self, parts: Sequence[int], low: str, when: str, suffix: str = "n"
    ) -> None:
        """The inputs of a group that vary along the states, as `load_group` has it. All are loaded
        at once: a warp has six scoreboards for results that it waits for, so that loads between the
        steps would share theirs with shuffles and exponentials, which would then wait for memory.
        """
        for j in range(GROUP if parts else 0):
            self(f"t = {self.place(self.bounded(f'{low} + {j}'), 'count')}")
            self.load_inputs(frozenset(parts), "t", f"_{j}{suffix}", when)

    def load_uniform(self, parts: Sequence[int], low: str, when: str) -> None:
        """The inputs of a group that have one value for all states, as `load_group` has it."""
        places = dict(enumerate(self.leaf_parts(self.op.inputs), self.width))
        self(f"times = {self.place(self.bounded(f'{low} + flat_step'), 'count')}")
        for c in parts:
            loaded = self.load_flat("input", *places[c], self.op.step_inputs[c], when)
            self(f"x{c}_n = {loaded}")

    def fetch_group(self, leaves: Iterable[tuple[str, int]], low: str) -> None:
        """Ask for the steps of a group from `low` on, which will be read some groups later. The
        states of a step are adjacent, so that one of a lane's threads asks for all of them. Each
        asks for another step; of leaves without lanes each lane does."""
        leaves = dict.fromkeys(leaves)
        sizes = {"flat": GROUP, "lane": self.tile.lanes, "thread": self.tile.threads}
        for kind, size in sizes.items():
            for first in range(0, GROUP, size):
                step = self.bounded(f"{low} + {kind}_step + {first}")
                self(f"{kind}{first}_times = {self.place(step, 'count')}")
                for role, k in leaves:
                    port = self.kernel.port[role, k]
                    if kind == ("flat" if not port.state else "thread" if port.lane else "lane"):
                        of = "at" if port.state else "flat"
                        self(f"scalar.fetch({self.at(role, k, 0, f'{kind}{first}_times', of)})")

    def bounded(self, step: str) -> str:
        return f"tl.maximum(tl.minimum({step}, count - 1), 0)"

    # The values of a group.

    def names_at(self, names: Sequence[Value], j: int, suffix: str) -> list[Value]:
        """The names of a program's inputs at step j of a group, from those of all steps. suffix: of
        the inputs that vary along the states."""
        found = list(names)
        for c in self.varying(frozenset(range(len(self.op.step_inputs)))):
            if self.op.step_varies[c]:
                found[c] = self.of_states(f"x{c}_{j}{suffix}")
        return found

    def group_values(self, known: Sequence[Value], prefix: str, program: Program) -> list[Value]:
        """The names of all values of a group's program: those of its inputs, then new ones."""
        numbers = range(len(known), len(program.dtypes))
        return [*known, *((f"{prefix}{k}",) for k in numbers)]

    def early(self, grouped: GroupedProgram, names: Sequence[Value]) -> None:
        self.define_all(grouped, (EARLY, CONSTANT), names)

    # A group's early values can be computed while the group before it is under way: none of them
    # waits for the carry, and each takes long.

    def ahead(self, grouped: GroupedProgram, names: Sequence[Value]) -> list[Value]:
        """Other names for the early values of a group, and for its inputs."""
        inputs = len(grouped.program.inputs)
        varying = self.varying(frozenset(range(inputs)))
        return [
            (f"{value[0]}e",) if v >= inputs or v in varying else value
            for v, value in enumerate(names)
        ]

    def early_ahead(self, grouped: GroupedProgram, names: Sequence[Value]) -> None:
        """The early values of the next group under these names, from its inputs."""
        varying = self.varying(frozenset(range(len(grouped.program.inputs))))
        found = [(f"x{v}_n",) if v in varying else value for v, value in enumerate(names)]
        self.define_all(grouped, (EARLY, CONSTANT), found)
        for v in grouped.early_needed:
            if v in varying:
                self(f"{names[v][0]} = x{v}_n")

    def core(
        self, grouped: GroupedProgram, names: Sequence[Value], own: Mapping[int, Value], j: int,
        prefix: str, suffix: str = "",
    ) -> list[Value]:  # fmt: skip
        """The values of step j under names of their own, which are returned. own: names of inputs
        that are known at this step only. suffix: as `names_at` has it. Of `summed_together`, the
        sums of each thread."""
        program, inputs = grouped.program, len(grouped.program.inputs)
        found = self.names_at(names, j, suffix)
        for v, name in own.items():
            found[v] = name
        for v in grouped.early_by_step:
            if found[v] == names[v] and v not in self.steady:
                (early,) = names[v]  # one value for all states
                found[v] = (f"{prefix}{j}_o{v}",)
                one = picked(early, f"step == {j}", 1, program.dtypes[v])
                if self.tile.threads == GROUP and grouped.meets_states(v):
                    # What follows from leaves that are equal at all steps alone is [lanes, 1].
                    whole = f"tl.broadcast_to({early}, {self.group_shape})"
                    one = f"tl.gather({whole}, tl.full({self.shape(True)}, {j}, tl.int32), 1)"
                self(f"{found[v][0]} = {one}")
        for v in grouped.core_for_group:
            if v < inputs:  # a carry, whose name the next step gives to another value
                self(f"{prefix}{j}_h{v} = {found[v][0]}")
                found[v] = (f"{prefix}{j}_h{v}",)
        for k in range(inputs, len(found)):
            if grouped.kinds[k] == CORE:
                found[k] = self.named(f"{prefix}{j}_{k}", grouped.varies[k])
        together = self.summed_together(grouped)
        for k, i in enumerate(program.instructions, inputs):
            if k in together:
                self(f"{found[k][0]} = {self.sum_of_thread(i.dtype, found[i.args[0]])}")
            elif grouped.kinds[k] == CORE:
                self.define(found, k - inputs, program, grouped.varies[k])
        return found

    @cached_property
    def threads_of_lane(self) -> Exchange:
        return Exchange(self, "thread", self.shape(True), self.tile.threads, 1)

    def summed_together(self, grouped: GroupedProgram) -> list[int]:
        """The sums over the states that are taken for all steps of a group at once, so that each
        thread of a lane gets that of one step."""
        if self.tile.threads != GROUP:
            return []
        program, first = grouped.program, len(grouped.program.inputs)
        core = [i for k, i in enumerate(program.instructions, first) if grouped.kinds[k] == CORE]
        by_step = {program.outputs[n] for n in grouped.by_step}.union(*(i.args for i in core))
        return [
            v for v in grouped.core_for_group
            if v >= first and program.instructions[v - first].op == "sum_states"
            and program.dtypes[v] in FLOATS and v not in by_step
        ]  # fmt: skip

    def hand(
        self, grouped: GroupedProgram, steps: Sequence[Sequence[Value]], prefix: str
    ) -> dict[int, Value]:
        """The core values that are wanted of all steps at once, as tiles [lanes, steps]. steps: the
        names of the values of each step."""
        found: dict[int, Value] = {}
        together = self.summed_together(grouped)
        for v in grouped.core_for_group:
            target = f"{prefix}{v}"
            if v in together:
                (target,) = self.threads_of_lane.sums([step[v][0] for step in steps], target)
            else:
                for j, step in enumerate(steps):
                    whole = f"tl.broadcast_to({step[v][0]}, {self.group_shape})"
                    self(
                        f"{target} = {f'tl.where(step == {j}, {whole}, {target})' if j else whole}"
                    )
            found[v] = (target,)
        return found

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
