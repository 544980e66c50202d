"""Writes the parts that texts of operators consist of: leaves and programs, as JSON."""

from __future__ import annotations

from typing import Any

from ..operator import Leaf
from ..program_builder import Program


def program_parts(program: Program) -> list[Any]:
    steps = [[i.op, i.args, i.dtype, i.literal] for i in program.instructions]
    return [program.inputs, steps, program.outputs]


def leaf_parts(described: Leaf) -> list[Any]:
    return [str(described.dtype).removeprefix("torch."), list(described.shape)]
