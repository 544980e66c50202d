"""Triton source of forward scans over vectors.

    find the lanes, their bounds and the carry that enters
    step by step:  load → lift → combine → lower → store

The carry stays in registers. Where a backward pass will follow, the carry before each chunk of
steps is stored, too.
"""

from __future__ import annotations

from ....program.cpp_and_triton_expressions import TRITON
from ....program.program_builder import Program
from ...base.vectors.kernel import CHUNK, ForwardKernel
from .text import VectorText

# The steps in the body of the loop over them, so that several are loaded at a time (an estimate).
UNROLL = 4


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
        if kernel.operator.saves_carries:
            with self.block("for chunk in range(0, chunks):"):
                place = self.chunk_place("chunk", kernel.carry)
                self.keep(place, kernel.carry, [f"s{c}" for c in kernel.carry])
                self(f"low = start + chunk * {CHUNK}")
                self.steps("low", f"tl.minimum(low + {CHUNK}, count)")
        else:
            self.steps("start", "count")
        self.leave("final", kernel.final, "s")
        return self.whole()

    def steps(self, low: str, high: str) -> None:
        with self.block(f"for q in tl.range({low}, {high}, loop_unroll_factor={UNROLL}):"):
            self("t = " + self.place("q", "count"))
            self.step(False)

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
