"""`ForwardKernel` and `BackwardKernel`: everything that is a constant of one compiled kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....autodiff.vector_adjoint import backward_step
from ....program.program_builder import Program
from ....program.vectors.vector_adjoint import VectorAdjoint
from ....program.vectors.vector_operator import VectorOperator, part_dtypes

# The lanes of a block: 16 float32 are one vector of 64 bytes, or two of 32.
WIDTH = 16
# The bytes of one array of a chunk [steps, states, lanes] of float32, of which a backward pass has
# a few, and the fewest and most steps of a chunk.
CHUNK_BYTES, MIN_CHUNK, MAX_CHUNK = 1 << 15, 16, 64


def chunk_steps(size: int) -> int:
    """The steps of a chunk, for N states: a power of two."""
    steps = MAX_CHUNK
    while steps > MIN_CHUNK and steps * size * WIDTH * 4 > CHUNK_BYTES:
        steps //= 2
    return steps


@dataclass(frozen=True)
class Access:
    """How a kernel reads or writes a leaf: its dtype in memory, and whether it varies along the
    axis and along the lanes (whether it does along the states, its shape says)."""

    dtype: torch.dtype
    time: bool = True
    lane: bool = True


@dataclass(frozen=True)
class ForwardKernel:
    """Everything that is a constant of one compiled forward kernel.

    first: whether the scan starts without a carry. initial: the state leaves whose carry is given.
    final: those that are returned.
    inputs: how each input leaf lies; None for one that is not read.
    """

    op: VectorOperator
    exclusive: bool
    first: bool
    initial: tuple[int, ...]
    final: tuple[int, ...]
    inputs: tuple[Access | None, ...]

    @property
    def leaves(self) -> list[tuple[str, int]]:
        """The tensors in the order in which the kernel takes them: (role, number)."""
        return [
            *(("input", k) for k in range(len(self.op.inputs))),
            *(("output", k) for k in range(len(self.op.outputs))),
            *(("init", k) for k in self.initial),
            *(("final", k) for k in self.final),
            *([("carries", 0)] if self.op.saves_carries else []),
        ]

    @property
    def carry(self) -> list[int]:
        return self.op.carry_parts(self.final)

    @functools.cached_property
    def used(self) -> frozenset[int]:
        """The parts of the inputs that a step reads."""
        width = self.op.width
        used = self.step(False).used_inputs
        if self.first:
            used |= self.step(True).used_inputs
        return frozenset(v - width for v in used if v >= width)

    def step(self, first: bool) -> Program:
        return self.op.step(first, self.exclusive, self.carry)


@dataclass(frozen=True)
class GradientAccess:
    """How a kernel writes the gradient of an input leaf. adds: it adds to an array that each worker
    has for itself."""

    dtype: torch.dtype
    time: bool
    lane: bool
    adds: bool


@dataclass(frozen=True)
class BackwardKernel:
    """Everything that is a constant of one compiled backward kernel.

    inputs, cotangents: how the input leaves and the cotangents of the outputs lie.
    gradients: how the gradients of the wanted leaves are written.
    ends: the state leaves whose gradient at init is written.
    """

    adjoint: VectorAdjoint
    inputs: tuple[Access | None, ...]
    cotangents: tuple[Access, ...]
    gradients: tuple[GradientAccess, ...]
    seed_dtypes: tuple[torch.dtype, ...]
    ends: tuple[int, ...]

    @property
    def op(self) -> VectorOperator:
        return self.adjoint.op

    @property
    def leaves(self) -> list[tuple[str, int]]:
        adjoint = self.adjoint
        return [
            *(("input", k) for k in range(len(self.op.inputs))),
            *(("cotangent", k) for k in adjoint.cotangents),
            ("carries", 0),
            *(("seed", k) for k in adjoint.seeded),
            *(("gradient", k) for k in adjoint.wanted),
            *(("end", k) for k in self.ends),
        ]

    @functools.cached_property
    def used(self) -> frozenset[int]:
        """The parts of the inputs that a step reads."""
        found: set[int] = set()
        for first in (False, True) if self.adjoint.first else (False,):
            step = backward_step(self.adjoint, first)
            found |= step.recomputed.used_inputs | step.pulled.used_inputs
        width, count = self.op.width, len(self.op.step_inputs)
        return frozenset(v - width for v in found if width <= v < count)


def carry_bytes(op: VectorOperator, carry: Sequence[int]) -> int:
    """The bytes of the carries of one block of lanes (struct Carry)."""
    kinds, total = part_dtypes(op.state), 0
    for c in carry:
        size = 4 if kinds[c] == "b1" else int(kinds[c][1:]) // 8
        count = WIDTH * (op.size if op.state_varies[c] else 1)
        total += -(-size * count // 64) * 64
    return max(total, 64)


AnyKernel = ForwardKernel | BackwardKernel
