"""Triton source of backward passes over vectors (`autodiff/vector_adjoint`).

    chunk by chunk, from the last one:
        load the carry before it
        forwards:  recompute the carries, and keep one before each group of steps
        backwards: recompute a group of steps in registers, then pull the cotangent back through it

The groups have GROUP steps, what is left over at the end of the axis is taken step by step. The
kept carries are a few KB for each program, which the caches hold. Barriers separate their writes
from their reads, since a thread may read what another one wrote.

Gradients of leaves that vary along the axis are stored step by step; those of others are summed in
registers. Where a leaf does not vary along the lanes, its gradient is summed over the lanes of the
program. What several programs add up is summed over the programs afterwards (`prepare`), in a fixed
order.

Names in the text, besides those of `text` and `grouped_text`: m0, … the cotangent of the carry;
d0, … the sums of gradients, numbered as the parts of `gradient_leaves`, f0, … those of them that
have one for each step of a group; p…, r… the values of a group and of its steps, forwards and
backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....autodiff.vector_adjoint import BackwardStep, backward_step
from ....program.cpp_and_triton_expressions import TRITON
from ....program.program_builder import Program
from ....program.vectors.vector_operator import part_dtypes
from ...base.vectors.kernel import CHUNK, BackwardKernel
from .grouped_steps import GROUP, group_program
from .grouped_text import GroupedText
from .tile import KEPT_CARRIES


@dataclass(frozen=True)
class Recomputed:
    """The names of what one step's recomputation left: the carry before and after it, and the kept
    values. t: its place."""

    before: list[str]
    after: list[str]
    kept: list[str]
    t: str


class BackwardText(GroupedText):
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
        self.added = 0  # how many values `add_all` adds, if it is needed

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
        self.find_groups()
        self.find_flat(self.flat_leaves())
        with self.block("for j in range(0, chunks):"):
            self.chunk()
        for d in self.summed_alike:
            self(f"d{d} = d{d} + tl.sum(f{d}, 1, keep_dims=True)")
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
                if not port.state:
                    self(f"f{d} = tl.broadcast_to({zero}, {self.group_shape})")

    def chunk(self) -> None:
        chunk, carry = CHUNK, self.carry
        step = backward_step(self.adjoint, False)
        after = step.recomputed.select(range(len(carry)))
        self("chunk = chunks - 1 - j")
        self.kept(self.chunk_place("chunk", self.saved), self.saved, carry)
        self(f"""
            begin_chunk = start + chunk * {chunk}
            size = tl.minimum(count - begin_chunk, {chunk})
            groups_here = size // {GROUP}
            left_over = size - groups_here * {GROUP}
            tail = begin_chunk + groups_here * {GROUP}
            any_group = origin + groups_here > 0
        """)
        self("tl.debug_barrier()")  # the reads of the chunk after this one have ended
        self.load_group(after.used_inputs, "begin_chunk", "any_group")
        with self.block("for g in range(0, groups_here):"):
            self.keep(self.scratch("g"), carry, [f"s{c}" for c in carry])
            for name in self.group_names(after.used_inputs):
                self(f"{name} = {name}n")
            self.load_group(after.used_inputs, f"(begin_chunk + {GROUP} * (g + 1))", "any_group")
            self.advance_group(after)
        with self.block("for i in range(0, left_over):"):
            self.keep(self.scratch(f"{chunk // GROUP} + i"), carry, [f"s{c}" for c in carry])
            self.advance(step, "tail + i")
        self("tl.debug_barrier()")
        with self.block("for i in range(0, left_over):"):
            self("last = left_over - 1 - i")
            self.kept(self.scratch(f"{chunk // GROUP} + last"), carry, carry)
            self.pull(step, self.recompute(step, [f"s{c}" for c in carry], 0, "(tail + last)"), 0)
        self.load_alike_of(step, f"(tail - {GROUP})", "n")
        with self.block("for i in range(0, groups_here):"):
            self("g = groups_here - 1 - i")
            self(f"low = begin_chunk + g * {GROUP}")
            self.kept(self.scratch("g"), carry, carry)
            for name in self.alike_names(step):
                self(f"{name} = {name}n")
            self.load_alike_of(step, f"(low - {GROUP})", "n")
            self.group(step)

    def scratch(self, slot: str) -> str:
        """Where the carry number `slot` of a chunk is kept."""
        size = self.kernel.carry_size(self.carry)
        row = "(row * sequences + sequence)" if self.kernel.packed else "row"
        return f"scratch0_ptr + ({row} * {KEPT_CARRIES} + {slot}) * padded * {size}"

    def advance(self, step: BackwardStep, q: str) -> None:
        """The carry after one step."""
        program = step.recomputed.select(range(len(self.carry)))
        self("t = " + self.place(f"({q})", "count"))
        x = self.load_inputs(program.used_inputs, "t")
        names = self.compute(program, [*self.state_names("s", self.carry), *x], "v")
        self.set_carry("s", self.carry, names)

    # Groups of steps.

    def flat_leaves(self) -> list[tuple[str, int]]:
        """What is read or written for all steps of a group at once."""
        found = self.input_leaves(self.split_inputs(self.used)[0])
        for k in self.adjoint.cotangents:
            if not self.kernel.port["cotangent", k].state:
                found.append(("cotangent", k))
        for k, _ in self.gradients:
            port = self.kernel.port["gradient", k]
            if port.varies_in_time and port.lane and not port.state:
                found.append(("gradient", k))
        return found

    @property
    def summed_alike(self) -> list[int]:
        """The gradients that are summed along the axis and have one value for all states."""
        ports = [self.kernel.port["gradient", k] for k, _ in self.gradients]
        return [d for d, p in enumerate(ports) if not (p.varies_in_time or p.state)]

    def cotangent_parts(self) -> list[tuple[int, int, int, str]]:
        """Of each part of the cotangents: its number, leaf, place there, and dtype."""
        leaves = self.adjoint.cotangent_leaves
        return [
            (g, self.adjoint.cotangents[k], n, leaves[k].scalar)
            for g, (k, n) in enumerate(self.leaf_parts(leaves))
        ]

    def alike_names(self, step: BackwardStep) -> list[str]:
        """The names of what `load_alike_of` loads."""
        found = [f"x{c}_" for c in self.split_inputs(self.used)[0]]
        return found + [f"g{g}_" for g in self.alike_cotangents(step)]

    def alike_cotangents(self, step: BackwardStep) -> list[int]:
        base = len(self.op.step_inputs) + len(self.carry)
        return [
            g for g, k, _, _ in self.cotangent_parts()
            if base + g in step.pulled.used_inputs and not self.kernel.port["cotangent", k].state
        ]  # fmt: skip

    def load_alike_of(self, step: BackwardStep, low: str, end: str) -> None:
        """The inputs and cotangents of the group from `low` on that have one value for all
        states."""
        self.load_alike(self.split_inputs(self.used)[0], low, "any_group", end)
        inside = f"flat_present & {self.flat('any_group')}"
        alike = self.alike_cotangents(step)
        for g, k, n, kind in self.cotangent_parts():
            if g in alike:
                self(f"g{g}_{end} = {self.load_flat('cotangent', k, n, kind, inside)}")

    def advance_group(self, program: Program) -> None:
        """The carry after a group of steps."""
        carry = range(len(self.carry))
        grouped = group_program(
            program, self.op.step_varies, frozenset(range(self.width)), frozenset(carry)
        )
        names = [*self.state_names("s", self.carry), *self.input_names(program.used_inputs, "_")]
        names += [f"v{k}" for k in range(len(names), len(program.dtypes))]
        self.early(grouped, names)
        for j in range(GROUP):
            own = self.core(grouped, names, {}, j, "v")
            self.set_carry("s", self.carry, [own[v] for v in program.outputs])

    def group(self, step: BackwardStep) -> None:
        """The backward pass through a group of steps, from the carry s before it."""
        program, count = step.recomputed, len(self.carry)
        others = self.split_inputs(self.used)[1]
        for j in range(GROUP):
            self(f"t{j} = {self.place(f'(low + {j})', 'count')}")
            self.load_inputs(frozenset(others), f"t{j}", f"_{j}", whole=True)
        kept = range(count, len(program.outputs))
        by_step = frozenset(range(count)) | {n for n in kept if step.kept[n - count][1]}
        forward = group_program(program, self.op.step_varies, frozenset(range(self.width)), by_step)
        inputs = self.input_names(self.used, "_")
        names = [*self.state_names("s", self.carry), *inputs]
        names += [f"p{k}" for k in range(len(names), len(program.dtypes))]
        self.early(forward, names)
        steps: list[list[str]] = []  # of each: its carry, then what it keeps of its own
        before = [f"s{c}" for c in self.carry]
        for j in range(GROUP):
            state = dict(zip(self.carry, before, strict=True))
            own = self.core(forward, names, state, j, "p")
            for v in forward.handed:
                self.hand(f"pc{v}", own[v], j, j == 0)
            after = []
            for n in range(len(program.outputs)):
                after.append(own[program.outputs[n]] if n in by_step else "unread")
            for n, c in enumerate(self.carry):  # in the shape of a carry
                shape = self.shape(self.op.state_varies[c])
                self(f"p{j}_after{n} = tl.broadcast_to({after[n]}, {shape})")
                after[n] = f"p{j}_after{n}"
            steps.append([*before, *after])
            before = after[:count]
        for v in forward.handed:
            names[v] = f"pc{v}"
        self.late(forward, names)
        alike_kept = [names[v] for v in program.outputs[count:]]
        self.pull_group(step, steps, inputs, alike_kept)

    def pull_group(
        self, step: BackwardStep, steps: Sequence[list[str]], inputs: Sequence[str],
        kept: Sequence[str],
    ) -> None:  # fmt: skip
        """A group of steps backwards. steps: of each the carry before and after it, and the kept
        values of its own; inputs, kept: those of all steps."""
        program, count, width = step.pulled, len(self.carry), len(self.op.step_inputs)
        parts = self.cotangent_parts()
        seeds = width + count  # the first of the cotangents among the inputs, then m, then kept
        first_kept = seeds + len(parts) + count
        own_kept = {first_kept + n for n, (_, varies) in enumerate(step.kept) if varies}
        with_states = {seeds + g for g, k, _, _ in parts if self.kernel.port["cotangent", k].state}
        serial = {*range(self.width), *range(width, seeds), *with_states, *own_kept,
                  *range(seeds + len(parts), first_kept)}  # fmt: skip
        ports = [self.kernel.port["gradient", k] for k, _ in self.gradients]
        by_step = frozenset(range(count)) | {
            count + d for d, port in enumerate(ports) if port.state
        }  # fmt: skip
        grouped = group_program(program, step.pulled_varies, frozenset(serial), by_step)
        names = [*["unread"] * self.width, *inputs, *["unread"] * count]
        names += [f"g{g}_" for g, _, _, _ in parts]
        names += [f"m{c}" for c in self.carry]
        names += kept
        names += [f"r{k}" for k in range(len(names), len(program.dtypes))]
        self.early(grouped, names)
        sums: list[tuple[int, int, int, str]] = []  # leaf, place, step, value
        for j in reversed(range(GROUP)):
            before, after = steps[j][:count], steps[j][count : 2 * count]
            own = dict(zip(self.carry, before, strict=True))
            own |= {width + n: name for n, name in enumerate(after)}
            own |= {seeds + len(parts) + n: f"m{c}" for n, c in enumerate(self.carry)}
            own |= {first_kept + n: steps[j][2 * count + n] for n in range(len(step.kept))
                    if first_kept + n in own_kept}  # fmt: skip
            for g, k, n, kind in parts:
                if seeds + g in with_states and seeds + g in program.used_inputs:
                    self(f"g{g}_{j} = {self.load('cotangent', k, n, kind, f't{j}')}")
                    own[seeds + g] = f"g{g}_{j}"
            found = self.core(grouped, names, own, j, "r")
            for v in grouped.handed:
                self.hand(f"rc{v}", found[v], j, j == GROUP - 1)
            for d, (k, n) in enumerate(self.gradients):
                value = found[program.outputs[count + d]]
                if not ports[d].state:
                    continue
                if not ports[d].varies_in_time:
                    self(f"d{d} = d{d} + {value}")
                elif ports[d].lane:
                    self.store("gradient", k, n, value, f"t{j}")
                else:
                    self(f"sum{d}_{j} = {self.of_present(value, k, self.shape(True))}")
                    sums.append((k, n, j, f"sum{d}_{j}"))
            self.set_carry("m", self.carry, [found[v] for v in program.outputs[:count]])
        for v in grouped.handed:
            names[v] = f"rc{v}"
        self.late(grouped, names)
        self.store_sums(sums)
        self(f"times = {self.place('(low + flat_step)', 'count')}")
        for d, (k, n) in enumerate(self.gradients):
            value, port = names[program.outputs[count + d]], ports[d]
            if port.state:
                continue
            if not port.varies_in_time:
                self(f"f{d} = f{d} + {value}")
            elif port.lane:
                self.store_flat("gradient", k, n, value, "flat_present")
            else:
                value = self.of_present(value, k, self.group_shape)
                self(f"places = {self.place('(low + step)', 'count')}")
                self.store("gradient", k, n, f"tl.sum({value}, 0, keep_dims=True)", "places")

    def of_present(self, value: str, k: int, shape: str) -> str:
        """A value, 0 for lanes that do not exist."""
        zero = TRITON.literal(0, self.op.inputs[k].scalar)
        return f"tl.where(present, tl.broadcast_to({value}, {shape}), {zero})"

    def store_sums(self, sums: Sequence[tuple[int, int, int, str]]) -> None:
        """Sums over the lanes, of all steps and leaves of a group in one reduction, and so with one
        exchange between the warps."""
        if not sums:
            return
        self.added = max(self.added, len(sums))
        values = ", ".join(value for *_, value in sums)
        names = [f"total{i}" for i in range(len(sums))]
        if len(sums) == 1:
            self(f"{names[0]} = tl.sum({values}, 0, keep_dims=True)")
        else:
            self(f"{', '.join(names)} = tl.reduce(({values}), 0, add_all, keep_dims=True)")
        for (k, n, j, _), name in zip(sums, names, strict=True):
            self.store("gradient", k, n, name, f"t{j}")

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
