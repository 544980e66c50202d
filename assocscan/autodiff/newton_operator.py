"""One iteration of Newton's method for h[t] = f(h[t−1], x[t]), as a scan that is associative.

For a guess g of the states, f is replaced by its tangent at g:

    h[t] = f(g[t−1], x[t]) + J[t] (h[t−1] − g[t−1]),    J[t] = ∂f/∂h (g[t−1], x[t])

an affine recurrence, which the exclusive scan of the monoid (J, v) solves, with v = f − J g. Inputs
at t are g[t−1], g[t], the parameters and x[t]; the output at t is h[t−1], which the next iteration
reads at t. Where that is not finite, g[t−1] stays. The state also has the largest

    |f(g[t−1], x[t]) − g[t]| / (1 + |g[t]|)

of the steps so far, by which the caller sees how far g was from a solution. If f is affine in h,
the first iteration is exact, whatever g is.

Source: Y. H. Lim, Q. Zhu, J. Selfridge and M. F. Kasim, "Parallelizing non-linear sequential models
over the sequence length", ICLR 2024.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import UnsupportedOperation
from ..program.dtypes import EXACT_DTYPES, FLOATS
from ..program.operator import Leaf, Operator, components
from ..program.operator_names import composed
from ..program.program_builder import Builder, Instruction, Program, encode
from ..program.scalar_math import INTEGER_IDENTITIES
from .adjoint_operator import Derivation, Request
from .derivative_rules import jvp
from .jacobian import Entry

# What is not continuous, or hides a derivative. Comparisons are left out: they give bools.
JUMPS = INTEGER_IDENTITIES | {
    "detach", "floordiv", "truncdiv", "remainder", "fmod", "copysign", "atan2", "round_f16",
    "round_bf16",
}  # fmt: skip


@dataclass(frozen=True)
class NewtonOperator:
    """operator: its inputs are the leaves of g[t−1], of g[t], the parameters, x; its outputs those
    of h[t−1]. Its state has J, then the components of h, then the distance. matrix_size: how many
    components stand for J. states: how many leaves h has. is_diagonal: whether J is. is_affine:
    whether it is, and f is made of g by sums and by products with what does not depend on g.
    jumps: whether f compares or rounds what depends on g, or detaches it, or jumps in another way:
        J does not see that.

    tangent: f and J alone, of the operator's inputs: the components of f, then J's `entries`, (row,
    column) among the components of h; the others are 0.
    """

    operator: Operator
    matrix_size: int
    states: int
    is_diagonal: bool
    is_affine: bool
    jumps: bool
    tangent: Program
    entries: tuple[Entry, ...]


@functools.lru_cache(maxsize=256)
def derive_newton(op: Operator) -> NewtonOperator:
    """Of a sequential operator. Raises UnsupportedOperation where its step has no derivative."""
    return _NewtonDerivation(op).newton()


class _NewtonDerivation(Derivation):
    """Inputs of the derived operator: g[t−1], g[t], the parameters, x, in scalars."""

    def __init__(self, op: Operator) -> None:
        # The leaves of a state: h, the parameters, and one for each leaf of x.
        self.moving = tuple(range(len(op.state) - len(op.inputs) - len(op.constant)))
        own = components(op.state, self.moving)
        super().__init__(op, Request(False, True, (), own, frozenset()))
        if any(self.previous[c] not in FLOATS for c in own):
            raise UnsupportedOperation("Newton's method needs a state of floats")
        self.rows = sorted(own)
        self.given = tuple(
            Leaf(op.state[k].accumulator, op.state[k].shape) for k in (*self.moving, *op.constant)
        )

    def newton(self) -> NewtonOperator:
        op, count = self.op, len(self.moving)
        leaves = (*self.given[:count], *self.given, *op.inputs)
        kinds = tuple(leaf.scalar for leaf in leaves for _ in range(leaf.components))
        builder = Builder(kinds)
        entries, values = self.tangent_at(builder)
        offset = [*values]
        for (row, column), slope in entries.items():
            kind = self.previous[row]
            term = builder.emit("mul", slope, builder.cast(self.rows.index(column), kind))
            offset[row] = builder.emit("sub", offset[row], term)
        maps = self.affine_maps(builder, entries, offset, self.rows)
        kind = "f64" if "f64" in kinds else "f32"
        state = (*maps.state, Leaf(EXACT_DTYPES[kind]))
        operator = Operator(
            composed(f"{op.name} (Newton)"), leaves, state, self.given[:count],
            builder.build([*maps.lifted, self.distance(builder, values, kind)]),
            with_largest(maps.combine, kind),
            self.lowered(maps.matrix_size, tuple(leaf.scalar for leaf in state), kinds),
            (*maps.identity, encode(0.0, kind)),
        )  # fmt: skip
        is_diagonal = all(row == column for row, column in entries)
        is_affine = is_diagonal and self.is_affine()
        places = sorted(entries)
        tangent = builder.build([*(values[r] for r in self.rows), *(entries[e] for e in places)])
        named = tuple((self.rows.index(row), self.rows.index(column)) for row, column in places)
        return NewtonOperator(
            operator, maps.matrix_size, len(self.moving), is_diagonal, is_affine, self.jumps(),
            tangent, named,
        )  # fmt: skip

    def is_affine(self) -> bool:
        """Whether f is affine in g by its form. A constant derivative does not say so: that of a
        comparison, a rounding and of what is detached is 0. A choice (`where`) is left out, too: in
        a scan 0 · ∞ would carry an infinity past a step at which a loop drops it."""
        for i, found in self.moving_instructions():
            is_cast = i.op == "cast" and i.dtype in FLOATS
            is_product = i.op == "mul" and found.count(True) == 1
            is_quotient = i.op == "div" and not found[1]
            if not (i.op in ("add", "sub", "neg") or is_cast or is_product or is_quotient):
                return False
        return True

    def jumps(self) -> bool:
        return any(
            i.op in JUMPS or i.dtype not in FLOATS for i, _ in self.moving_instructions()
        )  # fmt: skip

    def moving_instructions(self) -> Iterator[tuple[Instruction, list[bool]]]:
        """The instructions of f that depend on g, and for each argument whether it does."""
        step = self.step(False)
        program = step.select([c for c in range(len(self.previous)) if c in self.rows])
        moving = program.depending_on(self.rows)
        for value, i in enumerate(program.instructions, len(program.inputs)):
            if value in moving:
                yield i, [a in moving for a in i.args]

    def step_arguments(self, builder: Builder, start: int) -> list[int]:
        """The arguments of `step` among inputs that begin at value `start`. What a step does not
        read of the state, its x, is zero."""
        known = dict(zip(self.rows, range(start, start + len(self.rows)), strict=True))
        place = start + 2 * len(self.rows)
        for c in sorted(components(self.op.state, self.op.constant)):
            known[c] = place
            place += 1
        before = [
            builder.cast(known[c], kind) if c in known else builder.const(0, kind)
            for c, kind in enumerate(self.previous)
        ]
        return [*before, *range(place, place + len(self.raw))]

    def tangent_at(self, builder: Builder) -> tuple[dict[Entry, int], list[int]]:
        """J as {(row, column): value}, and f(g, x), by component."""
        step, arguments = self.step(False), self.step_arguments(builder, 0)
        values = builder.inline(step, arguments)
        entries = self.jacobian(
            builder, self.rows, len(arguments), lambda unit: jvp(builder, step, arguments, unit)
        )
        return entries, values[: len(self.previous)]

    def distance(self, builder: Builder, values: list[int], kind: str) -> int:
        """The largest |f(g[t−1], x[t]) − g[t]| / (1 + |g[t]|) of the components."""
        found = builder.const(0.0, kind)
        for k, row in enumerate(self.rows):
            g = builder.cast(len(self.rows) + k, kind)
            off = builder.emit("abs", builder.emit("sub", builder.cast(values[row], kind), g))
            size = builder.emit("add", builder.const(1.0, kind), builder.emit("abs", g))
            found = builder.emit("max", found, builder.emit("div", off, size))
        return found

    def lowered(self, matrix: int, state: tuple[str, ...], inputs: tuple[str, ...]) -> Program:
        """(J, h, distance, inputs) → h, or the guess where it is not finite."""
        builder = Builder((*state, *inputs, "b1"))
        results = []
        for k in range(len(self.rows)):
            value, guess = matrix + k, len(state) + k
            lost = builder.emit("or", builder.emit("isnan", value), builder.emit("isinf", value))
            kept = builder.cast(value, builder.dtype(guess))
            results.append(builder.emit("where", lost, guess, kept))
        return builder.build(results)


def with_largest(combine: Program, kind: str) -> Program:
    """A combination of states to which one more component is added, of which the larger stays."""
    n = len(combine.outputs)
    builder = Builder((*combine.inputs[:n], kind, *combine.inputs[n:], kind))
    results = builder.inline(combine, [*range(n), *range(n + 1, 2 * n + 1)])
    return builder.build([*results, builder.emit("max", n, 2 * n + 1)])
