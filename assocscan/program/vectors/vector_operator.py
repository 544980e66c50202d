"""`VectorOperator`: an operator over vectors that does the same to each of their N states.

    state[n] = lift(inputs[n] at t)                for every n
    carry[n] = combine(carry[n], state[n])         for every n
    outputs  = lower(carry, inputs at t)           may combine the states: y = Σ_n C[n]·h[n]

It is like `Operator`, but each value of a program stands for all N states (`state_axis`). Operators
that treat states differently, or move values between them before `lower`, have no such form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..operator import Leaf, closure
from ..program_builder import Builder, Key, Program, decode
from .state_axis import StateBuilder


def parts(leaf: Leaf) -> int:
    """The scalars of one state of a leaf: 2 for a complex one."""
    return 2 if leaf.dtype.is_complex else 1


def part_dtypes(leaves: Sequence[Leaf]) -> tuple[str, ...]:
    """The scalar dtypes of the parts of these leaves, in their order."""
    return tuple(leaf.scalar for leaf in leaves for _ in range(parts(leaf)))


def part_spans(leaves: Sequence[Leaf]) -> list[range]:
    """The numbers of the parts of each leaf."""
    result, start = [], 0
    for leaf in leaves:
        result.append(range(start, start + parts(leaf)))
        start += parts(leaf)
    return result


@dataclass(frozen=True)
class VectorOperator:
    """A monoid of vectors, as programs over one state.

    size: N, the number of states.
    inputs, state, outputs: leaves of shape (size,), which vary along the states, and of shape () or
        (1,), which do not.
    lift: the parts of the inputs → the parts of the state.
    combine: the parts of two states → the parts of one.
    lower: the parts of the state, then of the inputs → the parts of the outputs.
    identity: one value for each part of the state, the same for all n.
    saves_carries: whether a scan also returns the carry that enters each chunk, for the backward
        pass. They come after the outputs, as one tensor.
    lane: the batch dimension along which an engine lays the saved carries out; None where there is
        none but the axis. Forward and backward pass agree on it by this number, since strides may
        differ between them. Only read with `saves_carries`.
    """

    name: str = field(compare=False)
    size: int
    inputs: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    lift: Program
    combine: Program
    lower: Program
    identity: tuple[Key, ...] | None
    saves_carries: bool = False
    lane: int | None = None

    @cached_property
    def _hash(self) -> int:
        return hash((self.size, self.inputs, self.state, self.outputs, self.lift, self.combine,
                     self.lower, self.identity, self.saves_carries, self.lane))  # fmt: skip

    def __hash__(self) -> int:
        """Cached, since programs are long and operators are keys of every cache."""
        return self._hash

    def varies(self, leaf: Leaf) -> bool:
        """Whether a leaf has one value per state."""
        return leaf.shape == (self.size,)

    @property
    def width(self) -> int:
        """The parts of a state."""
        return len(self.combine.outputs)

    def parts_vary(self, leaves: Sequence[Leaf]) -> tuple[bool, ...]:
        """For each part of these leaves, whether it varies along the states."""
        return tuple(self.varies(leaf) for leaf in leaves for _ in range(parts(leaf)))

    @cached_property
    def state_varies(self) -> tuple[bool, ...]:
        return self.parts_vary(self.state)

    @cached_property
    def step_inputs(self) -> tuple[str, ...]:
        """The dtypes of what a step takes: the parts of the carry, then of the inputs."""
        return (*part_dtypes(self.state), *part_dtypes(self.inputs))

    @cached_property
    def step_varies(self) -> tuple[bool, ...]:
        return (*self.state_varies, *self.parts_vary(self.inputs))

    def builder(self, more: Sequence[str] = (), more_varies: Sequence[bool] = ()) -> StateBuilder:
        """A builder of programs over a step's inputs, then `more`."""
        return StateBuilder(
            (*self.step_inputs, *more), (*self.step_varies, *more_varies), self.size
        )

    def add_step(self, builder: Builder, first: bool, exclusive: bool) -> tuple[list[int], ...]:
        """The values of a step's new carry and of its outputs, in a builder over its inputs.

        first: there is no carry yet, so that the first element becomes it.
        """
        width = self.width
        before = list(range(width))
        x = list(range(width, len(self.step_inputs)))
        element = builder.inline(self.lift, x)
        after = element if first else builder.inline(self.combine, [*before, *element])
        lowered = builder.inline(self.lower, [*(before if exclusive else after), *x])
        return after, lowered

    def step(self, first: bool, exclusive: bool, carry: Sequence[int]) -> Program:
        """A step: (y[t−1], x[t]) → the parts `carry` of y[t], then the outputs."""
        builder = self.builder()
        after, lowered = self.add_step(builder, first, exclusive)
        return builder.build([*(after[c] for c in carry), *lowered])

    @cached_property
    def identity_values(self) -> tuple[float, ...]:
        """The identity's parts; zeros where the operator has none."""
        if self.identity is None:
            return (0.0,) * self.width
        return tuple(decode(v) for v in self.identity)

    def carry_parts(self, final: Sequence[int]) -> list[int]:
        """The parts of the state that a sequential carry must hold, for the outputs and these final
        leaves."""
        spans = part_spans(self.state)
        lowered = {v for v in self.lower.used_inputs if v < self.width}
        return sorted(closure(self.combine, lowered | {c for k in final for c in spans[k]}))

    def saving_carries(self, lane: int | None) -> VectorOperator:
        """The operator whose scans also return the carries that the backward pass reads."""
        return replace(self, saves_carries=True, lane=lane)

    def with_batch_dimension(self) -> VectorOperator:
        """For tensors with one more batch dimension, in front."""
        return self if self.lane is None else replace(self, lane=self.lane + 1)

    @property
    def is_reduction(self) -> bool:
        """Whether a scan writes nothing at its steps: only final states leave it."""
        return not (self.outputs or self.saves_carries)

    def without_outputs(self) -> VectorOperator:
        return replace(self, outputs=(), lower=self.lower.select(()))
