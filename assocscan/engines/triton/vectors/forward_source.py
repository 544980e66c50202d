"""Triton source of forward scans over vectors.

    find the lanes, their bounds and the carry that enters
    step by step:  load → lift → combine → lower → store

The carry stays in registers, and the inputs of the next group of steps are under way to others.
Where a backward pass will follow, the carry before each chunk of steps is stored, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....program.cpp_and_triton_expressions import TRITON
from ....program.dtypes import TRITON_MEMORY
from ....program.program_builder import Program
from ....program.vectors.state_axis import REDUCTIONS, varying
from ...base.vectors.kernel import CHUNK, ForwardKernel
from ..emitter import picked
from .grouped_steps import CONSTANT, CORE, EARLY, LATE, GroupedProgram, group_program
from .text import VectorText

# The steps of a group, 4 for the 4 threads of a lane with 16 states. The inputs of the next one are
# loaded before the work of this one, so that the memory's latency is not that of every step.
GROUP = 4


class ForwardText(VectorText):
    """The kernel function of one `ForwardKernel`."""

    kernel: ForwardKernel

    def text(self) -> str:
        kernel = self.kernel
        self.find_chains()
        self.find_leaves()
        steps = [self.program(False), *([self.program(True)] if kernel.first else [])]
        self.used = frozenset[int]().union(*(step.used_inputs for step in steps))
        self.load_constant_inputs(self.used)
        self.enter()
        if kernel.first:
            with self.block("if count > 0:"):
                self("t = " + self.place("0", "count"))
                self.step(True)
        self.steps()
        self.leave("final", kernel.final, "s")
        return self.whole()

    def steps(self) -> None:
        """All steps but a first one without a carry: by groups, then those that are left over."""
        self(f"""
            groups = tl.maximum(count - start, 0) // {GROUP}
            any_group = origin + groups > 0
            step = tl.arange(0, {GROUP})[None, :] + origin
            flat_step = tl.arange(0, {GROUP * self.tile.lanes}) % {GROUP}
            flat_present = {self.flat("present & any_group")}
        """)
        program = self.program(False)
        grouped = group_program(program, self.op.step_varies, self.width, len(self.kernel.carry))
        self.find_flat_leaves(grouped)
        self.load_group(grouped, "start")
        with self.block("for group in range(0, groups):"):
            self.keep_chunk("group", CHUNK // GROUP)
            self(f"low = start + {GROUP} * group")
            for name in self.group_names(grouped):
                self(f"{name} = {name}n")
            self.load_group(grouped, f"(low + {GROUP})")
            self.group(grouped)
        with self.block(f"for rest in range({GROUP} * groups, tl.maximum(count - start, 0)):"):
            self.keep_chunk("rest", CHUNK)
            self("t = " + self.place("(start + rest)", "count"))
            self.step(False)

    def group_names(self, grouped: GroupedProgram) -> list[str]:
        """The names of the inputs of a group: of all its steps, or of one that varies along the
        states, step by step."""
        found = []
        for c in self.varying(self.used):
            is_core = grouped.kinds[c] == CORE
            found += [f"x{c}_{j}" for j in range(GROUP)] if is_core else [f"x{c}_"]
        return found

    def load_group(self, grouped: GroupedProgram, low: str) -> None:
        """The inputs of a group of steps; past the last step, its own once more."""
        varying = self.varying(self.used)
        self(f"times = {self.place(f'tl.minimum({low} + flat_step, count - 1)', 'count')}")
        places = dict(enumerate(self.leaf_parts(self.op.inputs), self.width))
        for c in varying:
            if grouped.kinds[c] == CORE:
                continue
            k, n = places[c]
            at = self.at("input", k, n, "times", "flat")
            kind, loaded = self.op.step_inputs[c], f"tl.load({at}, mask=flat_present, other=0)"
            loaded = f"tl.reshape({loaded}, {self.group_shape})"
            self(f"x{c}_n = {self.converted(loaded, kind)}")
        core = frozenset(c for c in varying if grouped.kinds[c] == CORE)
        if core:
            for j in range(GROUP):
                self(f"t = {self.place(f'tl.minimum({low} + {j}, count - 1)', 'count')}")
                self.load_inputs(core, "t", f"_{j}n", "any_group", whole=True)

    def find_flat_leaves(self, grouped: GroupedProgram) -> None:
        """Where the leaves are that are read or written for all steps of a group at once."""
        places = dict(enumerate(self.leaf_parts(self.op.inputs), self.width))
        flat = [("input", places[c][0]) for c in self.varying(self.used)
                if grouped.kinds[c] != CORE]  # fmt: skip
        for (k, _), v in self.outputs(grouped.program):
            if not self.value_varies(grouped.program, v):
                flat.append(("output", k))
        for role, k in dict.fromkeys(flat):
            self(f"{role}{k}_flat = {self.flat(f'{role}{k}_at')}")

    def flat(self, value: str) -> str:
        """One for each lane and step of a group, in one dimension: the threads of a lane have a
        step each, whatever is adjacent in memory, as tiles of lanes and states have their states.
        Triton would give a tile of lanes and steps another layout, and move every value."""
        size = GROUP * self.tile.lanes
        return f"tl.reshape(tl.broadcast_to({value}, {self.group_shape}), [{size}])"

    def group(self, grouped: GroupedProgram) -> None:
        """A group of steps, from `low` on."""
        program, carry = grouped.program, self.kernel.carry
        inputs = len(program.inputs)
        constants = self.input_names(self.used, "_")
        names = [*self.state_names("s", carry), *constants]
        names += [f"v{k}" for k in range(len(program.instructions))]
        handed = grouped.crossing(CORE, LATE)
        for v in program.outputs[len(carry) :]:
            if grouped.kinds[v] == CORE and not self.value_varies(program, v):
                handed.append(v)
        self.define(grouped, (EARLY, CONSTANT), names)
        for j in range(GROUP):
            own = list(names)
            for c in self.varying(self.used):
                if grouped.kinds[c] == CORE:
                    own[c] = f"x{c}_{j}"
            for v in grouped.crossing(EARLY, CORE):
                if v >= inputs or v in self.varying(self.used):
                    kind = program.dtypes[v]
                    own[v] = f"o{v}"
                    self(f"o{v} = {picked(names[v], f'step == {j}', 1, kind)}")
            self.define(grouped, (CORE,), own)
            for v in dict.fromkeys(handed):
                value = f"tl.broadcast_to({own[v]}, {self.group_shape})"
                self(f"c{v} = {value if j == 0 else f'tl.where(step == {j}, {value}, c{v})'}")
            self(f"t = {self.place(f'(low + {j})', 'count')}")
            for (k, n), v in self.outputs(program):
                if self.value_varies(program, v):
                    self.store("output", k, n, own[v], "t")
            self.set_carry("s", carry, [own[v] for v in program.outputs[: len(carry)]])
        late = [f"c{v}" if v in handed else name for v, name in enumerate(names)]
        self.define(grouped, (LATE,), late)
        self(f"times = {self.place('(low + flat_step)', 'count')}")
        for (k, n), v in self.outputs(program):
            if not self.value_varies(program, v):
                self.store_group(k, n, late[v])

    @property
    def group_shape(self) -> str:
        return f"[{self.tile.lanes}, {GROUP}]"

    def outputs(self, program: Program) -> list[tuple[tuple[int, int], int]]:
        """The parts of the outputs, each as its leaf and place, with their values."""
        values = program.outputs[len(self.kernel.carry) :]
        return list(zip(self.leaf_parts(self.op.outputs), values, strict=True))

    def value_varies(self, program: Program, v: int) -> bool:
        return varying(program, self.op.step_varies)[v]

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

    def store_group(self, k: int, n: int, value: str) -> None:
        """A part of an output at all steps of a group."""
        port = self.kernel.port["output", k]
        value = self.flat(f"({value}).to({TRITON_MEMORY[port.dtype]})")
        place = self.at("output", k, n, "times", "flat")
        self(f"tl.store({place}, {value}, mask=flat_present)")

    def keep_chunk(self, number: str, size: int) -> None:
        """The carry before each chunk, if a backward pass will follow. A chunk has `size` of what
        `number` counts."""
        if not self.kernel.operator.saves_carries:
            return
        with self.block(f"if {number} % {size} == 0:"):
            place = self.chunk_place(f"({number} // {size})", self.kernel.carry)
            self.keep(place, self.kernel.carry, [f"s{c}" for c in self.kernel.carry])

    def enter(self) -> None:
        """The carry before the first step: from init, or the identity."""
        given = set(self.kernel.initial)
        places = self.leaf_parts(self.op.state)
        for c in self.kernel.carry:
            k, n = places[c]
            if k in given:
                value = self.load("init", k, n, self.kinds[c])
            else:
                value = TRITON.literal(self.op.identity_values[c], self.kinds[c])
            self(f"s{c} = tl.broadcast_to({value}, {self.shape(self.op.state_varies[c])})")

    def program(self, first: bool) -> Program:
        """A step: its new carry, then its outputs."""
        builder = self.op.builder()
        after, lowered = self.op.add_step(builder, first, self.kernel.exclusive)
        return builder.build([*(after[c] for c in self.kernel.carry), *lowered])

    def step(self, first: bool) -> None:
        """One step, at t."""
        carry = self.kernel.carry
        x = self.load_inputs(self.used, "t")
        names = self.compute(self.program(first), [*self.state_names("s", carry), *x], "v")
        for (k, n), value in zip(
            self.leaf_parts(self.op.outputs), names[len(carry) :], strict=True
        ):
            self.store("output", k, n, value, "t")
        self.set_carry("s", carry, names[: len(carry)])
