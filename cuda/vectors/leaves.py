"""The leaves of a step as the kernels read them, and how they lie in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...engines.base.vectors.kernel import CHUNK, STRIDES, VectorKernel, VectorPort
from ...program.dtypes import CPP_MEMORY, STORAGE_ONLY
from ...program.operator import Leaf
from ...program.vectors.vector_operator import parts
from .tile import VectorTile


@dataclass(frozen=True)
class LeafPart:
    """One part of a leaf (complex leaves have two) as an input of a step's program. kind: its dtype
    in the program."""

    role: str
    k: int
    part: int
    kind: str
    port: VectorPort

    @property
    def name(self) -> str:
        """Of its pointer in the kernel."""
        return f"{self.role}{self.k}"

    @property
    def tag(self) -> str:
        """Of variables that hold its value."""
        return f"{self.role[0]}{self.k}_{self.part}"

    @property
    def memory(self) -> str:
        return CPP_MEMORY[self.port.dtype]

    @property
    def itemsize(self) -> int:
        return self.port.dtype.itemsize // (2 if self.port.dtype.is_complex else 1)

    @property
    def is_staged(self) -> bool:
        """Whether it goes through shared memory. It does not if it is equal at all steps, or if
        each value is read by one thread only: it has one for every step, lane and state."""
        return self.port.varies_in_time and not (self.port.lane and self.port.state)


def leaf_parts(role: str, leaves: Sequence[Leaf], kernel: VectorKernel) -> list[LeafPart | None]:
    """None for leaves that are not given."""
    found: list[LeafPart | None] = []
    for k, leaf in enumerate(leaves):
        port = kernel.port.get((role, k))
        for n in range(parts(leaf)):
            found.append(None if port is None else LeafPart(role, k, n, leaf.scalar, port))
    return found


@dataclass(frozen=True)
class Staged:
    """A leaf's region in a stage: a row of `items` for each step of the tile. at: its place in the
    stage. width: the bytes that can be copied at a time; the leaf's address, its strides and the
    bytes of a row are multiples of it. neighbours: how many adjacent items of a row the threads of
    a warp read at once, while others of the warp read other rows; 1 if all read the same row.

    wide: None, or for rows of 16 bits that are widened after they arrived, where the widened rows
    are: their place in a region of shared memory of which there are two, for tiles in turn.
    """

    leaf: LeafPart
    items: int
    width: int
    at: int
    neighbours: int
    wide: int | None = None

    @property
    def pitch(self) -> int:
        """The bytes from row to row. Where several rows are read at once, an odd multiple of what
        is read of each, so that they lie in different banks."""
        unit = max(16, self.neighbours * self.leaf.itemsize)
        rows = -(-self.items * self.leaf.itemsize // unit)
        return unit * (rows | 1 if self.neighbours > 1 else rows)

    @property
    def size(self) -> int:
        return self.pitch * CHUNK

    @property
    def wide_pitch(self) -> int:
        """The bytes from row to row of those that are widened."""
        return -(-self.items * WIDE // 16) * 16

    @property
    def wide_size(self) -> int:
        return self.wide_pitch * CHUNK

    @property
    def copied(self) -> int:
        """The items that are copied at a time. Rows that are widened are copied in halves of 16
        bytes, so that more threads convert them."""
        most = 16 if self.wide is None else 8
        return max(min(self.width, most) // self.leaf.itemsize, 1)


WIDE = 4  # bytes of an item that is widened


def is_narrow(leaf: LeafPart) -> bool:
    """Whether it has 16 bits, and a value for each step and lane, but not for each state."""
    port = leaf.port
    return port.dtype in STORAGE_ONLY and port.varies_in_time and port.lane and not port.state


def is_widened(leaf: LeafPart, tile: VectorTile) -> bool:
    """Whether rows of 16 bits are widened once for a tile. Otherwise every thread that reads a row
    converts it for itself."""
    return tile.widens and leaf.port.dtype in STORAGE_ONLY and leaf.port.state


def width_of(
    leaf: LeafPart, values: dict[tuple[str, int, str], int], alignment: int, present: int
) -> int:
    """The bytes that can be copied at a time, for a leaf with these strides, whose address has
    this alignment, with rows of `present` items."""
    size, scalars = leaf.itemsize, 2 if leaf.port.dtype.is_complex else 1
    along = "state" if leaf.port.state else "lane"
    strides = {
        which: values.get((leaf.role, leaf.k, which), 0)
        for which in (*STRIDES, *(w for w, _ in leaf.port.strides if w.startswith("outer")))
    }
    if scalars > 1 or strides.pop(along) != 1:
        return size
    fixed = [alignment, present * size, *(s * size for s in strides.values())]
    return next((n for n in (16, 8, 4) if n > size and all(f % n == 0 for f in fixed)), size)
