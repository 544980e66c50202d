"""Triton source of backward passes over vectors (`autodiff/vector_adjoint`).

    chunk by chunk, from the last one:
        load the carry before it
        forwards:  recompute the carries, and keep one before each group of steps
        backwards: recompute a group of steps in registers, then pull the cotangent back through it

The groups have GROUP steps, what is left over at the end of the axis is taken step by step. The
kept carries are a few KB for each program, which the caches hold. Barriers separate their writes
from their reads, since a thread may read what another one wrote.

Gradients of leaves that vary along the axis are stored: those with states step by step, others
group by group. Gradients of other leaves are summed in registers. Where a leaf does not vary along
the lanes, its gradient is summed over the lanes of the program (`lane_sums`). What several programs
add up is summed over the programs afterwards, in a fixed order (`base/vectors/prepare.add_sum`).

Names in the text, besides those of `text` and `grouped_text`: g0, … the cotangents of the outputs;
m0, … the cotangent of the carry; d0, … the sums of gradients, numbered as the parts of
`gradient_leaves`, f0, … those of them that have one for each step of a group; p…, r… the values of
a group and of its steps, forwards and backwards; ps…, rs… those of a step that is taken alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....autodiff.vector_adjoint import BackwardStep, backward_step
from ....program.cpp_and_triton_expressions import TRITON
from ....program.dtypes import TRITON_MEMORY
from ....program.program_builder import Program
from ....program.vectors.vector_operator import part_dtypes
from ...base.vectors.kernel import CHUNK, BackwardKernel
from .grouped_steps import GROUP, group_program
from .lane_sums import LaneSumText
from .memory import Value
from .text import UNREAD, of_state
from .tile import KEPT_CARRIES


@dataclass(frozen=True)
class Recomputed:
    """The names of what one step's recomputation left: the carry before and after it, and the kept
    values."""

    before: list[Value]
    after: list[Value]
    kept: list[Value]


class BackwardText(LaneSumText):
    """The kernel function of one `BackwardKernel`."""

    def __init__(self, kernel: BackwardKernel) -> None:
        super().__init__(kernel)
        self.adjoint = kernel.operator
        self.carry = self.adjoint.carry
        self.saved = self.adjoint.saved_parts
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
        self.find_groups()
        self.lanes_of_warp.find_partners()
        self.find_flat(self.flat_leaves())
        self.find_requests(self.leaves_of(steps[0]))
        with self.block("for j in range(0, chunks):"):
            self.chunk()
        if self.summed:
            self("chunk = -1")
            self("tl.debug_barrier()")
            self.add_sums()
        for d in self.summed_uniform:
            self(f"d{d} = d{d} + scalar.total(f{d}, 1)")
        if kernel.first:
            with self.block("if count > 0:"):
                self.first_step()
        for d, (k, n) in enumerate(self.gradients):
            port = kernel.port["gradient", k]
            if not port.varies_in_time:
                self.store_gradient(k, n, self.named(f"d{d}", port.state), None)
        self.leave("end", kernel.ends, "m")
        return self.whole()

    def enter(self) -> None:
        """The cotangent of the carry that leaves, and sums of nothing."""
        places = self.leaf_parts(self.op.state)
        for c, targets in zip(self.carry, self.carried("m", self.carry), strict=True):
            k, n = places[c]
            value: Value = (TRITON.literal(0, self.kinds[c]),)
            if k in self.adjoint.seeded:
                value = self.load(f"seed{c}", "seed", k, n, self.kinds[c])
            self.shaped(targets, value, self.op.state_varies[c])
        for d, (k, _) in enumerate(self.gradients):
            port = self.kernel.port["gradient", k]
            if not port.varies_in_time:
                zero = TRITON.literal(0, self.gradient_kinds[d])
                self.shaped(self.named(f"d{d}", port.state), (zero,), port.state)
                if not port.state:
                    self(f"f{d} = tl.broadcast_to({zero}, {self.group_shape})")

    def chunk(self) -> None:
        chunk, carry = CHUNK, self.carry
        step = backward_step(self.adjoint, False)
        after = step.recomputed.select(range(len(carry)))
        self("chunk = chunks - 1 - j")
        self.load_carry(self.chunk_place("chunk", self.saved), self.saved, carry)
        self(f"""
            begin_chunk = start + chunk * {chunk}
            size = tl.minimum(count - begin_chunk, {chunk})
            groups_here = size // {GROUP}
            left_over = size - groups_here * {GROUP}
            tail = begin_chunk + groups_here * {GROUP}
            any_group = origin + groups_here > 0
        """)
        earlier = self.chunk_place("tl.maximum(chunk - 1, 0)", self.saved)
        for address in self.kept_addresses(earlier, self.saved):
            self(f"scalar.fetch(({address}).to(tl.int64))")
        self("tl.debug_barrier()")  # carries of the chunk before have been read, its sums written
        if self.summed:
            self.add_sums()
        self.load_group(after.used_inputs, "begin_chunk", "any_group")
        with self.block("for g in range(0, groups_here):"):
            self.store_carry(self.scratch("g"), carry, self.carried("s", carry))
            self.take_loaded(after.used_inputs)
            self.load_group(after.used_inputs, f"(begin_chunk + {GROUP} * (g + 1))", "")
            self.advance_group(after)
        with self.block("for i in range(0, left_over):"):
            self.store_carry(self.scratch(f"{chunk // GROUP} + i"), carry, self.carried("s", carry))
            self.advance(step, "tail + i")
        self("tl.debug_barrier()")  # carries have been written, sums read
        with self.block("for i in range(0, left_over):"):
            self("last = left_over - 1 - i")
            self.load_carry(self.scratch(f"{chunk // GROUP} + last"), carry, carry)
            self.pull(step, self.recompute(step, self.carried("s", carry), "(tail + last)"))
        self.load_uniform_of(step, f"(tail - {GROUP})", "any_group")
        with self.block("for i in range(0, groups_here):"):
            self("g = groups_here - 1 - i")
            self(f"low = begin_chunk + g * {GROUP}")
            self.load_carry(self.scratch("g"), carry, carry)
            self.fetch_group(f"low - {CHUNK}")
            self.take_uniform(self.uniform_names(step))
            self.load_uniform_of(step, f"(low - {GROUP})", "")
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
        state = self.all_parts(self.carried("s", self.carry), self.carry)
        names = self.compute(program, [*state, *x], self.op.step_varies, "v")
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
    def summed_uniform(self) -> list[int]:
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

    def leaves_of(self, step: BackwardStep) -> list[tuple[str, int]]:
        """The leaves that a step reads."""
        base, used = len(self.op.step_inputs) + len(self.carry), step.pulled.used_inputs
        cotangents = [("cotangent", k) for g, k, _, _ in self.cotangent_parts() if base + g in used]
        return [*self.input_leaves(self.varying(self.used)), *cotangents]

    def uniform_names(self, step: BackwardStep) -> list[str]:
        """The names of what `load_uniform_of` loads."""
        found = [f"x{c}_" for c in self.split_inputs(self.used)[0]]
        return found + [f"g{g}_" for g in self.uniform_cotangents(step)]

    def uniform_cotangents(self, step: BackwardStep) -> list[int]:
        base = len(self.op.step_inputs) + len(self.carry)
        return [
            g for g, k, _, _ in self.cotangent_parts()
            if base + g in step.pulled.used_inputs and not self.kernel.port["cotangent", k].state
        ]  # fmt: skip

    def load_uniform_of(self, step: BackwardStep, low: str, when: str) -> None:
        """The inputs and cotangents of the group from `low` on that have one value for all
        states. when: as `load_group` has it."""
        self.load_uniform(self.split_inputs(self.used)[0], low, when)
        uniform = self.uniform_cotangents(step)
        for g, k, n, kind in self.cotangent_parts():
            if g in uniform:
                self(f"g{g}_n = {self.load_flat('cotangent', k, n, kind, when)}")

    def advance_group(self, program: Program) -> None:
        """The carry after a group of steps."""
        carry = range(len(self.carry))
        grouped = group_program(
            program, self.op.step_varies, frozenset(range(self.width)), frozenset(carry)
        )
        state = self.all_parts(self.carried("s", self.carry), self.carry)
        known = [*state, *self.input_names(program.used_inputs, "_")]
        names = self.group_values(known, "v", program)
        self.early(grouped, names)
        for j in range(GROUP):
            own = self.core(grouped, names, {}, j, "v")
            self.set_carry("s", self.carry, [own[v] for v in program.outputs])

    def group(self, step: BackwardStep) -> None:
        """The backward pass through a group of steps, from the carry s before it."""
        program, count = step.recomputed, len(self.carry)
        others = self.split_inputs(self.used)[1]
        self(f"first = {self.place('low', 'count')}")
        for j in range(GROUP):
            self.load_inputs(frozenset(others), "first", f"_{j}", later=j)
        kept = range(count, len(program.outputs))
        by_step = frozenset(range(count)) | {n for n in kept if step.kept[n - count][1]}
        forward = group_program(program, self.op.step_varies, frozenset(range(self.width)), by_step)
        inputs = self.input_names(self.used, "_")
        state = self.all_parts(self.carried("s", self.carry), self.carry)
        names = self.group_values([*state, *inputs], "p", program)
        self.early(forward, names)
        values: list[list[Value]] = []
        steps: list[list[Value]] = []  # of each: its carry, then what it keeps of its own
        before = self.carried("s", self.carry)
        for j in range(GROUP):
            own_state = dict(zip(self.carry, before, strict=True))
            own = self.core(forward, names, own_state, j, "p")
            values.append(own)
            outputs = enumerate(program.outputs)
            after = [own[v] if n in by_step else UNREAD for n, v in outputs]
            for n, c in enumerate(self.carry):  # in the shape of a carry
                varies = self.op.state_varies[c]
                targets = self.named(f"p{j}_after{n}", varies)
                self.shaped(targets, after[n], varies)
                after[n] = targets
            steps.append([*before, *after])
            before = after[:count]
        for v, name in self.hand(forward, values, "pc").items():
            names[v] = name
        self.late(forward, names)
        uniform_kept = [names[v] for v in program.outputs[count:]]
        self.pull_group(step, steps, inputs, uniform_kept)

    def pull_group(
        self, step: BackwardStep, steps: Sequence[list[Value]], inputs: Sequence[Value],
        kept: Sequence[Value],
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
        cotangents = [
            self.named(f"g{g}_", self.kernel.port["cotangent", k].state) for g, k, _, _ in parts
        ]
        carry = self.carried("m", self.carry)
        known = [*[UNREAD] * self.width, *inputs, *[UNREAD] * count, *cotangents, *carry, *kept]
        names = self.group_values(known, "r", program)
        self.early(grouped, names)
        sums: dict[tuple[int, int], list[Value]] = {}
        values: list[list[Value]] = []
        for j in reversed(range(GROUP)):
            before, after = steps[j][:count], steps[j][count : 2 * count]
            own = dict(zip(self.carry, before, strict=True))
            own |= {width + n: name for n, name in enumerate(after)}
            own |= {seeds + len(parts) + n: name for n, name in enumerate(carry)}
            own |= {first_kept + n: steps[j][2 * count + n] for n in range(len(step.kept))
                    if first_kept + n in own_kept}  # fmt: skip
            for g, k, n, kind in parts:
                if seeds + g in with_states and seeds + g in program.used_inputs:
                    own[seeds + g] = self.load(
                        f"g{g}_{j}", "cotangent", k, n, kind, "first", later=j
                    )
            found = self.core(grouped, names, own, j, "r")
            values.insert(0, found)
            for d, (k, n) in enumerate(self.gradients):
                value = found[program.outputs[count + d]]
                if not ports[d].state:
                    continue
                if not ports[d].varies_in_time:
                    self.add(self.of_states(f"d{d}"), value)
                elif ports[d].lane:
                    self.store("gradient", k, n, value, "first", later=j)
                else:
                    targets = self.of_states(f"sum{d}_{j}")
                    for i, target in enumerate(targets):
                        self(
                            f"{target} = {self.of_present(of_state(value, i), k, self.shape(True))}"
                        )
                    sums.setdefault((k, n), []).insert(0, targets)  # the steps upwards
            self.set_carry("m", self.carry, [found[v] for v in program.outputs[:count]])
        for v, name in self.hand(grouped, values, "rc").items():
            names[v] = name
        self.late(grouped, names)
        if sums:
            self.keep_sums(sums)
        for d, (k, n) in enumerate(self.gradients):
            port = ports[d]
            if port.state:
                continue
            (uniform,) = names[program.outputs[count + d]]
            if not port.varies_in_time:
                self(f"f{d} = f{d} + {uniform}")
            elif port.lane:
                self.store_flat("gradient", k, n, uniform)
            else:
                total = f"scalar.total({self.of_present(uniform, k, self.group_shape)}, 0)"
                self(f"places = {self.place('(low + step)', 'count')}")
                at, memory = self.at("gradient", k, n, "places"), TRITON_MEMORY[port.dtype]
                self(f"tl.store({at}, {total}.to({memory}))")

    def add(self, targets: Value, value: Value) -> None:
        """Add a value to sums."""
        for i, target in enumerate(targets):
            self(f"{target} = {target} + {of_state(value, i)}")

    def first_step(self) -> None:
        """The backward pass through a step that made its element the carry."""
        step = backward_step(self.adjoint, True)
        self.pull(step, self.recompute(step, None, "0"))

    def recompute(self, step: BackwardStep, before: list[Value] | None, q: str) -> Recomputed:
        """Step q forwards; its place is t. before: the names of the carry's parts; None where there
        is none."""
        self(f"t = {self.place(q, 'count')}")
        x = self.load_inputs(step.recomputed.used_inputs, "t", "_s")
        state = self.all_parts(before, self.carry)
        results = self.compute(step.recomputed, [*state, *x], self.op.step_varies, "ps")
        count, found = len(self.carry), []
        # Copies: a name may be that of a variable that another step overwrites.
        for n, value in enumerate(results):
            found.append(self.named(f"ps_out{n}", len(value) > 1))
            self.assign([found[-1]], [value])
        return Recomputed(before or [], found[:count], found[count:])

    def pull(self, step: BackwardStep, done: Recomputed) -> None:
        """The step at t backwards."""
        program = step.pulled
        x = self.load_inputs(program.used_inputs, "t", "_s")
        base = len(self.op.step_inputs) + len(self.carry)
        found = []
        for g, k, n, kind in self.cotangent_parts():
            value = UNREAD
            if base + g in program.used_inputs:
                value = self.load(f"g{g}", "cotangent", k, n, kind, "t")
            found.append(value)
        inputs = [
            *self.all_parts(done.before, self.carry), *x, *done.after, *found,
            *self.carried("m", self.carry), *done.kept,
        ]  # fmt: skip
        names = self.compute(program, inputs, step.pulled_varies, "rs")
        count = len(self.carry)
        for d, ((k, n), value) in enumerate(zip(self.gradients, names[count:], strict=True)):
            port = self.kernel.port["gradient", k]
            if port.varies_in_time:
                self.store_gradient(k, n, value, "t")
            else:
                self.add(self.named(f"d{d}", port.state), value)
        self.set_carry("m", self.carry, names[:count])

    def store_gradient(self, k: int, n: int, value: Value, t: str | None) -> None:
        """One part of a gradient, summed over the lanes where its leaf has none."""
        port = self.kernel.port["gradient", k]
        if not port.lane:
            shape = self.shape(port.state)
            value = tuple(f"scalar.total({self.of_present(name, k, shape)}, 0)" for name in value)
        self.store("gradient", k, n, value, t, when="any_step" if t is None else "")
