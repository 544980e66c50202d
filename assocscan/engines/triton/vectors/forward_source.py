"""Triton source of forward scans over vectors.

    find the lanes, their bounds and the carry that enters
    step by step:  load → lift → combine → lower → store

The carry stays in registers, and the inputs of the next group of steps are under way to others.
Where a backward pass will follow, the carry before each chunk of steps is stored, too.
"""

from __future__ import annotations

from ....program.cpp_and_triton_expressions import TRITON
from ....program.program_builder import Program
from ...base.vectors.kernel import CHUNK, ForwardKernel
from .text import VectorText

# The steps of a group. The inputs of the next one are loaded before the work of this one, so that
# the memory's latency is not that of every step.
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
        """)
        loaded = self.varying(self.used)
        self.load_group("start")
        with self.block("for group in range(0, groups):"):
            self.keep_chunk("group", CHUNK // GROUP)
            for j in range(GROUP):
                for c in loaded:
                    self(f"x{c}_{j} = x{c}_{j}n")
            self(f"low = start + {GROUP} * group")
            self.load_group(f"(low + {GROUP})")
            for j in range(GROUP):
                self(f"t = {self.place(f'(low + {j})', 'count')}")
                self.step(False, f"_{j}")
        with self.block(f"for rest in range({GROUP} * groups, tl.maximum(count - start, 0)):"):
            self.keep_chunk("rest", CHUNK)
            self("t = " + self.place("(start + rest)", "count"))
            self.step(False)

    def load_group(self, low: str) -> None:
        """The inputs of a group of steps; past the last step, its own once more."""
        for j in range(GROUP):
            step = f"tl.minimum({low} + {j}, count - 1)"
            self(f"t = {self.place(step, 'count')}")
            self.load_inputs(self.used, "t", f"_{j}n", "any_group")

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

    def step(self, first: bool, loaded: str = "") -> None:
        """One step, at t; `loaded`: what the names of its inputs end in, if they are loaded."""
        carry = self.kernel.carry
        x = self.input_names(self.used, loaded) if loaded else self.load_inputs(self.used, "t")
        names = self.compute(self.program(first), [*self.state_names("s", carry), *x], "v")
        for (k, n), value in zip(
            self.leaf_parts(self.op.outputs), names[len(carry) :], strict=True
        ):
            self.store("output", k, n, value, "t")
        self.set_carry("s", carry, names[: len(carry)])
