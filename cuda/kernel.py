"""What one generated CUDA kernel is: the operator, its form and tile, how its tensors lie.

All of it is known when the kernel is compiled; lengths, counts, strides and addresses are in its
parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from ..engines.base.layout import scalar_size
from ..program.operator import Operator, spans


@dataclass(frozen=True)
class LanesTile:
    """`lanes_scan.cuh`: main threads; channels per block and per thread; steps per thread; tiles in
    the ring; tiles reduced ahead; blocks that a multiprocessor is to hold."""

    threads: int
    block_channels: int
    channels: int
    items: int
    stages: int
    lead: int = 1
    blocks: int = 1

    @property
    def steps(self) -> int:
        return self.threads * self.channels // self.block_channels * self.items


@dataclass(frozen=True)
class RowsTile:
    """`rows_scan.cuh`: main threads; steps per thread; tiles in the ring; steps per bulk copy; bulk
    copies in flight; tiles reduced ahead; blocks that a multiprocessor is to hold; how many tiles
    more are reduced before a look at one begins."""

    threads: int
    items: int
    stages: int
    chunk: int
    flight: int
    lead: int
    blocks: int = 1
    late: int = 0

    @property
    def steps(self) -> int:
        return self.threads * self.items


Tile = LanesTile | RowsTile
LOOKBACK_WARPS = 2  # of rows_scan.cuh; four of them slow each other down
ROLES = ("input", "output", "init", "edge", "final")
Mode = Literal["SERIAL", "CHAINED", "LOOKBACK"]


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
    outer dimensions are decoded from a row's index. init, final: as in a `ScanProblem`. shifted:
    the inputs that are read one step further along the scan; boundaries: those of them with a
    tensor that is read where that step lies beyond the axis. packed: sequences with offsets, told
    apart by marks (`steps.cuh`).
    """

    operator: Operator
    tile: Tile
    mode: Mode
    reverse: bool
    exclusive: bool
    outer: int
    init: tuple[int, ...] | None
    final: tuple[int, ...]
    shifted: tuple[int, ...]
    boundaries: tuple[int, ...]
    leaves: tuple[tuple[str, int, CudaLeaf], ...]
    packed: bool = False

    @property
    def is_lanes(self) -> bool:
        return isinstance(self.tile, LanesTile)

    @cached_property
    def aggregate_components(self) -> list[int]:
        """The state components that an aggregate must hold."""
        return self.operator.total(self.final)

    @property
    def words(self) -> int:
        """The 32-bit words of a state."""
        kinds = self.operator.combine.output_dtypes
        return sum(word_counts(kinds[c] for c in self.aggregate_components)) + self.packed

    @cached_property
    def leaf(self) -> dict[tuple[str, int], CudaLeaf]:
        return {(role, k): leaf for role, k, leaf in self.leaves}

    @cached_property
    def inputs(self) -> list[int]:
        """The input leaves that are read."""
        used = self.operator.used_inputs
        return [k for k, s in enumerate(spans(self.operator.inputs)) if any(c in used for c in s)]

    def copies_boundary(self, k: int) -> bool:
        """Whether an input's boundary value is copied to where its step beyond the axis would be:
        in lanes that are no packed sequences, if its elements have the input's layout."""
        boundary, given = self.leaf.get(("edge", k)), self.leaf["input", k]
        alike = boundary is None or (
            (boundary.dtype, boundary.offsets) == (given.dtype, given.offsets)
        )
        return alike and self.is_lanes and not self.packed

    @property
    def shared_bytes(self) -> int:
        """SHARED_BYTES of `lanes_memory.cuh` and `rows_memory.cuh`, without compiling them."""
        return _lanes_bytes(self) if self.is_lanes else _rows_bytes(self)

    def numbers(self, role: str) -> list[int]:
        """The leaves of a role, in the order of the parameters."""
        return {
            "input": self.inputs,
            "output": list(range(len(self.operator.outputs))),
            "init": list(self.init or ()),
            "edge": [k for k in self.boundaries if k in self.inputs],
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


def _lanes_bytes(kernel: CudaKernel) -> int:
    tile = kernel.tile
    assert isinstance(tile, LanesTile)
    warps, ring, cells = tile.threads // 32, tile.lead + 1, []
    for leaf, scalars in _input_leaves(kernel):
        cell = (1 if leaf.one else tile.channels) * scalars * scalar_size(leaf.dtype)
        cells.append(_up(cell, 4) + 4 * (leaf.align < 4))
    # warp_states, group_prefix, tile_total; each begins at a multiple of 16.
    counts = (ring * warps, ring if kernel.mode == "LOOKBACK" else 1,
              ring if kernel.mode != "SERIAL" else 1)  # fmt: skip
    states = sum(_up(4 * kernel.words * tile.block_channels * n, 16) for n in counts)
    return _up(states, 128) + tile.stages * lanes_stage_bytes(tile, cells)


def lanes_stage_bytes(tile: LanesTile, cells: Iterable[int]) -> int:
    """STAGE_BYTES of `lanes_memory.cuh`, from the bytes of a thread's cell of each input."""
    columns = tile.block_channels // tile.channels
    groups, stage = tile.threads // columns, 0
    for cell in cells:
        row = columns * cell
        padding = (row - tile.items * row) % 128 if row < 128 else 0
        stage += _up(groups * (tile.items * row + padding), 128)
    return stage


def _rows_bytes(kernel: CudaKernel) -> int:
    tile = kernel.tile
    assert isinstance(tile, RowsTile)
    stage, replaceable = 0, []
    for leaf, scalars in _input_leaves(kernel):
        size = tile.steps * scalars * scalar_size(leaf.dtype)
        shifted = any(leaf is kernel.leaf["input", k] for k in kernel.shifted if k in kernel.inputs)
        aligned = leaf.align == 16 and not shifted and size % 16 == 0
        if not leaf.one:
            stage += _up(size + (0 if aligned else 32), 128)
            replaceable += [size] if aligned else []
    for k, out in enumerate(kernel.operator.outputs):
        leaf = kernel.leaf["output", k]
        size = tile.steps * out.components * scalar_size(leaf.dtype)
        aligned = leaf.align == 16 and size % 16 == 0
        # It takes the place of the k-th input of its size, if there is one.
        if not aligned or sum(r == size for r in replaceable) <= k:
            stage += _up(size + (0 if aligned else 32), 128)
    lookbacks = LOOKBACK_WARPS if kernel.mode == "LOOKBACK" else 1
    ring, warps = tile.lead + 1, tile.threads // 32
    gates = 8 * (tile.stages * (-(-tile.steps // tile.chunk) + 2) + lookbacks + ring)
    states = 4 * kernel.words * (ring * warps + lookbacks)
    return _up(_up(gates + states, 8), 128) + tile.stages * stage


def _input_leaves(kernel: CudaKernel) -> list[tuple[CudaLeaf, int]]:
    """What is read at every step, with the scalars of an element."""
    op = kernel.operator
    found = [(kernel.leaf["input", k], op.inputs[k].components) for k in kernel.inputs]
    return found + ([(kernel.leaf["mark", 0], 1)] if kernel.packed else [])


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def smaller(tile: Tile) -> Tile | None:
    """The next tile that needs less shared memory, if any."""
    if tile.stages > max(2, tile.lead + 1):
        return replace(tile, stages=tile.stages - 1)
    if tile.lead > 1:
        tile = replace(tile, stages=tile.stages - 1, lead=tile.lead - 1)
        if isinstance(tile, RowsTile):
            return replace(tile, late=min(tile.late, tile.lead - 1))
        return tile
    if tile.items > 1:
        return replace(tile, items=tile.items // 2)
    if isinstance(tile, RowsTile) and tile.threads > 32:
        return replace(tile, threads=max(32, tile.threads // 64 * 32))
    return None
