"""The forward-mode derivative of a scan: another scan, in the same direction.

With one step of the scan (y[t], out[t]) = S(y[t−1], x[t]) and tangents written ẋ, ẏ,

    ẏ[t] = J[t] ẏ[t−1] + v[t],    J = ∂y[t]/∂y[t−1],   v = ∂y[t]/∂x[t] · ẋ[t]

is an exclusive scan of the affine monoid (J, v), as in `adjoint_operator`, from the tangent of
`init` or zero. Its inputs at t are `first`, x[t], p[t] = y[t−1] and ẋ[t]; `lower` turns the
incoming ẏ[t−1] into the tangents of the outputs, and the final carry is the tangent of the final.

The products J · tangent are taken by a walk forwards through the step, by the rules of the reverse
mode: what a scalar operation passes to an operand and what it takes from it are products with the
same slope.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..program.dtypes import FLOATS
from ..program.operator import Edge, Leaf, Operator, components, spans
from ..program.operator_names import composed
from ..program.program_builder import Builder, Program
from .adjoint_operator import Derivation, Request
from .derivative_rules import Cotangent, choose, jvp, or_zero
from .jacobian import Entry, choose_entry


@dataclass(frozen=True)
class TangentRequest:
    """What moves: the input leaves with tangents, and whether a carry enters the scan."""

    exclusive: bool
    with_init: bool
    moving: tuple[int, ...]
    init_moves: bool
    final: tuple[int, ...]


@dataclass(frozen=True)
class Tangent:
    """The tangent scan. `carried` are the state components whose tangents it carries, `outputs`
    the output leaves it gives, `states` the state leaves it reads."""

    operator: Operator
    carried: tuple[int, ...]
    matrix_size: int
    outputs: tuple[int, ...]
    states: tuple[int, ...]


@functools.lru_cache(maxsize=512)
def derive_tangent(op: Operator, request: TangentRequest) -> Tangent:
    """The tangent scan of `op`. Raises UnsupportedOperation where it has no generated form."""
    return _TangentDerivation(op, request).tangent()


class _TangentDerivation(Derivation):
    """Inputs of the derived operator: first, x, y[t−1], ẋ, in scalars."""

    def __init__(self, op: Operator, request: TangentRequest) -> None:
        everything = frozenset(range(len(op.outputs)))
        seeded = components(op.state, request.final)
        super().__init__(op, Request(request.exclusive, request.with_init, (), seeded, everything))
        self.moving = request
        self.all_inputs = ("b1", *self.raw, *self.previous, *self.raw)

    def tangent(self) -> Tangent:
        op, builder = self.op, Builder(self.all_inputs)
        entries, offset = self.linearised(builder)
        carried = self.moved(entries, offset)
        maps = self.affine_maps(builder, entries, offset, carried)
        shown = tuple(
            k
            for k, leaf in enumerate(op.outputs)
            if leaf.dtype.is_floating_point or leaf.dtype.is_complex
        )
        operator = Operator(
            composed(f"{op.name} (tangent)"), (Leaf(torch.bool), *op.inputs, *op.state, *op.inputs),
            maps.state, tuple(op.outputs[k] for k in shown), builder.build(maps.lifted),
            maps.combine,
            self.lowered(maps.matrix_size, carried, tuple(t.scalar for t in maps.state), shown),
            maps.identity, sequential=op.sequential,
        )  # fmt: skip
        used = operator.used_inputs
        operator = replace(operator, edge=self.edge_of(used))
        start = 1 + len(self.raw)
        states = tuple(
            k for k, span in enumerate(spans(op.state)) if any(start + c in used for c in span)
        )
        return Tangent(operator, tuple(carried), maps.matrix_size, shown, states)

    @property
    def edge_flags(self) -> tuple[int, ...]:
        return (0, *(1 + k for k in super().edge_flags))

    def edge_of(self, used: frozenset[int]) -> Edge | None:
        """The edge of the tangents' scan: `first`, or that of `op` among the inputs after it."""
        if 0 in used:
            before = self.before(1)
            return Edge(0, before[:0] if self.request.with_init else before)
        if self.op.edge is None or self.op.edge_input is None:
            return None
        return self.op.edge.shifted(1)

    def step_arguments(self, start: int) -> list[int]:
        """(y[t−1], x[t]) among inputs that begin at value `start` with `first`."""
        return self.arguments(start + 1)

    def input_tangents(self, start: int) -> list[Cotangent]:
        """ẋ per component of x; None where it does not move."""
        begin = start + 1 + len(self.raw) + len(self.previous)
        moving = components(self.op.inputs, self.moving.moving)
        return [begin + c if c in moving and d in FLOATS else None for c, d in enumerate(self.raw)]

    def push(
        self, builder: Builder, first: bool, start: int, tangents: Sequence[Cotangent]
    ) -> list[Cotangent]:
        """Tangents of (y[t], out[t]) from those of (y[t−1], x[t])."""
        step = self.step(first)

        def derivative(arguments: list[int], fixed: range) -> list[Cotangent]:
            moving = [None if k in fixed else t for k, t in enumerate(tangents)]
            return jvp(builder, step, arguments, moving)

        return self.cases(builder, self.step_arguments(start), derivative)

    def linearised(self, builder: Builder) -> tuple[dict[Entry, int], list[Cotangent]]:
        """J as {(row, column): value} and v: ẏ' = J ẏ + v.

        At the first step there is no ẏ[t−1] unless init has a tangent. J is zero there, where it
        would read a y[t−1] that does not exist or is a constant: its slopes may be infinite.
        """
        n = len(self.previous)
        moved = [*([None] * n), *self.input_tangents(0)]
        entries = self.jacobian(
            builder, self.live, len(moved), lambda unit: self.push(builder, False, 0, unit)
        )
        cut_off = self.cut_off(builder, 0)
        for entry, value in entries.items():
            is_one = entry[0] == entry[1] and builder.literal(value) == 1
            if (self.starts_alone and not is_one) or value in cut_off:
                found = choose_entry(builder, 0, None, value)
                assert found is not None
                entries[entry] = found
        offset = self.push(builder, False, 0, moved)[:n]
        if self.starts_alone:
            initial = self.push(builder, True, 0, moved)[:n]
            offset = [choose(builder, 0, a, b) for a, b in zip(initial, offset, strict=True)]
        return entries, offset

    def cut_off(self, builder: Builder, start: int) -> frozenset[int]:
        """The values that read a y[t−1] which does not move at the first step: multiples of ẏ[t−1]
        among them are zero there."""
        if self.moving.init_moves:
            return frozenset()
        return builder.depending_on(self.before(start + 1))

    def moved(self, entries: dict[Entry, int], offset: list[Cotangent]) -> list[int]:
        """The live components that some tangent can reach."""
        moves = self.moving.init_moves
        return self.reached_from({c for c in self.live if moves or offset[c] is not None}, entries)

    def lowered(
        self, matrix: int, carried: Sequence[int], state: tuple[str, ...], shown: Sequence[int]
    ) -> Program:
        """(ẏ[t−1], first, x[t], y[t−1], ẋ[t]) → the outputs' tangents."""
        builder = Builder((*state, *self.all_inputs, "b1"))
        start, n = len(state), len(self.previous)
        tangents: list[Cotangent] = [None] * n
        for k, c in enumerate(carried):
            tangents[c] = matrix + k
        tangents.extend(self.input_tangents(start))
        results = self.push(builder, False, start, tangents)[n:]
        still: list[Cotangent] = [None] * n
        initial = self.push(builder, self.starts_alone, start, [*still, *tangents[n:]])[n:]
        incoming = self.push(builder, False, start, [*tangents[:n], *([None] * len(self.raw))])[n:]
        cut_off = self.cut_off(builder, start)
        results = [
            choose(builder, start, a, b) if self.starts_alone or along in cut_off else b
            for a, b, along in zip(initial, results, incoming, strict=True)
        ]
        parts = spans(self.op.outputs)
        wanted = [c for k in shown for c in parts[k]]
        return builder.build([or_zero(builder, results[c], self.outputs[c]) for c in wanted])
