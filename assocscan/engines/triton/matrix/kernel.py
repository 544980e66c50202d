"""What one generated kernel over matrices is: its operator, its tile, and how its tensors lie.

The counterpart of `TritonKernel` for a `MatrixOperator`: one program is one chain, a leaf is a
tile. All of it is known when the kernel is compiled; lengths, counts and strides are arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from ....program.matrix_operator import MatrixOperator
from ..kernel import Tile

Start = Literal["given", "fresh", "either"]
# Roles of leaves: input, output, init, identity, final; besides, `fresh` (one byte per sequence)
# and `scratch` (what a program keeps in memory).


@dataclass(frozen=True)
class TilePort:
    """How a leaf of matrices or vectors lies in memory.

    Strides: 0 and 1 are written into the kernel, None is an argument. `element` are those of the
    element's own dimensions.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    element: tuple[int | None, ...]
    step: int | None
    outer: tuple[int | None, ...]


@dataclass(frozen=True)
class MatrixKernel:
    """One generated kernel.

    slice: products over more terms than this are summed slice by slice, their operands read from
    memory (0: never). start: a chain starts from `init`, from its first element, or from either,
    as the table `fresh` says for its sequence. fills: the identity is read where nothing was
    combined. packed: sequences with offsets. wide: 64-bit index arithmetic.
    """

    operator: MatrixOperator
    tile: Tile
    slice: int
    reverse: bool
    exclusive: bool
    outer: int
    start: Start
    fills: bool
    final: tuple[int, ...]
    ports: tuple[tuple[str, int, TilePort], ...]
    packed: bool
    wide: bool

    @cached_property
    def carry_leaves(self) -> tuple[int, ...]:
        """The state leaves that a chain carries from step to step."""
        return self.operator.carry_leaves(self.final)

    @cached_property
    def needed(self) -> frozenset[int]:
        """The values of `combine` that the carried leaves depend on."""
        return self.operator.combine.needed(self.carry_leaves)

    @cached_property
    def port(self) -> dict[tuple[str, int], TilePort]:
        return {(role, k): port for role, k, port in self.ports}

    @property
    def pointers(self) -> list[tuple[str, int]]:
        """The tensors, by role and number, in the order of the arguments."""
        names = [(role, k) for role, k, _ in self.ports]
        if self.start == "either":
            names.append(("fresh", 0))
        if self.scratch:
            names.append(("scratch", 0))
        return names

    def strides(self) -> Iterable[tuple[str, int, str]]:
        """The strides that are arguments, in their order: (role, number, which)."""
        for role, k, port in self.ports:
            for d, stride in enumerate(port.element):
                if stride is None:
                    yield role, k, f"element{d}"
            if role in ("input", "output") and port.step is None:
                yield role, k, "step"
            for d, stride in enumerate(port.outer):
                if stride is None:
                    yield role, k, f"outer{d}"
            if self.packed and role in ("init", "final"):
                yield role, k, "sequence"

    def sizes(self) -> list[str]:
        """The other integer arguments, in their order."""
        names = ["length", *(f"size{d}" for d in range(1, self.outer))]
        return [*names, "sequences"] if self.packed else names

    def is_sliced(self, value: int) -> bool:
        """Whether a value is a product that is summed slice by slice."""
        program = self.operator.combine
        if value < len(program.inputs):
            return False
        step = program.steps[value - len(program.inputs)]
        return step.op == "dot" and 0 < self.slice < program.shapes[step.arguments[0]][1]

    def factor(self, value: int) -> tuple[int, bool]:
        """A factor of a sliced product as what lies in memory, and whether it is transposed."""
        program, transposed = self.operator.combine, False
        while value >= len(program.inputs):
            step = program.steps[value - len(program.inputs)]
            if step.op != "trans":
                break
            value, transposed = step.arguments[0], not transposed
        return value, transposed

    def is_element(self, value: int) -> bool:
        """Whether a value is a leaf of the element at t, which is in memory anyway."""
        count = len(self.operator.state)
        return count <= value < 2 * count

    @cached_property
    def scratch(self) -> dict[int, int]:
        """Where a program keeps the values that sliced products read: value → first scalar."""
        program, found, size = self.operator.combine, dict[int, int](), 0
        for number in sorted(self.needed):
            if not self.is_sliced(number):
                continue
            for argument in program.steps[number - len(program.inputs)].arguments:
                value, _ = self.factor(argument)
                if not self.is_element(value) and value not in found:
                    found[value] = size
                    rows, columns = program.shapes[value]
                    size += rows * columns
        return found

    @property
    def scratch_size(self) -> int:
        """How many scalars of scratch one program has."""
        shapes = self.operator.combine.shapes
        return sum(shapes[value][0] * shapes[value][1] for value in self.scratch)

    @cached_property
    def tiles(self) -> frozenset[int]:
        """The values that are needed whole, in registers."""
        program = self.operator.combine
        found = {program.outputs[k] for k in self.carry_leaves}
        for number in self.needed:
            if number < len(program.inputs):
                continue
            for argument in program.steps[number - len(program.inputs)].arguments:
                if not self.is_sliced(number):
                    found.add(argument)
                else:
                    value, _ = self.factor(argument)
                    if not self.is_element(value):
                        found.add(value)
        return frozenset(found)
