"""`VectorAdjoint`: what the backward pass of a scan over vectors is made for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..operator import Leaf
from ..operator_names import composed
from .vector_operator import VectorOperator, part_spans

BACKWARD = " (backward)"  # after the name of the forward operator


@dataclass(frozen=True)
class VectorAdjoint:
    """What the backward pass of a scan is made for.

    op: the forward operator. exclusive: of the forward scan. first: whether its first step has no
    carry (inclusive, without init).
    final: the state leaves whose final carry the forward scan returned.
    wanted: the input leaves with a gradient. cotangents: the outputs that have one. seeded: the
    finals that have one. wants_init: whether the gradient of init is a result.
    repeated: of each wanted leaf, the batch dimensions along which `expand` repeats it and its
        gradient is summed, as where the leaf has size 1. Along all others it has the leaf's size.
    lane: as in the `VectorOperator` that saved the carries.
    """

    op: VectorOperator
    exclusive: bool
    first: bool
    final: tuple[int, ...]
    wanted: tuple[int, ...]
    cotangents: tuple[int, ...]
    seeded: tuple[int, ...]
    wants_init: bool
    repeated: tuple[tuple[int, ...], ...]
    lane: int | None

    @property
    def name(self) -> str:
        return composed(self.op.name + BACKWARD)

    @cached_property
    def inputs(self) -> tuple[Leaf, ...]:
        """The tensors of the backward pass: the inputs, the cotangents of the outputs, the saved
        carries (bytes), the cotangents of the finals."""
        seeds = (Leaf(self.op.state[k].accumulator, self.op.state[k].shape) for k in self.seeded)
        return (*self.op.inputs, *self.cotangent_leaves, Leaf(torch.uint8), *seeds)

    @property
    def outputs(self) -> tuple[Leaf, ...]:
        return self.gradient_leaves

    @property
    def state(self) -> tuple[Leaf, ...]:
        return self.op.state

    @property
    def identity(self) -> None:
        return None

    @cached_property
    def saved_parts(self) -> list[int]:
        """The parts of the state that the forward scan carries, and saves."""
        return self.op.carry_parts(self.final)

    @cached_property
    def carry(self) -> list[int]:
        """Those of them that the outputs and the finals with a cotangent depend on."""
        return self.op.carry_parts(self.seeded)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The state leaves whose gradient at init is a result: those of which a part is carried.
        The gradient of the others is zero."""
        spans, carried = part_spans(self.op.state), set(self.carry)
        return tuple(
            k for k, s in enumerate(spans) if self.wants_init and not carried.isdisjoint(s)
        )

    @cached_property
    def gradient_leaves(self) -> tuple[Leaf, ...]:
        return tuple(self.op.inputs[k] for k in self.wanted)

    @cached_property
    def cotangent_leaves(self) -> tuple[Leaf, ...]:
        return tuple(self.op.outputs[k] for k in self.cotangents)

    @property
    def carries(self) -> int:
        """The number of the saved carries among the inputs."""
        return len(self.op.inputs) + len(self.cotangents)

    def with_batch_dimension(self) -> VectorAdjoint:
        """For tensors with one more batch dimension, in front."""
        repeated = tuple(tuple(d + 1 for d in dims) for dims in self.repeated)
        lane = None if self.lane is None else self.lane + 1
        return replace(self, repeated=repeated, lane=lane)
