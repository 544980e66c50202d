"""`CudaKernel`, the key of one generated CUDA kernel: operator, tile, mode, layout of its leaves;
and the layout of its shared memory.

All of this is constant when the kernel is compiled. Lengths, counts, strides and addresses are
parameters of a launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from ..engines.base.layout import scalar_size
from ..engines.base.scan_spec import NewtonOptions
from ..program.cpp_and_triton_expressions import CPP
from ..program.dtypes import EXACT_DTYPES
from ..program.operator import Operator, spans


@dataclass(frozen=True)
class LanesTile:
    """The tile of `lanes_scan.cuh`.

    threads: main threads.
    block_channels, channels: channels per block and per thread.
    items: steps per thread.
    stages: tiles in the ring.
    lead: tiles that are reduced before the oldest of them is scanned.
    blocks: blocks per multiprocessor that the compiler must leave registers for.
    least: bytes of shared memory that a block takes, also if it needs less.
    """

    threads: int
    block_channels: int
    channels: int
    items: int
    stages: int
    lead: int = 1
    blocks: int = 1
    least: int = 0

    @property
    def steps(self) -> int:
        return self.threads * self.channels // self.block_channels * self.items


@dataclass(frozen=True)
class RowsTile:
    """The tile of `rows_scan.cuh`.

    threads, items, stages, lead, blocks: as in `LanesTile`.
    chunk: steps per bulk copy.
    flight: bulk copies in flight.
    late: the look-back of tile i begins when tile i + late has been reduced.
    """

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
LOOKBACK_WARPS = 2  # look-back warps per block in rows_scan.cuh; four were slower
ROLES = ("input", "output", "init", "boundary", "final")
Mode = Literal["SERIAL", "CHAINED", "LOOKBACK", "WALKED", "NEWTON"]


@dataclass(frozen=True)
class CudaLeaf:
    """How a leaf lies in memory.

    offsets: from the first component of an element to each of its components, in scalars.
    align: a power of two that divides its addresses and strides, in bytes, at most 16.
    one: whether all channels (in rows: all steps) read the same element.
    wide: of a walk, whether every row of its channels begins at a multiple of 16 bytes, so that it
        can be copied in pieces of 16.
    still: of a walk, whether all steps read the same element.
    """

    dtype: torch.dtype
    offsets: tuple[int, ...]
    align: int = 16
    one: bool = False
    wide: bool = False
    still: bool = False


@dataclass(frozen=True)
class CudaKernel:
    """One generated kernel.

    mode: how the carry goes from tile to tile (`lanes_scan.cuh`, `rows_scan.cuh`), or WALKED:
        each thread walks along its chains (`walk/lanes_walk.cuh`), or NEWTON: a chain is solved in
        windows (`newton/newton_windows.cuh`).
    outer: the number of outer dimensions, which are computed from a row's index.
    init: `ScanSpec.initial_leaves`.
    final, shifted, boundary: as in a `ScanSpec`.
    packed: whether the axis is packed sequences, whose starts and ends the kernel finds in their
        offsets (`boundaries.cuh`).
    round: in a reverse scan of one row: tiles begin at multiples of so many steps.
    in_parts: of a walk, whether the axis is cut into parts (`walk/parts_walk.cuh`).
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
    boundary: tuple[int, ...]
    leaves: tuple[tuple[str, int, CudaLeaf], ...]
    packed: bool = False
    newton: NewtonOptions | None = None
    round: int = 1
    in_parts: bool = False

    @property
    def is_lanes(self) -> bool:
        return isinstance(self.tile, LanesTile)

    @cached_property
    def aggregate_components(self) -> list[int]:
        """The state components that an aggregate must hold."""
        return self.operator.aggregate_components(self.final)

    @property
    def cuts(self) -> bool:
        """Whether states have the flag `cut` of packed sequences. A walk enters each by itself."""
        return self.packed and self.mode != "WALKED"

    @property
    def numbered(self) -> bool:
        """Whether numbers of packed sequences are needed, for tensors with an entry for each."""
        return self.cuts and any(map(self.numbers, ("init", "boundary", "final")))

    @property
    def words(self) -> int:
        """The number of 32-bit words of a state; one of them is the flag `cut`."""
        kinds = self.operator.combine.output_dtypes
        return sum(word_counts(kinds[c] for c in self.aggregate_components)) + self.cuts

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
        in lanes that are no packed sequences, if its elements have the input's layout. A walk reads
        it where it is needed."""
        boundary, given = self.leaf.get(("boundary", k)), self.leaf["input", k]
        alike = boundary is None or (
            (boundary.dtype, boundary.offsets) == (given.dtype, given.offsets)
        )
        return alike and self.is_lanes and not self.packed and self.mode != "WALKED"

    @cached_property
    def memory(self) -> SharedMemory:
        """The layout of a block's shared memory."""
        if self.mode == "NEWTON":
            assert isinstance(self.tile, LanesTile)
            return newton_memory(self.operator, self.tile)
        return lanes_memory(self) if self.is_lanes else rows_memory(self)

    @property
    def shared_bytes(self) -> int:
        return self.memory.size

    def numbers(self, role: str) -> list[int]:
        """The leaf numbers of a role, in the order of the parameters."""
        return {
            "input": self.inputs,
            "output": list(range(len(self.operator.outputs))),
            "init": list(self.init or ()),
            "boundary": [k for k in self.boundary if k in self.inputs],
            "final": list(self.final),
        }[role]

    def pointers(self) -> list[list[tuple[str, int]]]:
        """For each of ROLES, the names of its tensors in the order of the parameters."""
        return [[(role, k) for k in self.numbers(role)] for role in ROLES]


def word_counts(kinds: Iterable[str]) -> tuple[int, ...]:
    """The number of 32-bit words of each component of a state."""
    return tuple(2 if kind in ("f64", "i64") else 1 for kind in kinds)


def word_statements(fields: Sequence[str], kinds: Sequence[str]) -> tuple[list[str], list[str]]:
    """The C++ statements that convert these fields of a state `s` to 32-bit words `w`, and back."""
    packing, unpacking, at = [], [], 0
    for name, kind, count in zip(fields, kinds, word_counts(kinds), strict=True):
        if count == 2:
            packing.append(f"__builtin_memcpy(w + {at}, &s.{name}, 8);")
            unpacking.append(f"__builtin_memcpy(&s.{name}, w + {at}, 8);")
        elif kind == "f32":
            packing.append(f"w[{at}] = bits_of(s.{name});")
            unpacking.append(f"s.{name} = float_of(w[{at}]);")
        else:
            packing.append(f"w[{at}] = (uint32_t)s.{name};")
            unpacking.append(f"s.{name} = ({CPP.types[kind]})w[{at}];")
        at += count
    return packing, unpacking


def slot_bytes(words: int) -> int:
    """The bytes of a slot of status words for a state of so many words (`SLOT_BYTES` in
    status_and_watchdog.cuh)."""
    return 8 if words == 1 else 16 * -(-words // 3)


@dataclass(frozen=True)
class SharedArray:
    """A field of struct Shared, through which the roles of a block exchange data."""

    type: str
    name: str
    shape: tuple[int, ...]
    align: int

    @property
    def size(self) -> int:
        return {"u32": 4, "Gate": 8}[self.type] * math.prod(self.shape)

    @property
    def text(self) -> str:
        """As in C++."""
        dimensions = "".join(f"[{n}]" for n in self.shape)
        return f"alignas({self.align}) {self.type} {self.name}{dimensions};"


@dataclass(frozen=True)
class Region:
    """A leaf's part of a stage of the ring.

    at, size: its first byte and its bytes.
    group: in lanes, the bytes from one group of steps to the next.
    aligned: in rows, whether the cells of every tile begin at a multiple of 16 bytes.
    """

    at: int
    size: int
    group: int = 0
    aligned: bool = False


@dataclass(frozen=True)
class SharedMemory:
    """A block's shared memory: struct Shared (`arrays`), then the ring. source.py generates its C++
    from this."""

    arrays: tuple[SharedArray, ...]
    inputs: tuple[Region, ...]
    outputs: tuple[Region, ...]
    stages: int
    least: int = 0  # bytes

    @cached_property
    def ring_at(self) -> int:
        at = 0
        for array in self.arrays:
            at = _up(at, array.align) + array.size
        return _up(at, 128)

    @cached_property
    def stage_bytes(self) -> int:
        return max((region.at + region.size for region in (*self.inputs, *self.outputs)), default=0)

    @property
    def size(self) -> int:
        return max(self.least, self.ring_at + self.stages * self.stage_bytes)


def lanes_memory(kernel: CudaKernel) -> SharedMemory:
    """The shared memory of `lanes_scan.cuh`."""
    tile = kernel.tile
    assert isinstance(tile, LanesTile)
    ring, state = tile.lead + 1, (kernel.words, tile.block_channels)
    arrays: tuple[SharedArray, ...] = (SharedArray("u32", "unused", (1,), 4),)  # no empty struct
    if kernel.mode != "WALKED":
        arrays = lanes_arrays(kernel, tile, ring, state)
    regions, at = [], 0
    for leaf, scalars, _ in _input_leaves(kernel):
        cell = (1 if leaf.one else tile.channels) * scalars * scalar_size(leaf.dtype)
        if not leaf.wide:
            cell = _up(cell, 4) + 4 * (leaf.align < 4)
        group, size = (0, 0) if leaf.still else lanes_region(tile, cell)
        regions.append(Region(at, size, group))
        at += size
    return SharedMemory(arrays, tuple(regions), (), tile.stages, tile.least)


# Words of a message between warps: a slope of four numbers by four, four times four numbers, and
# flags. A multiple of four, and no multiple of eight: messages of several chains are in different
# banks.
MESSAGE_WORDS = 36


def numbers_of(op: Operator) -> list[int]:
    """The state components that a step changes, in order."""
    moving = range(len(op.state) - len(op.inputs) - len(op.constant))
    state = spans(op.state)
    return [c for k in moving for c in state[k]]


def raw_words(op: Operator) -> int:
    """32-bit words of the inputs of a step that the operator reads."""
    return sum(words_of(op.lift.inputs[c]) for c in op.used_inputs)


def words_of(kind: str) -> int:
    return -(-scalar_size(EXACT_DTYPES[kind]) // 4)


def newton_plane(tile: LanesTile) -> int:
    """Words of a plane of `steps`. One step of padding per thread lets the threads of a warp use
    different banks."""
    return tile.threads * (tile.items + newton_padding(tile))


def newton_padding(tile: LanesTile) -> int:
    return 1 - tile.items % 2


def newton_memory(op: Operator, tile: LanesTile) -> SharedMemory:
    """The shared memory of `newton/newton_windows.cuh`."""
    shape = 2, tile.threads // 32, tile.block_channels, MESSAGE_WORDS
    words = raw_words(op) + len(numbers_of(op))
    arrays = (
        SharedArray("u32", "messages", shape, 16),  # two that take turns, of each warp
        # Word by word, the inputs of all steps of a window and the states after them.
        SharedArray("u32", "steps", (words * newton_plane(tile),), 16),
    )
    return SharedMemory(arrays, (), (), 0)


def newton_bytes(op: Operator, tile: LanesTile) -> int:
    return newton_memory(op, tile).size


def lanes_arrays(
    kernel: CudaKernel, tile: LanesTile, ring: int, state: tuple[int, int]
) -> tuple[SharedArray, ...]:
    """The arrays through which the roles of `lanes_scan.cuh` exchange states."""
    return (
        # The total of each warp of a tile; later the state before the warp.
        SharedArray("u32", "warp_states", (ring, tile.threads // 32, *state), 16),
        # The product of the earlier tiles of the group.
        SharedArray("u32", "group_prefix", (ring if kernel.mode == "LOOKBACK" else 1, *state), 16),
        SharedArray("u32", "tile_total", (ring if kernel.mode != "SERIAL" else 1, *state), 16),
        *_boundary_arrays(kernel, tile.lead + 3),
    )


def lanes_region(tile: LanesTile, cell: int) -> tuple[int, int]:
    """From the bytes of a thread's cell of a leaf: the bytes of a group of steps, and of the leaf's
    region. The padding of a group lets the groups of a warp read different banks."""
    columns = tile.block_channels // tile.channels
    row = columns * cell
    group = tile.items * row + ((row - tile.items * row) % 128 if row < 128 else 0)
    return group, _up(tile.threads // columns * group, 128)


def lanes_stage_bytes(tile: LanesTile, cells: Iterable[int]) -> int:
    """The bytes of a stage, from the bytes of a thread's cell of each input."""
    return sum(lanes_region(tile, cell)[1] for cell in cells)


def rows_memory(kernel: CudaKernel) -> SharedMemory:
    """The shared memory of `rows_scan.cuh`."""
    tile = kernel.tile
    assert isinstance(tile, RowsTile)
    ring, warps = tile.lead + 1, tile.threads // 32
    lookbacks = LOOKBACK_WARPS if kernel.mode == "LOOKBACK" else 1
    arrays = (
        # Gates: a chunk has arrived; a tile's outputs are written; a stage is stored.
        SharedArray("Gate", "full", (tile.stages * -(-tile.steps // tile.chunk),), 8),
        SharedArray("Gate", "done", (tile.stages,), 8),
        SharedArray("Gate", "vacant", (tile.stages,), 8),
        # Gates: a look-back warp has handed its prefix on; a tile's warp totals are scanned.
        SharedArray("Gate", "handed", (lookbacks,), 8),
        SharedArray("Gate", "scanned", (ring,), 8),
        # Gates: the bits of a tile's boundaries are written.
        *([SharedArray("Gate", "marked", (tile.stages,), 8)] if kernel.packed else []),
        # The total of each warp of a tile; later the state before the warp.
        SharedArray("u32", "warp_states", (ring, warps, kernel.words), 4),
        # The prefix that each look-back warp found last.
        SharedArray("u32", "prefix", (lookbacks, kernel.words), 4),
        *_boundary_arrays(kernel, tile.stages),
    )
    inputs, outputs, at = [], [], 0
    replaceable: dict[int, list[int]] = {}
    for leaf, scalars, shifted in _input_leaves(kernel):
        size = tile.steps * scalars * scalar_size(leaf.dtype)
        aligned = leaf.align == 16 and not shifted and size % 16 == 0
        inputs.append(Region(at, 0 if leaf.one else _rows_region(size, aligned), aligned=aligned))
        if aligned and not leaf.one:
            replaceable.setdefault(size, []).append(at)
        at += inputs[-1].size
    for k, out in enumerate(kernel.operator.outputs):
        leaf = kernel.leaf["output", k]
        size = tile.steps * out.components * scalar_size(leaf.dtype)
        aligned = leaf.align == 16 and size % 16 == 0
        # Outputs overwrite aligned inputs of the same size: a thread writes the cells it has read.
        places = replaceable.get(size, []) if aligned else []
        own = 0 if k < len(places) else _rows_region(size, aligned)
        outputs.append(Region(at if own else places[k], own, aligned=aligned))
        at += own
    return SharedMemory(arrays, tuple(inputs), tuple(outputs), tile.stages)


def _rows_region(size: int, aligned: bool) -> int:
    """The bytes of a region. With an unaligned tile, up to 15 bytes before it and 16 after it are
    copied too."""
    return _up(size + (0 if aligned else 32), 128)


def _input_leaves(kernel: CudaKernel) -> list[tuple[CudaLeaf, int, bool]]:
    """The leaves that are read at every step, each with the scalars of an element and whether it is
    shifted."""
    inputs = kernel.operator.inputs
    return [
        (kernel.leaf["input", k], inputs[k].components, k in kernel.shifted) for k in kernel.inputs
    ]


def _boundary_arrays(kernel: CudaKernel, places: int) -> tuple[SharedArray, ...]:
    """What `boundaries.cuh` writes for so many tiles: a bit per position and one after the last,
    with a word that is read beyond them; and which entries of the offsets the bits stand for."""
    if not kernel.packed:
        return ()
    words = boundary_words(kernel) * (3 if kernel.numbered else 1)
    return (SharedArray("u32", "boundaries", (places, words), 16),)


def boundary_words(kernel: CudaKernel) -> int:
    """The words of a tile's bits (BOUNDARY_WORDS), which are cleared in fours."""
    return _up(kernel.tile.steps // 32 + 2, 4)


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def smaller(tile: Tile) -> Tile | None:
    """The next smaller tile, which needs less shared memory; None after the smallest."""
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
