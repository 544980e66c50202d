"""Texts of kernels that take several steps as a group (`grouped_steps`): what has one value for all
states of a lane is computed for all steps of a group at once.

Names in the text, besides those of `text`: x0_ the input part 0 of all steps of a group, x0_1 of
its step 1; with n at the end those that are loaded ahead, with e early values that are computed
ahead; `step` the numbers of the steps; `first` the place of the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ....program.dtypes import FLOATS, TRITON_MEMORY
from ....program.program_builder import Program
from ...base.vectors.kernel import VectorPort
from ..emitter import picked
from .exchange import Exchange
from .grouped_steps import CONSTANT, CORE, EARLY, GROUP, LATE, MAX_ROUNDS, SECTOR, GroupedProgram
from .memory import Value
from .text import VectorText


class Request(NamedTuple):
    """The memory of a leaf that is asked for: its pieces along the lanes and the states."""

    role: str
    k: int
    lanes: int
    states: int

    @property
    def pieces(self) -> int:
        return self.lanes * self.states


def pieces(port: VectorPort, which: str, size: int) -> int:
    """How many pieces of memory the lanes or states of a leaf have."""
    return max(1, size * port.dtype.itemsize // SECTOR) if port.by_name.get(which) == 1 else size


class GroupedText(VectorText):
    """Loads, values and stores of a group of steps. rounds: of requests for memory."""

    kernel: Any
    rounds = 0

    @property
    def group_shape(self) -> str:
        return f"[{self.tile.lanes}, {GROUP}]"

    def find_groups(self) -> None:
        """What the steps of groups have in common."""
        self(f"step = tl.arange(0, {GROUP})[None, :] + origin")
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
        """Where leaves are that are read or written for all steps of a group at once, less the
        place of the first step."""
        sign = "-" if self.kernel.reverse else "+"
        for role, k in dict.fromkeys(leaves):
            steps = f"{role}{k}_at {sign} step * {self.stride(role, k, 'time')}"
            self(f"{role}{k}_flat = {self.flat(f'({steps})')}")

    def load_flat(self, role: str, k: int, n: int, kind: str, when: str) -> str:
        """A part of a leaf for the steps of a group, as [lanes, steps]."""
        mask = f", mask={self.flat(when)}, other=0" if when else ""
        loaded = f"tl.load({self.at(role, k, n, 'first', 'flat')}{mask})"
        return self.converted(f"tl.reshape({loaded}, {self.group_shape})", kind)

    def store_flat(self, role: str, k: int, n: int, value: str) -> None:
        """A part of a leaf for the steps of a group, from [lanes, steps]."""
        value = self.flat(f"({value}).to({TRITON_MEMORY[self.kernel.port[role, k].dtype]})")
        mask = "" if self.tile.full else ", mask=flat_present"
        self(f"tl.store({self.at(role, k, n, 'first', 'flat')}, {value}{mask})")

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
        """The inputs of the group of steps from `low` on; those of another group where there is
        none. when: a condition, [1, 1]; empty where there is any group."""
        uniform, others = self.split_inputs(used)
        self.load_uniform(uniform, low, when)
        self.load_with_states(others, low, when)

    def load_with_states(self, parts: Sequence[int], low: str, when: str) -> None:
        """The inputs of a group that vary along the states, as `load_group` has it. All are loaded
        at once: a warp has six scoreboards for results that it waits for, so that loads between the
        steps would share theirs with shuffles and exponentials, which would then wait for memory.
        """
        self.find_first(low)
        for j in range(GROUP):
            self.load_inputs(frozenset(parts), "first", f"_{j}n", when, j)

    def load_uniform(self, parts: Sequence[int], low: str, when: str) -> None:
        """The inputs of a group that have one value for all states, as `load_group` has it."""
        places = dict(enumerate(self.leaf_parts(self.op.inputs), self.width))
        self.find_first(low)
        for c in parts:
            loaded = self.load_flat("input", *places[c], self.op.step_inputs[c], when)
            self(f"x{c}_n = {loaded}")

    def find_first(self, low: str) -> None:
        """The place of the first step of a group, which begins at step `low`, or earlier where the
        axis ends before the group does."""
        self(f"first = {self.place(f'tl.maximum(tl.minimum({low}, count - {GROUP}), 0)', 'count')}")

    # Memory is asked for before it is read, in pieces of SECTOR bytes: a request of a thread is for
    # one piece of one step of a group.

    def find_requests(self, leaves: Iterable[tuple[str, int]]) -> None:
        """What each thread asks for: where it is at step 0, how far steps are apart, and which step
        of a group it is of; in several rounds where there are more requests than threads. Leaves
        with too many pieces for MAX_ROUNDS come when they are read."""
        threads, total = 32 * self.tile.warps, 0
        requests: list[tuple[int, Request]] = []
        for found in sorted(map(self.request, dict.fromkeys(leaves)), key=lambda r: r.pieces):
            if total + GROUP * found.pieces <= MAX_ROUNDS * threads:
                requests.append((total, found))
                total += GROUP * found.pieces
        self.rounds = -(-total // threads)
        for r in range(self.rounds):
            begin = r * threads
            here = min(threads, 1 << (total - begin - 1).bit_length())
            self(f"number = tl.arange(0, {here})[:, None] + (origin + {begin})")
            self(f"ask{r}_step = number % {GROUP}")
            for first, found in requests:
                if first >= begin + here:
                    continue
                at, stride = self.request_text(found, f"(number - {first}) // {GROUP}")
                if first > begin:
                    at = f"tl.where(number < {first}, ask{r}_at, {at})"
                    stride = f"tl.where(number < {first}, ask{r}_stride, {stride})"
                self(f"ask{r}_at = {at}")
                self(f"ask{r}_stride = {stride}")

    def request(self, leaf: tuple[str, int]) -> Request:
        port = self.kernel.port[leaf]
        lanes = pieces(port, "lane", self.tile.lanes) if port.lane else 1
        return Request(*leaf, lanes, pieces(port, "state", self.tile.states) if port.state else 1)

    def request_text(self, request: Request, piece: str) -> tuple[str, str]:
        """The address of a piece at step 0, and the distance of steps, in bytes."""
        role, k, lanes, states = request
        port, at = self.kernel.port[role, k], f"{role}{k}_row"
        if port.lane:
            lane = f"({piece}) // {states} % {lanes} * {self.tile.lanes // lanes}"
            lane = f"(block * {self.tile.lanes} + {lane})"
            lane = lane if self.tile.full else f"tl.minimum({lane}, lanes - 1)"
            at += f" + {lane} * {self.stride(role, k, 'lane')}"
        if port.state:
            state = f"(({piece}) % {states} * {self.tile.states // states})"
            state = f"tl.minimum({state}, {self.op.size - 1})" if self.padded else state
            at += f" + {state} * {self.stride(role, k, 'state')}"
        size = port.dtype.to_real().itemsize
        stride = f"{size} * tl.cast({self.stride(role, k, 'time')}, tl.int64)"
        return f"({at}).to(tl.int64)", f"({stride} + tl.cast(origin, tl.int64))"

    def fetch_group(self, low: str) -> None:
        """Ask for the steps of a group from `low` on, which will be read some groups later."""
        for r in range(self.rounds):
            step = f"tl.maximum(tl.minimum({low} + ask{r}_step, count - 1), 0)"
            place = f"tl.cast({self.place(step, 'count')}, tl.int64)"
            self(f"scalar.fetch(ask{r}_at + {place} * ask{r}_stride)")

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
        """The early values of the next group, from its inputs, with e at the end of their names."""
        inputs = self.uniform_inputs(grouped)
        count = len(grouped.program.inputs)
        found: list[Value] = [
            (f"x{v}_n",) if v in inputs else value if v < count else (f"{value[0]}e",)
            for v, value in enumerate(names)
        ]
        self.define_all(grouped, (EARLY, CONSTANT), found)
        for v in inputs & set(grouped.early_needed):
            self(f"{names[v][0]}e = x{v}_n")

    def take_early(self, grouped: GroupedProgram, names: Sequence[Value]) -> None:
        """Give a group the early values that were computed ahead for it."""
        for v in grouped.early_needed:
            if v in self.uniform_inputs(grouped) or v >= len(grouped.program.inputs):
                self(f"{names[v][0]} = {names[v][0]}e")
        self.define_all(grouped, (CONSTANT,), names)

    def uniform_inputs(self, grouped: GroupedProgram) -> set[int]:
        """The inputs that vary along the axis, but not along the states."""
        parts = range(len(grouped.program.inputs))
        return {v for v in self.varying(frozenset(parts)) if not self.op.step_varies[v]}

    def core(
        self, grouped: GroupedProgram, names: Sequence[Value], own: Mapping[int, Value], j: int,
        prefix: str,
    ) -> list[Value]:  # fmt: skip
        """The values of step j under names of their own, which are returned. own: names of inputs
        that are known at this step only. Of `summed_together`, the sums of each thread."""
        program, inputs = grouped.program, len(grouped.program.inputs)
        found = self.names_at(names, j)
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
