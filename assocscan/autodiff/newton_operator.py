"""One iteration of Newton's method for h[t] = f(h[t−1], x[t]), as a scan that is associative.

For a guess g of the states, f is replaced by its tangent at g:

    h[t] = f(g[t−1], x[t]) + J[t] (h[t−1] − g[t−1]),    J[t] = ∂f/∂h (g[t−1], x[t])

an affine recurrence, which the scan of the monoid (J, v) solves, with v = f − J g. Inputs at t are
g[t−1], the parameters and x[t]; outputs are h[t] and f(g[t−1], x[t]), by which the caller sees how
far g was from the solution. Where h[t] is not finite, f(g[t−1], x[t]) takes its place. If f is
affine in h, the first iteration is exact, whatever g is.

Source: Y. H. Lim, Q. Zhu, J. Selfridge and M. F. Kasim, "Parallelizing non-linear sequential models
over the sequence length", ICLR 2024.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..errors import UnsupportedOperation
from ..program.dtypes import FLOATS
from ..program.operator import Leaf, Operator, components
from ..program.operator_names import composed
from ..program.program_builder import Builder, Program
from .adjoint_operator import Derivation, Request
from .derivative_rules import jvp
from .jacobian import Entry

# Operations that the Jacobian of a step may have where the step is scanned as an affine one. A
# choice among them (`where`) would let an infinite state reach what a loop does not let it reach.
ARITHMETIC = frozenset(
    "const add sub mul div neg cast exp exp2 expm1 log log1p tanh sigmoid sqrt rsqrt".split()
)


@dataclass(frozen=True)
class NewtonOperator:
    """operator: its inputs are the leaves of g, the parameters, x; its outputs the leaves of h
    and of f(g, x). matrix_size: how many components of its state stand for J. states: how many
    leaves h has. is_affine: whether J does not depend on g, is diagonal, and made by arithmetic."""

    operator: Operator
    matrix_size: int
    states: int
    is_affine: bool


@functools.lru_cache(maxsize=256)
def derive_newton(op: Operator) -> NewtonOperator:
    """Of a sequential operator. Raises UnsupportedOperation where its step has no derivative."""
    return _NewtonDerivation(op).newton()


class _NewtonDerivation(Derivation):
    """Inputs of the derived operator: g, the parameters, x, in scalars."""

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
        op, leaves = self.op, (*self.given, *self.op.inputs)
        kinds = tuple(leaf.scalar for leaf in leaves for _ in range(leaf.components))
        builder = Builder(kinds)
        entries, values = self.tangent_at(builder)
        offset = [*values]
        for (row, column), slope in entries.items():
            kind = self.previous[row]
            term = builder.emit("mul", slope, builder.cast(self.rows.index(column), kind))
            offset[row] = builder.emit("sub", offset[row], term)
        maps = self.affine_maps(builder, entries, offset, self.rows)
        shown = tuple(Leaf(leaf.dtype, leaf.shape) for leaf in self.given[: len(self.moving)])
        operator = Operator(
            composed(f"{op.name} (Newton)"), leaves, maps.state, (*shown, *shown),
            builder.build(maps.lifted), maps.combine,
            self.lowered(maps.matrix_size, tuple(leaf.scalar for leaf in maps.state), kinds),
            maps.identity,
        )  # fmt: skip
        slopes = builder.build(list(entries.values()))
        is_diagonal = all(row == column for row, column in entries)
        is_affine = (
            is_diagonal
            and all(v >= len(self.rows) for v in slopes.used_inputs)
            and all(i.op in ARITHMETIC for i in slopes.instructions)
        )
        return NewtonOperator(operator, maps.matrix_size, len(self.moving), is_affine)

    def step_arguments(self, builder: Builder, start: int) -> list[int]:
        """The arguments of `step` among inputs that begin at value `start`. What a step does not
        read of the state, its x, is zero."""
        known = dict(zip(self.rows, range(start, start + len(self.rows)), strict=True))
        place = start + len(self.rows)
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
        entries: dict[Entry, int] = {}
        for column in self.rows:
            tangents: list[int | None] = [None] * len(arguments)
            tangents[column] = builder.const(1.0, self.previous[column])
            for row, value in enumerate(jvp(builder, step, arguments, tangents)):
                if value is not None and row in self.rows:
                    entries[row, column] = value
        return entries, values[: len(self.previous)]

    def lowered(self, matrix: int, state: tuple[str, ...], inputs: tuple[str, ...]) -> Program:
        """(J, h, inputs) → h, f(g, x)."""
        builder = Builder((*state, *inputs, "b1"))
        found = builder.inline(self.step(False), self.step_arguments(builder, len(state)))
        results = []
        for k, row in enumerate(self.rows):
            value = matrix + k
            lost = builder.emit("or", builder.emit("isnan", value), builder.emit("isinf", value))
            results.append(builder.emit("where", lost, found[row], value))
        results.extend(found[row] for row in self.rows)
        kinds = [
            leaf.scalar for leaf in self.given[: len(self.moving)] for _ in range(leaf.components)
        ]
        return builder.build(
            [builder.cast(v, kind) for v, kind in zip(results, (*kinds, *kinds), strict=True)]
        )
