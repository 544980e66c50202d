"""Operators whose elements are matrices and vectors too large to unroll.

A `MatrixOperator` is to such elements what `Operator` is to scalars: `combine` as straight-line
code, but over whole leaves, for kernels that hold a leaf as a tile. It is read from the same trace.
What it cannot say (other operations than those of `_Reader`, other sizes than powers of two from
8 to 64, a `lift`, a `lower` that computes) has none, and is unrolled or run eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ..errors import UnsupportedOperation
from .operator import Leaf
from .operator_names import composed

SIZES = (8, 16, 32, 64)
ACCUMULATORS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Step:
    """One value: an operation on earlier values, its shape, and its number or axis if it has one.

    dot: matrix product. add, sub, mul: elementwise, of broadcast values. scale, shift: by `number`.
    neg. trans: of a matrix. sum: over `axis`. expand: a vector as a matrix, 1 wide along `axis`.
    """

    op: str
    arguments: tuple[int, ...]
    shape: tuple[int, ...]
    number: float = 0.0
    axis: int = 0


@dataclass(frozen=True)
class MatrixProgram:
    """Straight-line code: values 0, 1, … are the inputs, then one per step."""

    inputs: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of every value."""
        return [*self.inputs, *(step.shape for step in self.steps)]

    def needed(self, outputs: Iterable[int]) -> frozenset[int]:
        """The values that these outputs depend on, themselves and inputs included."""
        live = {self.outputs[k] for k in outputs}
        for number in reversed(range(len(self.inputs), len(self.inputs) + len(self.steps))):
            if number in live:
                live.update(self.steps[number - len(self.inputs)].arguments)
        return frozenset(live)

    @property
    def products(self) -> int:
        """How many scalar products one run has in its matrix products."""
        shapes = self.shapes
        return sum(
            math.prod(step.shape) * shapes[step.arguments[0]][1]
            for step in self.steps
            if step.op == "dot"
        )


@dataclass(frozen=True)
class MatrixOperator:
    """A monoid of matrices and vectors, at given dtypes and sizes.

    combine: from the left element's leaves and the right one's to the result's.
    shown: the state leaf that each output is. identity: the entries of each leaf, flat.
    """

    name: str = field(compare=False)
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    combine: MatrixProgram
    shown: tuple[int, ...]
    identity: tuple[tuple[float, ...], ...] | None

    @cached_property
    def _hash(self) -> int:
        return hash((self.inputs, self.outputs, self.combine, self.shown, self.identity))

    def __hash__(self) -> int:
        """Cached: an identity may have thousands of entries."""
        return self._hash

    @property
    def state(self) -> tuple[Leaf, ...]:
        """There is no lift: a state is what the inputs are."""
        return self.inputs

    @property
    def accumulator(self) -> torch.dtype:
        """The one dtype that states are combined in."""
        return self.state[0].accumulator

    def identity_tensor(self, leaf: int) -> torch.Tensor:
        """The identity's leaf on the CPU; zeros where the operator has none."""
        shape = self.state[leaf].shape
        if self.identity is None:
            return torch.zeros(shape, dtype=self.accumulator, device="cpu")
        identity = torch.tensor(self.identity[leaf], dtype=self.accumulator, device="cpu")
        return identity.reshape(shape)

    def _closure(self, wanted: Iterable[int], both_sides: bool) -> tuple[int, ...]:
        count, live = len(self.state), set(wanted)
        while True:
            used = self.combine.needed(live)
            more = {v for v in used if v < count}
            if both_sides:
                more |= {v - count for v in used if count <= v < 2 * count}
            if more <= live:
                return tuple(sorted(live))
            live |= more

    def carry_leaves(self, final: Sequence[int]) -> tuple[int, ...]:
        """The state leaves that a carry must hold, for the outputs and these final leaves."""
        return self._closure({*self.shown, *final}, both_sides=False)

    def aggregate_leaves(self, final: Sequence[int]) -> tuple[int, ...]:
        """The state leaves that the aggregate of several steps must hold."""
        return self._closure(self.carry_leaves(final), both_sides=True)

    def showing(self, shown: tuple[int, ...]) -> MatrixOperator:
        """The same monoid with these state leaves as its outputs."""
        outputs = tuple(self.state[k] for k in shown)
        return MatrixOperator(self.name, self.inputs, outputs, self.combine, shown, self.identity)

    def carries(self, leaves: tuple[int, ...]) -> MatrixOperator:
        """The same monoid on aggregates of these leaves (a result of `aggregate_leaves`), in the
        accumulator."""
        count, kept = len(self.state), len(leaves)
        place = {k: n for n, k in enumerate(leaves)}
        numbers = {**place, **{count + k: kept + n for k, n in place.items()}}
        needed = self.combine.needed(leaves)
        steps: list[Step] = []
        for number, step in enumerate(self.combine.steps, 2 * count):
            if number in needed:
                numbers[number] = 2 * kept + len(steps)
                arguments = tuple(numbers[a] for a in step.arguments)
                steps.append(Step(step.op, arguments, step.shape, step.number, step.axis))
        state = tuple(Leaf(self.accumulator, self.state[k].shape) for k in leaves)
        combine = MatrixProgram(
            tuple(leaf.shape for leaf in (*state, *state)),
            tuple(steps),
            tuple(numbers[self.combine.outputs[k]] for k in leaves),
        )
        identity = None if self.identity is None else tuple(self.identity[k] for k in leaves)
        everything = tuple(range(kept))
        return MatrixOperator(
            composed(f"{self.name} (carries)"), state, state, combine, everything, identity
        )


def refuse_matrices(op: object) -> None:
    """Raise UnsupportedOperation for an operator over whole matrices: it has no derivative."""
    if isinstance(op, MatrixOperator):
        raise UnsupportedOperation("its elements are matrices too large to unroll")
