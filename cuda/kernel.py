"""What one generated CUDA kernel is: the operator, its form and tile, how its tensors lie.

All of it is known when the kernel is compiled; lengths, counts, strides and addresses are in its
parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from ..operator import Operator, spans


@dataclass(frozen=True)
class LanesTile:
    """`lanes_scan.cuh`: main threads; channels per block and per thread; steps per thread; tiles in
    the ring; blocks that a multiprocessor is to hold."""

    threads: int
    block_channels: int
    channels: int
    items: int
    stages: int
    blocks: int = 1

    @property
    def steps(self) -> int:
        return self.threads * self.channels // self.block_channels * self.items


@dataclass(frozen=True)
class RowsTile:
    """`rows_scan.cuh`: main threads; steps per thread; tiles in the ring; steps per bulk copy; bulk
    copies in flight; tiles reduced ahead; blocks that a multiprocessor is to hold."""

    threads: int
    items: int
    stages: int
    chunk: int
    flight: int
    lead: int
    blocks: int = 1

    @property
    def steps(self) -> int:
        return self.threads * self.items


Tile = LanesTile | RowsTile
ROLES = ("input", "output", "init", "edge", "final")
Mode = Literal["BLOCK", "RELAY", "AHEAD"]


@dataclass(frozen=True)
class CudaLeaf:
    """How a leaf lies in memory: offsets of its components, in scalars, from its element's first;
    what its addresses are multiples of, in bytes; whether it is the same for all channels (or, in
    rows, for all steps)."""

    dtype: torch.dtype
    offsets: tuple[int, ...]
    align: int = 16
    one: bool = False


@dataclass(frozen=True)
class CudaKernel:
    """One generated kernel.

    mode: how the carry goes from tile to tile (`lanes_scan.cuh`, `rows_scan.cuh`). outer: how many
    outer dimensions are decoded from a row's index. init, final, ahead, edges: as in a
    `ScanProblem`. packed: sequences with offsets, told apart by marks (`steps.cuh`).
    """

    operator: Operator
    tile: Tile
    mode: Mode
    reverse: bool
    exclusive: bool
    outer: int
    init: tuple[int, ...] | None
    final: tuple[int, ...]
    ahead: tuple[int, ...]
    edges: tuple[int, ...]
    leaves: tuple[tuple[str, int, CudaLeaf], ...]
    packed: bool = False

    @property
    def is_lanes(self) -> bool:
        return isinstance(self.tile, LanesTile)

    @cached_property
    def total(self) -> list[int]:
        """The state components that an aggregate must hold."""
        return self.operator.total(self.final)

    @property
    def words(self) -> int:
        """The 32-bit words of a state."""
        kinds = self.operator.combine.output_dtypes
        return sum(word_counts(kinds[c] for c in self.total)) + self.packed

    @cached_property
    def leaf(self) -> dict[tuple[str, int], CudaLeaf]:
        return {(role, k): leaf for role, k, leaf in self.leaves}

    @cached_property
    def inputs(self) -> list[int]:
        """The input leaves that are read."""
        used = self.operator.used_inputs
        return [k for k, s in enumerate(spans(self.operator.inputs)) if any(c in used for c in s)]

    def numbers(self, role: str) -> list[int]:
        """The leaves of a role, in the order of the parameters."""
        return {
            "input": self.inputs,
            "output": list(range(len(self.operator.outputs))),
            "init": list(self.init or ()),
            "edge": [k for k in self.edges if k in self.inputs],
            "final": list(self.final),
        }[role]

    def pointers(self) -> list[list[tuple[str, int]]]:
        """The tensors of each role, in the order of the parameters; marks are the last input."""
        found = [[(role, k) for k in self.numbers(role)] for role in ROLES]
        found[0] += [("mark", 0)] if self.packed else []
        return found


def word_counts(kinds: Iterable[str]) -> tuple[int, ...]:
    """The 32-bit words of each component of a state, in registers and in status words."""
    return tuple(2 if kind in ("f64", "i64") else 1 for kind in kinds)


def slot_bytes(words: int) -> int:
    """A slot of status words that holds a state (`SLOT_BYTES` in status.cuh)."""
    return 8 if words == 1 else 16 * -(-words // 3)
