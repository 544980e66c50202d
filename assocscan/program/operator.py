"""`Operator`: what an engine runs, a monoid specialised to dtypes and element shapes.

    state   = lift(inputs at t)
    carry   = combine(carry, state)
    outputs = lower(carry, inputs at t)

All three are `Program`s over scalars: a leaf with element shape [2, 2] contributes four inputs,
a complex leaf twice its elements. `lower` has one more input, `edge`: whether t is the last step
of the scan's order; only derived operators use it. Before a derived operator is differentiated
again, `edge` becomes an input leaf (`engines/base/shifted_leaves`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from .dtypes import promoted_float, scalar_dtype
from .program_builder import Key, Program


@dataclass(frozen=True)
class Leaf:
    """One tensor of an element: its dtype and element shape."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @cached_property
    def components(self) -> int:
        """How many scalars one element holds."""
        return math.prod(self.shape) * (2 if self.dtype.is_complex else 1)

    @property
    def scalar(self) -> str:
        """The dtype its scalars are computed in."""
        return scalar_dtype(self.dtype)

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype of a carry that is handed out: float32 for 16-bit floats."""
        return torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype


def scalars(leaves: tuple[Leaf, ...]) -> tuple[str, ...]:
    """The scalar dtypes of all components, leaf by leaf."""
    return tuple(leaf.scalar for leaf in leaves for _ in range(leaf.components))


def promoted(leaves: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
    """The leaves of a state: floats of several dtypes are combined in the widest of them.

    16-bit floats stay, since they are combined in float32 anyway.
    """
    widest = promoted_float(leaf.dtype for leaf in leaves)
    return tuple(
        Leaf(widest, leaf.shape)
        if widest is not None
        and leaf.dtype.is_floating_point
        and leaf.accumulator != Leaf(widest).accumulator
        else leaf
        for leaf in leaves
    )


def spans(leaves: tuple[Leaf, ...]) -> list[range]:
    """The component numbers of each leaf."""
    result, start = [], 0
    for leaf in leaves:
        result.append(range(start, start + leaf.components))
        start += leaf.components
    return result


def components(leaves: tuple[Leaf, ...], chosen: Sequence[int]) -> frozenset[int]:
    """The component numbers of the chosen leaves."""
    parts = spans(leaves)
    return frozenset(c for k in chosen for c in parts[k])


def closure(combine: Program, wanted: Iterable[int], both_sides: bool = False) -> frozenset[int]:
    """The state components that `wanted` ones depend on through `combine`'s left argument.

    With `both_sides` through its right argument too: what an aggregate must hold.
    """
    live, width = set(wanted), len(combine.outputs)
    while True:
        used = combine.select(sorted(live)).used_inputs
        more = {v % width for v in used if both_sides or v < width}
        if more <= live:
            return frozenset(live)
        live |= more


@dataclass(frozen=True)
class Edge:
    """Where a derived operator finds out that t is the first step of the user's scan.

    place: of the flag, among the input components and lower's `edge`, which comes after them.
    fixed: the input components that hold the state before t, where that is no variable at the
        first step: nothing is there, or the identity. Slopes in its direction may be infinite, and
        have no part in any derivative. Empty where the state before the first step is `init`.
    """

    place: int
    fixed: range

    def shifted(self, by: int) -> Edge:
        """For the same inputs after `by` others."""
        return Edge(self.place + by, range(self.fixed.start + by, self.fixed.stop + by))


@dataclass(frozen=True)
class Operator:
    """A monoid at given dtypes and element shapes, as programs over scalars.

    `edge`: of a derived operator that treats the first step of the user's scan in its own way.
    `sequential`: combine is a step h, x ↦ h' and is not associative. An engine walks along the axis
    and combines a carry with one element at a time; such a scan has an initial carry. The
    derivatives of such operators are sequential too, so that they lose nothing that a loop keeps.
    `constant`: the state leaves of a sequential operator that every step passes on and that are the
    same for all packed sequences: parameters.
    """

    name: str = field(compare=False)
    inputs: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    lift: Program
    combine: Program
    lower: Program
    identity: tuple[Key, ...] | None
    edge: Edge | None = None
    sequential: bool = False
    constant: tuple[int, ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.inputs, self.state, self.outputs, self.lift, self.combine, self.lower,
                     self.identity, self.sequential))  # fmt: skip

    def __hash__(self) -> int:
        """Cached, since programs are long and operators are keys of every cache."""
        return self._hash

    @cached_property
    def width(self) -> int:
        """The number of scalars in a state."""
        return len(self.combine.outputs)

    @property
    def edge_input(self) -> int | None:
        """The input component that holds the edge's flag; None where an engine passes it."""
        if self.edge is None or self.edge.place == len(self.lift.inputs):
            return None
        return self.edge.place

    @cached_property
    def used_inputs(self) -> frozenset[int]:
        """The input components that outputs or the state depend on."""
        lowered = {v - self.width for v in self.lower.used_inputs if v >= self.width}
        edge = len(self.lift.inputs)
        return frozenset((lowered - {edge}) | self.lift.used_inputs)

    @cached_property
    def lowered_state(self) -> frozenset[int]:
        """The state components that `lower` reads."""
        return frozenset(v for v in self.lower.used_inputs if v < self.width)

    def carry_components(self, final: tuple[int, ...]) -> list[int]:
        """The state components that a sequential carry must hold, for outputs and final leaves."""
        return sorted(closure(self.combine, self.lowered_state | components(self.state, final)))

    def aggregate_components(self, final: tuple[int, ...]) -> list[int]:
        """The state components that the aggregate of several steps must hold."""
        return sorted(closure(self.combine, self.carry_components(final), both_sides=True))

    @cached_property
    def applies_matrices(self) -> bool:
        """Whether elements are linear maps of vectors: a leaf of two dimensions beside one of
        fewer, in a `combine` of sums and products.

        A product of several maps may be far larger than the vectors that it acts on. A carry that
        walks along never forms one.
        """
        dims = [len(leaf.shape) for leaf in self.state]
        has_both = any(d >= 2 for d in dims) and any(d == 1 for d in dims)
        return has_both and all(i.op in LINEAR for i in self.combine.instructions)

    @property
    def is_walked(self) -> bool:
        """Whether the CPU walks along each row, and never cuts it into parts."""
        return self.sequential or self.applies_matrices


LINEAR = frozenset({"add", "sub", "mul", "neg"})


@functools.lru_cache(maxsize=512)
def without_outputs(op: Operator) -> Operator:
    """`op` for a scan of which only the final carry is wanted."""
    return replace(op, outputs=(), lower=op.lower.select(()))
