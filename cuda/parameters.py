"""The parameters of a kernel: one table of fields, from which both `struct Params` in CUDA and the
bytes that a launch passes are made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .kernel import ROLES, CudaKernel

CODES = {"const char*": "q", "char*": "q", "Header*": "q", "u32*": "q", "i64": "q", "int": "i",
         "u32": "I"}  # fmt: skip
BYTES = {"q": 8, "i": 4, "I": 4}


@dataclass(frozen=True)
class Field:
    """A field of struct Params; `shape` is that of an array."""

    type: str
    name: str
    shape: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def code(self) -> str:
        """As in a format of `struct`."""
        return CODES[self.type]

    @property
    def text(self) -> str:
        """As in C++."""
        return f"{self.type} {self.name}{''.join(f'[{n}]' for n in self.shape)};"


def stride_fields(role: str) -> tuple[str, str, str]:
    """The names of the fields with the strides of a role's leaves: from step to step (for carries,
    from sequence to sequence), from channel to channel, along the outer dimensions."""
    along = "step" if role in ("input", "output") else "sequence"
    return f"{role}_{along}", f"{role}_lane", f"{role}_outer"


# The fields after the addresses of the leaves; filled in by a launch.
WORKSPACE = (
    Field("Header*", "header"), Field("char*", "slots"), Field("char*", "group_slots"),
    Field("u32*", "alarm"), Field("i64", "slot_bytes"),
)  # fmt: skip
# How tiles are assigned to blocks (`prepare.assemble`). The kernel divides by channel_blocks with a
# multiplication and a shift (`prepare.inverse`).
COUNTS = (
    *(Field("int", name) for name in
      ("chains", "tiles", "channel_blocks", "ranks", "rest", "radix", "groups")),
    Field("u32", "blocks_inverse"), Field("u32", "blocks_shift"),
)  # fmt: skip


# How the axis is cut into parts (`walk/parts_walk.cuh`).
PARTS = (
    *(Field("int", name) for name in
      ("parts", "warm", "trial", "residue", "distant", "distant_residue", "slow")),
    Field("i64", "part_steps"), Field("i64", "record_bytes"),
)  # fmt: skip


def address_fields(kernel: CudaKernel) -> Iterator[Field]:
    """The addresses of each role's leaves; one unused field for a role without leaves."""
    for role, leaves in zip(ROLES, kernel.pointers(), strict=True):
        pointer = "char*" if role in ("output", "final") else "const char*"
        yield Field(pointer, role, (max(len(leaves), 1),))
    if kernel.packed:
        yield Field("const char*", "offsets")
    if kernel.newton is not None:
        yield Field("char*", "report")


def shape_fields(kernel: CudaKernel) -> Iterator[Field]:
    """The fields that depend on shapes and strides only."""
    outer = max(kernel.outer, 1)
    yield from (Field("i64", "length"), Field("i64", "channels"))
    for role, leaves in zip(ROLES, kernel.pointers(), strict=True):
        n = max(len(leaves), 1)
        along, lane, far = stride_fields(role)
        yield from (Field("i64", along, (n,)), Field("i64", lane, (n,)))
        yield Field("i64", far, (n, outer))
    yield Field("int", "outer_size", (outer,))
    yield from COUNTS
    if kernel.in_parts:
        yield from PARTS
    if kernel.packed:
        yield Field("int", "sequences")


def fields(kernel: CudaKernel) -> list[Field]:
    """All of struct Params, in its order."""
    return [*address_fields(kernel), *WORKSPACE, *shape_fields(kernel)]


def struct_text(fields: Iterable[Field]) -> str:
    """struct Params in C++."""
    return "\n".join(["struct Params {", *(f"    {f.text}" for f in fields), "};"])


def struct_format(fields: Iterable[Field]) -> str:
    """struct Params as Python's `struct` packs it, with the padding that C++ puts in."""
    parts, at = ["<"], 0
    for field in fields:
        size = BYTES[field.code]
        parts.append(f"{-at % size}x{field.count}{field.code}")
        at += -at % size + field.count * size
    return "".join([*parts, f"{-at % 8}x"])


def shape_values(kernel: CudaKernel, values: Mapping[str, int | Sequence[int]]) -> list[int]:
    """The values of `shape_fields` in their order, from values by name; 0 for the strides of a role
    without leaves."""
    found: list[int] = []
    for field in shape_fields(kernel):
        value = values[field.name]
        numbers = [value] if isinstance(value, int) else list(value)
        numbers = numbers or [0] * field.count
        assert len(numbers) == field.count, field
        found += numbers
    return found
