"""Triton source of backward passes over vectors (`autodiff/vector_adjoint`).

    chunk by chunk, from the last one:
        load the carry before it
        forwards:  recompute the carries, and keep one before each group of steps
        backwards: recompute a group of steps in registers, then pull the cotangent back through it

The groups have `together` steps; what is left over at the end of the axis are groups of one. The
kept carries are a few KB for each program, which the caches hold. Barriers separate their writes
from their reads, since a thread may read what another one wrote.

Gradients of leaves that vary along the axis are stored step by step; those of others are summed in
registers. Where a leaf does not vary along the lanes, its gradient is summed over the lanes of the
program. What several programs add up is summed over the programs afterwards (`prepare`), in a fixed
order.

Names in the text, besides those of `text`: m0, … the cotangent of the carry; d0, … the sums of
gradients, in the numbering of the parts of `gradient_leaves`; p…, r… the values of step number j of
a group.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....autodiff.vector_adjoint import BackwardStep, backward_step
from ....program.cpp_and_triton_expressions import TRITON
from ....program.vectors.vector_operator import part_dtypes
from ...base.vectors.kernel import CHUNK, BackwardKernel
from .text import VectorText


@dataclass(frozen=True)
class Recomputed:
    """The names of what one step's recomputation left: the carry before and after it, and the kept
    values. t: its place."""

    before: list[str]
    after: list[str]
    kept: list[str]
    t: str


class BackwardText(VectorText):
    """The kernel function of one `BackwardKernel`."""

    kernel: BackwardKernel

    def __init__(self, kernel: BackwardKernel) -> None:
        super().__init__(kernel)
        self.adjoint = kernel.operator
        self.carry = self.adjoint.carry
        self.saved = self.adjoint.saved_parts
        places = self.leaf_parts(self.adjoint.gradient_leaves)
        # Of each part of a gradient: its leaf's number, and its place in it.
        self.gradients = [(self.adjoint.wanted[k], n) for k, n in places]
        self.gradient_kinds = part_dtypes(self.adjoint.gradient_leaves)

    def text(self) -> str:
        kernel, adjoint = self.kernel, self.adjoint
        self.find_chains()
        self.find_leaves()
        steps = [
            backward_step(adjoint, False),
            *([backward_step(adjoint, True)] if kernel.first else []),
        ]
        self.used = frozenset[int]().union(
            *(s.recomputed.used_inputs | s.pulled.used_inputs for s in steps)
        )
        self.load_constant_inputs(self.used)
        self.enter()
        with self.block("for j in range(0, chunks):"):
            self.chunk()
        if kernel.first:
            with self.block("if count > 0:"):
                self.first_step()
        for d, (k, n) in enumerate(self.gradients):
            if not kernel.port["gradient", k].varies_in_time:
                self.store_gradient(k, n, f"d{d}", None)
        self.leave("end", kernel.ends, "m")
        return self.whole()

    def enter(self) -> None:
        """The cotangent of the carry that leaves, and sums of nothing."""
        places = self.leaf_parts(self.op.state)
        for c in self.carry:
            k, n = places[c]
            value = TRITON.literal(0, self.kinds[c])
            if k in self.adjoint.seeded:
                value = self.load("seed", k, n, self.kinds[c])
            self(f"m{c} = tl.broadcast_to({value}, {self.shape(self.op.state_varies[c])})")
        for d, (k, _) in enumerate(self.gradients):
            port = self.kernel.port["gradient", k]
            if not port.varies_in_time:
                zero = TRITON.literal(0, self.gradient_kinds[d])
                self(f"d{d} = tl.broadcast_to({zero}, {self.shape(port.state)})")

    def chunk(self) -> None:
        chunk, together, carry = CHUNK, self.tile.together, self.carry
        step = backward_step(self.adjoint, False)
        self("chunk = chunks - 1 - j")
        self.kept(self.chunk_place("chunk", self.saved), self.saved, carry)
        self(f"""
            low = start + chunk * {chunk}
            size = tl.minimum(count - low, {chunk})
            groups_here = size // {together}
            left_over = size - groups_here * {together}
            tail = low + groups_here * {together}
        """)
        self("tl.debug_barrier()")  # the reads of the chunk after this one have ended
        with self.block("for g in range(0, groups_here):"):
            self.keep(self.scratch("g"), carry, [f"s{c}" for c in carry])
            with self.block(f"for i in range(0, {together}):"):
                self.advance(step, f"low + g * {together} + i")
        with self.block("for i in range(0, left_over):"):
            self.keep(self.scratch(f"{chunk // together} + i"), carry, [f"s{c}" for c in carry])
            self.advance(step, "tail + i")
        self("tl.debug_barrier()")
        with self.block("for i in range(0, left_over):"):
            self("last = left_over - 1 - i")
            self.kept(self.scratch(f"{chunk // together} + last"), carry, carry)
            self.group(1, "tail + last")
        with self.block("for i in range(0, groups_here):"):
            self("g = groups_here - 1 - i")
            self.kept(self.scratch("g"), carry, carry)
            self.group(together, f"low + g * {together}")

    def scratch(self, slot: str) -> str:
        """Where the carry number `slot` of a chunk is kept."""
        size = self.kernel.carry_size(self.carry)
        row = "(row * sequences + sequence)" if self.kernel.packed else "row"
        return f"scratch0_ptr + ({row} * {self.tile.kept_carries} + {slot}) * padded * {size}"

    def advance(self, step: BackwardStep, q: str) -> None:
        """The carry after one step."""
        program = step.recomputed.select(range(len(self.carry)))
        self("t = " + self.place(f"({q})", "count"))
        x = self.load_inputs(program.used_inputs, "t")
        names = self.compute(program, [*self.state_names("s", self.carry), *x], "v")
        self.set_carry("s", self.carry, names)

    def group(self, steps: int, low: str) -> None:
        """The backward pass through a group of steps, from the carry before it."""
        step = backward_step(self.adjoint, False)
        done: list[Recomputed] = []
        for j in range(steps):
            before = done[-1].after if done else [f"s{c}" for c in self.carry]
            done.append(self.recompute(step, before, j, f"({low} + {j})"))
        for j in reversed(range(steps)):
            self.pull(step, done[j], j)

    def first_step(self) -> None:
        """The backward pass through a step that made its element the carry."""
        step = backward_step(self.adjoint, True)
        self.pull(step, self.recompute(step, None, 0, "0"), 0)

    def recompute(self, step: BackwardStep, before: list[str] | None, j: int, q: str) -> Recomputed:
        """One step forwards. before: the names of the carry's parts; None where there is none."""
        self(f"t{j} = {self.place(q, 'count')}")
        x = self.load_inputs(step.recomputed.used_inputs, f"t{j}", "_")
        state = self.all_parts(before)
        names = self.compute(step.recomputed, [*state, *x], f"p{j}_")
        count = len(self.carry)
        # Copies: a name may be that of a variable that another step overwrites.
        for n, name in enumerate(names):
            self(f"p{j}_out{n} = {name}")
        found = [f"p{j}_out{n}" for n in range(len(names))]
        return Recomputed(before or [], found[:count], found[count:], f"t{j}")

    def all_parts(self, names: list[str] | None) -> list[str]:
        known = dict(zip(self.carry, names or [], strict=False))
        return [known.get(c, "unread") for c in range(self.width)]

    def pull(self, step: BackwardStep, done: Recomputed, j: int) -> None:
        """One step backwards."""
        program, t = step.pulled, done.t
        x = self.load_inputs(program.used_inputs, t, "_")
        base = len(self.op.step_inputs) + len(self.carry)
        leaves, found = self.adjoint.cotangent_leaves, []
        for g, (k, n) in enumerate(self.leaf_parts(leaves)):
            name = "unread"
            if base + g in program.used_inputs:
                name = f"g{g}"
                number, kind = self.adjoint.cotangents[k], leaves[k].scalar
                self(f"g{g} = {self.load('cotangent', number, n, kind, t)}")
            found.append(name)
        inputs = [
            *self.all_parts(done.before), *x, *done.after, *found,
            *(f"m{c}" for c in self.carry), *done.kept,
        ]  # fmt: skip
        names = self.compute(program, inputs, f"r{j}_")
        count = len(self.carry)
        for d, ((k, n), value) in enumerate(zip(self.gradients, names[count:], strict=True)):
            if self.kernel.port["gradient", k].varies_in_time:
                self.store_gradient(k, n, value, t)
            else:
                self(f"d{d} = d{d} + {value}")
        self.set_carry("m", self.carry, names[:count])

    def store_gradient(self, k: int, n: int, value: str, t: str | None) -> None:
        """One part of a gradient, summed over the lanes where its leaf has none."""
        port = self.kernel.port["gradient", k]
        if not port.lane:
            kind = self.op.inputs[k].scalar
            value = f"tl.broadcast_to({value}, {self.shape(port.state)})"
            value = f"tl.where(present, {value}, {TRITON.literal(0, kind)})"
            value = f"tl.sum({value}, 0, keep_dims=True)"
        self.store("gradient", k, n, value, t, when="any_step" if t is None else "")
