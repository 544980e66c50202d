"""`ForwardKernel` and `BackwardKernel`: everything that is a constant of one compiled kernel.

A program, or a block of threads, has one chain for each of its lanes, and walks them step by step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from ....program.vectors.vector_adjoint import VectorAdjoint
from ....program.vectors.vector_operator import VectorOperator, part_dtypes

# The strides of a leaf by name: along the axis, from lane to lane, from state to state, from one
# packed sequence to the next, from one block of lanes to the next; then `outer0`, ….
STRIDES = ("time", "lane", "state", "sequence", "block")


# The steps between two saved carries: they take 1/32 of the memory that all states would.
CHUNK = 32
# Carries have memory for whole blocks of so many lanes, whatever the engine's blocks are.
CARRY_LANES = 32


class VectorTile(Protocol):
    """The part of a chain's work that one program does at a time. lanes, states: its chains, and
    the states of each, of which some may be padding."""

    @property
    def lanes(self) -> int: ...
    @property
    def states(self) -> int: ...


@dataclass(frozen=True)
class VectorPort:
    """How a leaf lies in memory.

    strides: in scalars, by name; 0 and 1 are written into the kernel, None is an argument.
    lane, state: whether it has an element for each lane, and for each state.
    """

    dtype: torch.dtype
    strides: tuple[tuple[str, int | None], ...]
    lane: bool
    state: bool

    @cached_property
    def by_name(self) -> dict[str, int | None]:
        return dict(self.strides)

    @property
    def varies_in_time(self) -> bool:
        return self.by_name.get("time", 0) != 0


@dataclass(frozen=True)
class VectorKernel:
    """What forward and backward kernels have in common.

    outer: the number of batch dimensions beside the axis and the lanes. packed: sequences with
    offsets. wide: 64-bit index arithmetic. first: whether the scan starts without a carry.
    carry: the parts of the state that are carried from step to step.
    cut: whether the axis is cut into segments, each with programs of its own. A launch has the
    programs of `segments` of them, from number `first_segment` on.
    """

    tile: Any  # a VectorTile
    reverse: bool
    outer: int
    packed: bool
    wide: bool
    first: bool
    carry: tuple[int, ...]
    ports: tuple[tuple[str, int, VectorPort], ...]
    cut: bool = field(default=False, kw_only=True)

    @property
    def vectors(self) -> VectorOperator:
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Of the operator of the scan, or of its backward pass."""
        raise NotImplementedError

    @property
    def walks(self) -> bool:
        """Whether the programs walk steps. Two kinds do not where the axis is cut, and combine the
        totals of the segments: a reduction, and a backward pass for the gradient of init alone."""
        return True

    @cached_property
    def port(self) -> dict[tuple[str, int], VectorPort]:
        return {(role, k): port for role, k, port in self.ports}

    @property
    def pointers(self) -> list[tuple[str, int]]:
        """The tensors, by role and number, in the order of the arguments."""
        return [(role, k) for role, k, _ in self.ports]

    def strides(self) -> Iterable[tuple[str, int, str]]:
        """The strides that are arguments, in their order: (role, number, which)."""
        for role, k, port in self.ports:
            for which, stride in port.strides:
                if stride is None:
                    yield role, k, which

    def sizes(self) -> list[str]:
        """The other integer arguments, in their order."""
        names = ["length", "lanes", *(f"size{d}" for d in range(1, self.outer))]
        names += ["sequences"] if self.packed else []
        names += ["first_segment", "segments", "segment_chunks"] if self.cut else []
        return [*names, "rows", "padded"]

    def part_size(self, part: int) -> int:
        """The numbers that one part of a lane's carry takes in memory."""
        return self.tile.states if self.vectors.state_varies[part] else 1

    def carry_size(self, parts: Iterable[int]) -> int:
        """The numbers that these parts of a lane's carry take in memory."""
        return sum(self.part_size(c) for c in parts)

    @property
    def carry_dtype(self) -> torch.dtype:
        """Of the tensors that hold carries: the bits of each value as an integer."""
        return carry_dtype(self.vectors)


def padded(lanes: int) -> int:
    """How many lanes have memory for their carries."""
    return -(-lanes // CARRY_LANES) * CARRY_LANES


def padded_states(size: int) -> int:
    """How many states have memory for their carries, for N states: the states of any tile."""
    return 1 << (size - 1).bit_length()


def carry_dtype(op: VectorOperator) -> torch.dtype:
    """Of the tensors that hold the bits of carries, and of sums of gradients, which have the dtypes
    of the inputs."""
    kinds = [*part_dtypes(op.state), *(leaf.scalar for leaf in op.inputs if leaf.scalar == "f64")]
    return torch.int64 if any(kind.endswith("64") for kind in kinds) else torch.int32


@dataclass(frozen=True)
class ForwardKernel(VectorKernel):
    """One generated forward kernel. initial: the state leaves whose carry is given; final: those
    that are returned."""

    operator: VectorOperator
    exclusive: bool
    initial: tuple[int, ...]
    final: tuple[int, ...]

    @property
    def vectors(self) -> VectorOperator:
        return self.operator

    @property
    def walks(self) -> bool:
        return not (self.cut and self.operator.is_reduction)

    @property
    def name(self) -> str:
        return self.operator.name


@dataclass(frozen=True)
class BackwardKernel(VectorKernel):
    """One generated backward kernel. ends: the state leaves whose gradient at init is written."""

    operator: VectorAdjoint
    ends: tuple[int, ...]

    @property
    def walks(self) -> bool:
        return not (self.cut and not self.operator.wanted)

    @property
    def vectors(self) -> VectorOperator:
        return self.operator.op

    @property
    def name(self) -> str:
        return self.operator.name
