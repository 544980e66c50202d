"""What one generated Triton kernel is: the operator, its tile, and how its tensors lie.

All of it is known when the kernel is compiled; lengths, counts and long strides are arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from ...program.operator import Operator

Cut = Literal["whole", "totals", "rescan", "lookback"]
LOOKBACK_GROUP = 32  # tiles whose totals are combined together in a look-back


@dataclass(frozen=True)
class Tile:
    """The part of its chains that a program works on in one tile iteration.

    `chains` scans lie side by side; each has `segments` × `items` steps here.
    Each of the `segments` is `items` consecutive steps that one thread combines in sequence; the
    segments are combined by `tl.associative_scan`. segments = 1: no communication at all.
    items = 1: a plain tile scan. `prefetch` loads the inputs of the next iteration before the work
    of this one. `stages`: how many iterations Triton's pipeline loads ahead (0: no pipeline).
    `masked`: loads have masks even where all tiles are full, which some kernels are faster with.
    """

    chains: int
    segments: int
    items: int
    warps: int
    prefetch: bool = False
    stages: int = 0
    masked: bool = False

    @property
    def steps(self) -> int:
        return self.segments * self.items


@dataclass(frozen=True)
class Port:
    """How a leaf lies in memory.

    Strides are in scalars: 0, 1 and 2 are written into the kernel, None is an argument. `offsets`
    are the distances of the components of an element from the first.
    """

    dtype: torch.dtype
    offsets: tuple[int, ...]
    step: int | None
    lane: int | None
    outer: tuple[int | None, ...]


@dataclass(frozen=True)
class TritonKernel:
    """One generated kernel.

    lanes: chains lie side by side in memory (the axis is strided); else each is a row.
    single: the axis fits in one tile. outer: how many outer dimensions are decoded from the index.
    init, final, shifted, boundary: as in a `ScanSpec`. packed: sequences with offsets.
    cut: the axis is whole, or in chunks of which `totals` computes the carries and `rescan` the
    outputs; with `lookback` each chunk is a tile, whose program waits for those before it. wide:
    64-bit index arithmetic. full: all tiles of lanes are full, and nothing is masked.
    ports: (role, number, port). Roles: input, output, init, final, boundary, of which the number is
    that of a leaf; and, for single components of chunk carries, `before` (all chunks up to this
    one) and `after` (this chunk's total).
    """

    operator: Operator
    tile: Tile
    lanes: bool
    single: bool
    reverse: bool
    exclusive: bool
    outer: int
    init: tuple[int, ...] | None
    final: tuple[int, ...]
    shifted: tuple[int, ...]
    boundary: tuple[int, ...]
    ports: tuple[tuple[str, int, Port], ...]
    packed: bool = False
    cut: Cut = "whole"
    wide: bool = False
    full: bool = False

    @property
    def one_tile(self) -> bool:
        """Whether a program has one tile iteration."""
        return self.single or self.cut == "lookback"

    @cached_property
    def aggregate_components(self) -> list[int]:
        """The state components that the aggregate of several steps must hold."""
        return self.operator.aggregate_components(self.final)

    @cached_property
    def carry_components(self) -> list[int]:
        """The state components that a chain carries from step to step."""
        if self.cut == "totals":
            return self.aggregate_components
        return self.operator.carry_components(self.final)

    @property
    def starts_from_carry(self) -> bool:
        """Whether every chain has a carry before its first step."""
        return self.init is not None and self.cut != "totals"

    @cached_property
    def port(self) -> dict[tuple[str, int], Port]:
        return {(role, k): port for role, k, port in self.ports}

    def strides(self) -> Iterable[tuple[str, int, str]]:
        """The strides that are arguments, in their order: (role, number, which)."""
        for role, k, port in self.ports:
            if role in ("input", "output") and port.step is None:
                yield role, k, "step"
            if self.lanes and port.lane is None:
                yield role, k, "lane"
            for d, stride in enumerate(port.outer):
                if stride is None:
                    yield role, k, f"outer{d}"
            if self.packed and role in ("init", "final", "boundary"):
                yield role, k, "sequence"

    def sizes(self) -> list[str]:
        """The other integer arguments, in their order."""
        names = ["length", "lanes" if self.lanes else "chains"]
        names.extend(f"size{d}" for d in range(1, self.outer))
        if self.cut != "whole":
            names.extend(["chunks", "chunk_length"])
        elif self.packed:
            names.append("sequences")
        return names

    def tables(self) -> list[str]:
        """The integer tensors that say where sequences and chunks begin."""
        if self.cut == "lookback":
            return ["flags"]
        if not self.packed:
            return []
        return ["offsets"] if self.cut == "whole" else ["offsets", "chunk_sequence", "chunk_first"]
