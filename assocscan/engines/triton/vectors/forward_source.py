"""Triton source of forward scans over vectors.

    find the lanes, their bounds and the carry that enters
    step by step:  load → lift → combine → lower → store

The carry stays in registers, and the inputs of the next group of steps are loaded into others.
Where a backward pass will follow, the carry before each chunk of steps is stored, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....program.cpp_and_triton_expressions import TRITON
from ....program.program_builder import Program
from ...base.vectors.kernel import CHUNK, ForwardKernel
from .grouped_steps import FETCHED, GROUP, GroupedProgram, group_program
from .grouped_text import GroupedText
from .memory import Value


class ForwardText(GroupedText):
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
        program, count = self.program(False), len(self.kernel.carry)
        by_step = frozenset(range(count)) | {
            n for n, (k, _) in enumerate(self.leaf_parts(self.op.outputs), count)
            if self.kernel.port["output", k].state
        }  # fmt: skip
        serial = frozenset(range(self.width))
        grouped = group_program(program, self.op.step_varies, serial, by_step)
        self(f"""
            groups = tl.maximum(count - start, 0) // {GROUP}
            any_group = origin + groups > 0
        """)
        self.find_groups()
        self.find_flat(
            [
                *self.input_leaves(self.split_inputs(self.used)[0]),
                *(("output", k) for k, _, n in self.outputs() if n not in by_step),
            ]
        )
        self.find_requests(self.input_leaves(self.varying(self.used)))
        state = self.all_parts(self.carried("s", self.kernel.carry), self.kernel.carry)
        known = [*state, *self.input_names(self.used, "_")]
        names = self.group_values(known, "v", program)
        uniform, others = self.split_inputs(self.used)
        self.load_uniform(uniform, "start", "any_group")
        self.early_ahead(grouped, names)
        self.load_uniform(uniform, f"(start + {GROUP})", "any_group")
        self.load_with_states(others, "start", "any_group")
        with self.block("for group in range(0, groups):"):
            self.keep_chunk("group", CHUNK // GROUP)
            self(f"low = start + {GROUP} * group")
            self.take_early(grouped, names)
            self.take_with_states(others)
            self.load_with_states(others, f"(low + {GROUP})", "")
            self.early_ahead(grouped, names)
            self.load_uniform(uniform, f"(low + {2 * GROUP})", "")
            self.fetch_group(f"low + {FETCHED}")
            self.group(grouped, names)
        with self.block(f"for rest in range({GROUP} * groups, tl.maximum(count - start, 0)):"):
            self.keep_chunk("rest", CHUNK)
            self("t = " + self.place("(start + rest)", "count"))
            self.step(False)

    def group(self, grouped: GroupedProgram, names: Sequence[Value]) -> None:
        """A group of steps, from `low` on, whose early values are known."""
        program, carry, names = grouped.program, self.kernel.carry, list(names)
        steps = []
        self(f"first = {self.place('low', 'count')}")
        for j in range(GROUP):
            own = self.core(grouped, names, {}, j, "v")
            steps.append(own)
            for k, n, output in self.outputs():
                if output in grouped.by_step:
                    self.store("output", k, n, own[program.outputs[output]], "first", later=j)
            self.set_carry("s", carry, [own[v] for v in program.outputs[: len(carry)]])
        for v, name in self.hand(grouped, steps, "c").items():
            names[v] = name
        self.late(grouped, names)
        for k, n, output in self.outputs():
            if output not in grouped.by_step:
                (value,) = names[program.outputs[output]]
                self.store_flat("output", k, n, value)

    def outputs(self) -> list[tuple[int, int, int]]:
        """Of each part of the outputs its leaf, its place there, and its number in the program."""
        parts = enumerate(self.leaf_parts(self.op.outputs), len(self.kernel.carry))
        return [(k, n, output) for output, (k, n) in parts]

    def keep_chunk(self, number: str, size: int) -> None:
        """The carry before each chunk, if a backward pass will follow. A chunk has `size` of what
        `number` counts."""
        if not self.kernel.operator.saves_carries:
            return
        with self.block(f"if {number} % {size} == 0:"):
            place = self.chunk_place(f"({number} // {size})", self.kernel.carry)
            self.store_carry(place, self.kernel.carry, self.carried("s", self.kernel.carry))

    def enter(self) -> None:
        """The carry before the first step: from init, or the identity."""
        given = set(self.kernel.initial)
        places = self.leaf_parts(self.op.state)
        for c, targets in zip(self.kernel.carry, self.carried("s", self.kernel.carry), strict=True):
            k, n = places[c]
            value: Value = (TRITON.literal(self.op.identity_values[c], self.kinds[c]),)
            if k in given:
                value = self.load(f"init{c}", "init", k, n, self.kinds[c])
            self.shaped(targets, value, self.op.state_varies[c])

    def program(self, first: bool) -> Program:
        """A step: its new carry, then its outputs."""
        builder = self.op.builder()
        after, lowered = self.op.add_step(builder, first, self.kernel.exclusive)
        return builder.build([*(after[c] for c in self.kernel.carry), *lowered])

    def step(self, first: bool) -> None:
        """One step, at t."""
        carry = self.kernel.carry
        x = self.load_inputs(self.used, "t")
        state = self.all_parts(self.carried("s", carry), carry)
        names = self.compute(self.program(first), [*state, *x], self.op.step_varies, "w")
        for (k, n), value in zip(
            self.leaf_parts(self.op.outputs), names[len(carry) :], strict=True
        ):
            self.store("output", k, n, value, "t")
        self.set_carry("s", carry, names[: len(carry)])
