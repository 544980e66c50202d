"""The reverse-mode derivative of a scan: another scan, run by the same engines.

One step of the forward scan is (y[t], out[t]) = S(y[t−1], x[t]). Let μ[t] be the cotangent that
reaches y[t] from later steps (and from the final carry). Then

    (μ[t−1], x̄[t]) = vjp of S at (y[t−1], x[t]), applied to (μ[t], o̅[t]),

which is affine in μ: μ[t−1] = J[t] μ[t] + v[t]. So the backward pass is an *exclusive* scan in the
opposite direction with the affine monoid (J, v), whose `lower` turns the incoming μ[t] and the
inputs at t into x̄[t], and whose final carry is the cotangent of `init`. Its inputs at t are x[t],
p[t] = y[t−1] and o̅[t]; p is the saved state read one step ahead in scan order.

The state holds only what is needed: components of y that no output depends on, or that no cotangent
reaches, are dropped; entries of J that are zero or one for every t, or equal up to sign to another
entry, and stay so under products, are not carried. (For h = a·h + b: J = a, one number.)

Of steps that are not associative (`Operator.sequential`) the backward scan is a loop as well, whose
step is the vjp itself: J is not made. On CPUs it is one too where J is large, as for Kalman filters
of three and four states (12 × 12, 20 × 20).

This differs from the textbook form, λ[t] = ḡ[t] + (∂f/∂left)ᵀ λ[t+1], by λ[t] = ḡ[t] + μ[t]: the
same traffic, one shifted load instead of two, and nothing special at the last element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..errors import UnsupportedOperation
from ..program.dtypes import EXACT_DTYPES, FLOATS
from ..program.operator import Edge, Leaf, Operator, closure, scalars, spans
from ..program.operator_names import composed
from ..program.program_builder import Builder, Key, Program, encode
from .derivative_rules import Cotangent, choose, or_zero, vjp
from .jacobian import Entry, Matrix, choose_entry, entry_values, group_entries
from .selections import Block, block_masks

# Cotangents that a scan carries at most, and a loop. Larger loops would compile for long: one of
# 144 (products of 12 × 12 matrices) for 23 seconds.
MAX_ADJOINT_STATE, MOST_WALKED = 16, 64
# Numbers of J from which a loop is compiled in place of a scan, where one may be: for a Kalman
# filter of three states, with 117 numbers, a loop compiles in a fifth of the time and is as fast.
LARGE_JACOBIAN = 64


@dataclass(frozen=True)
class Request:
    """Which cotangents exist and which are wanted: what an adjoint is derived for. `may_walk`:
    whether the backward scan may be a loop."""

    exclusive: bool
    with_init: bool
    wanted: tuple[int, ...]
    seeded: frozenset[int]
    cotangents: frozenset[int]
    may_walk: bool = False


@dataclass(frozen=True)
class Adjoint:
    """The backward scan. `carried` are the state components whose cotangents μ it carries, after
    the `matrix_size` components of its state that stand for J. `given`: the number of an input leaf
    that every such pass has, a cotangent of an output; None where there are none."""

    operator: Operator
    carried: tuple[int, ...]
    matrix_size: int
    wanted: tuple[int, ...]
    given: int | None

    @cached_property
    def reads(self) -> tuple[bool, ...]:
        """Whether each input leaf of the backward scan is read. Where the gradient is zero and none
        is, a cotangent counts as read: a scan needs a tensor."""
        used = self.operator.used_inputs
        found = [not used.isdisjoint(span) for span in spans(self.operator.inputs)]
        if not any(found) and self.given is not None:
            found[self.given] = True
        return tuple(found)

    def saved_state(self, forward: Operator) -> frozenset[int]:
        """The state leaves that the backward scan reads."""
        start = sum(leaf.components for leaf in forward.inputs)
        used = self.operator.used_inputs
        return frozenset(
            k for k, span in enumerate(spans(forward.state)) if any(start + c in used for c in span)
        )


@dataclass(frozen=True)
class AffineMaps:
    """The monoid of maps μ ↦ J μ + v: what a derivative's scan carries. `lifted` are the values of
    the element at t, in the builder that they were made in. `matrix_size` components of the state
    stand for J: the flags of its blocks, then its entries; v follows."""

    state: tuple[Leaf, ...]
    lifted: list[int]
    combine: Program
    identity: tuple[Key, ...]
    matrix_size: int


@functools.lru_cache(maxsize=512)
def derive(op: Operator, request: Request) -> Adjoint:
    """The backward scan of `op`. Raises UnsupportedOperation where it has no generated form."""
    return Derivation(op, request).adjoint()


@functools.lru_cache(maxsize=1024)
def adjoint_of(
    op: Operator,
    exclusive: bool,
    with_init: bool,
    wanted: tuple[int, ...],
    outputs: tuple[int, ...],
    finals: tuple[int, ...],
    may_walk: bool,
) -> Adjoint:
    """The adjoint for gradients of these input leaves, with cotangents of these outputs and
    finals."""
    parts = spans(op.state)
    seeded = frozenset(c for k in finals for c in parts[k])
    return derive(op, Request(exclusive, with_init, wanted, seeded, frozenset(outputs), may_walk))


@functools.lru_cache(maxsize=1024)
def adjoint_reads(
    op: Operator, exclusive: bool, with_init: bool, wanted: tuple[int, ...], final: tuple[int, ...],
    may_walk: bool,
) -> tuple[tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """The input leaves and the state leaves that a backward scan can read."""
    outputs = tuple(range(len(op.outputs)))
    adjoint = adjoint_of(op, exclusive, with_init, wanted, outputs, final, may_walk)
    inputs = tuple(k for k in range(len(op.inputs)) if adjoint.reads[k])
    return inputs, tuple(sorted(adjoint.saved_state(op)))


class Derivation:
    """What the derivatives of a scan share: the step, its live components, the affine monoid."""

    def __init__(self, op: Operator, request: Request) -> None:
        self.op, self.request = op, request
        self._steps: dict[bool, Program] = {}
        self.raw = scalars(op.inputs)
        self.previous = scalars(op.state)
        self.outputs = scalars(op.outputs)
        self.all_inputs: tuple[str, ...] = (*self.raw, *self.previous, *self.outputs)
        seeded = {c for c in request.seeded if self.previous[c] in FLOATS}
        self.live = sorted(
            c for c in closure(op.combine, op.lowered_state | seeded) if self.previous[c] in FLOATS
        )
        self.too_many = len(self.live) > MAX_ADJOINT_STATE
        most = MOST_WALKED if request.may_walk else MAX_ADJOINT_STATE
        if len(self.live) > most:
            raise UnsupportedOperation(
                f"its derivative would carry {len(self.live)} scalars, more than {most}"
            )

    def adjoint(self) -> Adjoint:
        if self.too_many:
            return self.walked_adjoint(self.live)
        builder = Builder(self.all_inputs)
        entries, offset = self.linearise(builder)
        carried = self.reachable(entries, offset)
        if self.op.sequential or self.is_large(builder, entries, carried):
            return self.walked_adjoint(carried)
        maps = self.affine_maps(builder, entries, offset, carried)
        lift = builder.build(maps.lifted)
        inputs = (*self.op.inputs, *self.op.state, *self.op.outputs)
        operator = Operator(
            composed(f"{self.op.name} (adjoint)"),
            inputs,
            maps.state,
            tuple(self.op.inputs[k] for k in self.request.wanted),
            lift,
            maps.combine,
            self.lower(maps.matrix_size, carried, tuple(leaf.scalar for leaf in maps.state)),
            maps.identity,
            self.edge(lift),
        )
        return Adjoint(
            operator, tuple(carried), maps.matrix_size, self.request.wanted, self.given_cotangent
        )

    def is_large(self, builder: Builder, entries: dict[Entry, int], carried: Sequence[int]) -> bool:
        """Whether a loop takes the place of a scan for the size of J."""
        if not self.request.may_walk or len(entries) < LARGE_JACOBIAN:
            return False
        return len(group_entries(builder, entries, carried).groups) >= LARGE_JACOBIAN

    def walked_adjoint(self, carried: Sequence[int]) -> Adjoint:
        """The backward scan as a loop: a step is the vjp of the forward step, without J. A state is
        (μ, inputs); an element has the inputs, and a step takes μ of the carry and the inputs of
        the element."""
        op, kinds, count = self.op, [self.previous[c] for c in carried], len(carried)
        builder = Builder((*kinds, *self.all_inputs))
        pulled = self.pull(builder, False, count, self.seeds(range(count), carried, count))
        following = [
            builder.cast(or_zero(builder, pulled[c], kind), kind)
            for c, kind in zip(carried, kinds, strict=True)
        ]
        step = builder.build(following)
        used = sorted(v - count for v in step.used_inputs if v >= count)
        states = (*kinds, *(self.all_inputs[k] for k in used))
        both = Builder((*states, *states))
        element = dict(zip(used, range(len(states) + count, 2 * len(states)), strict=True))
        given = [
            element[k] if k in element else both.const(0, kind)
            for k, kind in enumerate(self.all_inputs)
        ]
        combine = both.build([*both.inline(step, [*range(count), *given]), *element.values()])
        builder = Builder(self.all_inputs)
        lift = builder.build([*(builder.const(0.0, kind) for kind in kinds), *used])
        operator = Operator(
            composed(f"{op.name} (adjoint)"), (*op.inputs, *op.state, *op.outputs),
            tuple(Leaf(EXACT_DTYPES[kind]) for kind in states),
            tuple(op.inputs[k] for k in self.request.wanted),
            lift, combine,
            self.lower(0, carried, states), tuple(encode(0, kind) for kind in states),
            None if self.request.with_init else self.edge(lift),
            sequential=True,
        )  # fmt: skip
        return Adjoint(operator, tuple(carried), 0, self.request.wanted, self.given_cotangent)

    def seeds(self, given: Sequence[int], carried: Sequence[int], start: int) -> list[Cotangent]:
        """The cotangents of (y[t], out[t]): μ, the values `given`, and o̅ among the inputs that
        begin at value `start`."""
        seeds: list[Cotangent] = [None] * len(self.previous)
        for value, c in zip(given, carried, strict=True):
            seeds[c] = value
        return [*seeds, *self.output_seeds(start)]

    def affine_maps(
        self,
        builder: Builder,
        entries: dict[Entry, int],
        offset: Sequence[Cotangent],
        carried: Sequence[int],
    ) -> AffineMaps:
        """The monoid of maps μ ↦ J μ + v, and the elements J = `entries`, v = `offset`."""
        entries, blocks = block_masks(builder, entries, carried, self.edge_flags)
        matrix = group_entries(builder, entries, carried)
        kinds = [self.previous[c] for c in carried]
        common = "f64" if "f64" in kinds else "f32"
        lifted = [block.mask for block in blocks]
        lifted.extend(
            builder.cast(g.value(builder, entries, common), common) for g in matrix.groups
        )
        lifted.extend(
            or_zero(builder, offset[c], kind) for c, kind in zip(carried, kinds, strict=True)
        )
        state = (
            *(Leaf(torch.bool) for _ in blocks),
            *(Leaf(torch_float(common)) for _ in matrix.groups),
            *(Leaf(torch_float(kind)) for kind in kinds),
        )
        identity: list[Key] = [encode(False, "b1") for _ in blocks]
        identity.extend(encode(float(g.diagonal), common) for g in matrix.groups)
        identity.extend(encode(0.0, kind) for kind in kinds)
        combine = self.combine(matrix, blocks, carried, kinds, common)
        return AffineMaps(state, lifted, combine, tuple(identity), len(state) - len(carried))

    @property
    def given_cotangent(self) -> int | None:
        """The number of the adjoint's input leaf that is the first given cotangent of an output."""
        first = len(self.op.inputs) + len(self.op.state)
        return min((first + k for k in self.request.cotangents), default=None)

    @property
    def edge_flags(self) -> tuple[int, ...]:
        """The inputs that say that t is the first step of a sequence."""
        return () if self.op.edge_input is None else (self.op.edge_input,)

    @property
    def starts_alone(self) -> bool:
        """Whether the scan starts without a carry: its first step is x[t] alone, without y[t−1]."""
        return not (self.request.with_init or self.request.exclusive)

    def edge(self, lift: Program) -> Edge | None:
        """The adjoint's edge: that of `op` where it is an input; else the engine's, where the
        adjoint reads y[t−1] and the first one may be no variable."""
        if self.op.edge is not None:
            return None if self.op.edge_input is None else self.op.edge
        before = self.before(0)
        if not self.starts_alone and lift.used_inputs.isdisjoint(before):
            return None
        return Edge(len(self.all_inputs), before[:0] if self.request.with_init else before)

    def before(self, start: int) -> range:
        """y[t−1] among inputs that begin at value `start`."""
        first = start + len(self.raw)
        return range(first, first + len(self.previous))

    def step(self, first: bool) -> Program:
        """S: (y[t−1], x[t]) → (y[t], out[t]); `first`: without a y[t−1]."""
        if first not in self._steps:
            self._steps[first] = self.written_step(first)
        return self._steps[first]

    def written_step(self, first: bool) -> Program:
        """`step`, which keeps what is written here."""
        n = len(self.previous)
        builder = Builder((*self.previous, *self.raw))
        before = list(range(n))
        x = list(range(n, n + len(self.raw)))
        element = builder.inline(self.op.lift, x)
        after = element if first else builder.inline(self.op.combine, [*before, *element])
        shown = before if self.request.exclusive else after
        edge = builder.const(False, "b1")
        return builder.build([*after, *builder.inline(self.op.lower, [*shown, *x, edge])])

    def arguments(self, start: int) -> list[int]:
        """(y[t−1], x[t]) among inputs that begin at value `start`."""
        n = start + len(self.raw)
        return [*range(n, n + len(self.previous)), *range(start, n)]

    def output_seeds(self, start: int) -> list[Cotangent]:
        """The cotangents o̅ among inputs that begin at value `start`, None for integer outputs."""
        first = start + len(self.raw) + len(self.previous)
        given = {
            c
            for k, span in enumerate(spans(self.op.outputs))
            if k in self.request.cotangents
            for c in span
        }
        return [
            first + c if d in FLOATS and c in given else None for c, d in enumerate(self.outputs)
        ]

    def pull(
        self, builder: Builder, first: bool, start: int, seeds: Sequence[Cotangent]
    ) -> list[Cotangent]:
        """Cotangents of (y[t−1], x[t]) from those of (y[t], out[t])."""
        step = self.step(first)

        def derivative(arguments: list[int], fixed: range) -> list[Cotangent]:
            found = vjp(builder, step, arguments, seeds)
            return [None if k in fixed else g for k, g in enumerate(found)]

        return self.cases(builder, self.arguments(start), derivative)

    def cases(
        self,
        builder: Builder,
        arguments: list[int],
        derivative: Callable[[list[int], range], list[Cotangent]],
    ) -> list[Cotangent]:
        """The derivative of a step at `arguments`, of which some are fixed.

        Where an input says whether t is the edge, the step is two formulas. Each is differentiated
        by itself and the results are chosen from: in the derivative of the choice, the formula
        that does not hold counts zero times, and zero times its infinite slopes is NaN.
        """
        place = self.op.edge_input
        if self.op.edge is None or place is None:
            return derivative(arguments, range(0))
        edge = self.op.edge.shifted(len(self.previous))
        flag = arguments[edge.place]
        found = []
        for holds, fixed in ((True, edge.fixed), (False, range(0))):
            arguments[edge.place] = builder.const(holds, "b1")
            found.append(derivative(arguments, fixed))
        return [choose_entry(builder, flag, a, b) for a, b in zip(*found, strict=True)]

    def linearise(self, builder: Builder) -> tuple[dict[Entry, int], list[Cotangent]]:
        """J as {(row, column): value} and v: μ' = J μ + v."""
        n = len(self.previous)
        seeds: list[Cotangent] = [*([None] * n), *self.output_seeds(0)]
        entries = self.jacobian(
            builder, self.live, len(seeds), lambda unit: self.pull(builder, False, 0, unit)
        )
        return entries, self.pull(builder, False, 0, seeds)[:n]

    def jacobian(
        self, builder: Builder, of: Sequence[int], count: int,
        derivative: Callable[[list[Cotangent]], list[Cotangent]],
    ) -> dict[Entry, int]:  # fmt: skip
        """{(row, column): value} of these state components, from a derivative of the step: a
        linear function of `count` values that begin with the state's, as its results do."""
        entries: dict[Entry, int] = {}
        for column in of:
            unit: list[Cotangent] = [None] * count
            unit[column] = builder.const(1.0, self.previous[column])
            for row, value in enumerate(derivative(unit)):
                if value is not None and row in of:
                    entries[row, column] = value
        return entries

    def reachable(self, entries: dict[Entry, int], offset: list[Cotangent]) -> list[int]:
        """The live components to which some cotangent can flow."""
        return self.reached_from(
            {c for c in self.live if offset[c] is not None or c in self.request.seeded}, entries
        )

    def reached_from(self, reached: set[int], entries: dict[Entry, int]) -> list[int]:
        """These components and those that J leads to from them; one at least."""
        while True:
            more = {row for row, column in entries if column in reached} - reached
            if not more:
                return sorted(reached) or self.live[:1]
            reached |= more

    def combine(
        self,
        matrix: Matrix,
        blocks: Sequence[Block],
        carried: Sequence[int],
        kinds: Sequence[str],
        common: str,
    ) -> Program:
        """(J₁, v₁) then (J₂, v₂): (J₂ J₁, J₂ v₁ + v₂).

        Where a block of J₂ is zero, its rows of v₁ have no part in the sum: they may be infinite.
        Where one of J₁ or J₂ is, the entries of the product are never used.
        """
        groups, flags = matrix.groups, len(blocks)
        m = flags + len(groups)
        n = m + len(carried)
        types = ["b1"] * flags + [common] * len(groups) + list(kinds)
        builder = Builder((*types, *types))
        first, second = (entry_values(builder, matrix, start + flags, common) for start in (0, n))
        signed = [builder.emit("or", k, n + k) for k in range(flags)]
        for g in groups:
            value = self.product(builder, g.representative, first, second, carried, common)
            signed.append(builder.emit("neg", value) if g.sign < 0 else value)
        zero = {row: n + k for k, block in enumerate(blocks) for row in block.rows}
        for k, row in enumerate(carried):
            own = total = n + m + k
            for j, column in enumerate(carried):
                if (row, column) in second:
                    entry = builder.cast(second[row, column], kinds[k])
                    carry = builder.cast(m + j, kinds[k])
                    total = builder.emit("add", total, builder.emit("mul", entry, carry))
            if row in zero:
                total = builder.emit("where", zero[row], own, total)
            signed.append(total)
        return builder.build(signed)

    def product(
        self,
        builder: Builder,
        entry: Entry,
        first: dict[Entry, int],
        second: dict[Entry, int],
        carried: Sequence[int],
        kind: str,
    ) -> int:
        """One entry of J₂ J₁."""
        total: int | None = None
        for k in carried:
            if (entry[0], k) in second and (k, entry[1]) in first:
                term = builder.emit("mul", second[entry[0], k], first[k, entry[1]])
                total = term if total is None else builder.emit("add", total, term)
        return builder.const(0.0, kind) if total is None else total

    def lower(self, matrix: int, carried: Sequence[int], state: tuple[str, ...]) -> Program:
        """(μ[t], x[t], y[t−1], o̅[t]) → x̄[t]; at the edge of a scan without init, y[t−1] is not."""
        builder = Builder((*state, *self.all_inputs, "b1"))
        start = len(state)
        seeds = self.seeds(range(matrix, matrix + len(carried)), carried, start)
        n = len(self.previous)
        regular = self.pull(builder, False, start, seeds)[n:]
        if self.starts_alone:
            edge = start + len(self.all_inputs)
            initial = self.pull(builder, True, start, seeds)[n:]
            regular = [choose(builder, edge, a, b) for a, b in zip(initial, regular, strict=True)]
        parts = spans(self.op.inputs)
        wanted = [c for leaf in self.request.wanted for c in parts[leaf]]
        return builder.build([or_zero(builder, regular[c], self.raw[c]) for c in wanted])


def torch_float(kind: str) -> torch.dtype:
    return torch.float64 if kind == "f64" else torch.float32
