"""The texts of operators over vectors, and of their backward passes.

Their programs have a state axis. So a text is held against more than those of scalars are: shapes
of leaves, and which values vary along the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..operator import Leaf
from ..operator_names import ascii_start as shown
from ..program_builder import Program
from ..vectors.state_axis import REDUCTIONS, varying
from ..vectors.vector_adjoint import BACKWARD, VectorAdjoint
from ..vectors.vector_operator import VectorOperator, part_dtypes, parts
from .checked_parts import (
    MAX_COMPONENTS,
    MAX_LEAVES,
    indices,
    leaves,
    listed,
    literals,
    program,
    refuse,
)
from .written_parts import leaf_parts, program_parts

LEAVES, PROGRAMS = ("inputs", "state", "outputs"), ("lift", "combine", "lower")
VECTOR_PARTS = {*LEAVES, *PROGRAMS, "size", "identity", "saves_carries", "lane", "format"}
PLACES = ("final", "wanted", "cotangents", "seeded")
FLAGS = ("exclusive", "first", "wants_init")
ADJOINT_PARTS = {*PLACES, *FLAGS, "forward", "repeated", "lane"}
# Of the text, and of how saved carries lie in memory. A change of either takes a new number: torch
# keeps compiled graphs on disk, and knows what an operation gives by its arguments alone.
FORMAT = 1
MAX_DIMS = 64  # batch dimensions, as torch has

Parts = dict[str, Any]


def vector_parts(op: VectorOperator) -> Parts:
    return {
        **{role: [leaf_parts(leaf) for leaf in getattr(op, role)] for role in LEAVES},
        **{role: program_parts(getattr(op, role)) for role in PROGRAMS},
        "size": op.size, "identity": op.identity, "saves_carries": op.saves_carries,
        "lane": op.lane, "format": FORMAT,
    }  # fmt: skip


def adjoint_parts(adjoint: VectorAdjoint) -> Parts:
    return {
        **{name: getattr(adjoint, name) for name in (*PLACES, *FLAGS, "repeated", "lane")},
        "forward": vector_parts(adjoint.op),
    }


def vector_operator(name: str, given: Parts) -> VectorOperator:
    """The operator of these parts. Raises ScanValueError where they do not fit together."""
    if given["format"] != FORMAT or isinstance(given["format"], bool):
        refuse(f"has vectors of format {shown(given['format'])}, expected {FORMAT}")
    size = number(given["size"], "the number of states", MAX_COMPONENTS)
    if size < 2:
        refuse(f"has {size} states, expected 2 or more")
    inputs, state, outputs = (leaves(given, role) for role in LEAVES)
    for leaf in (*inputs, *state, *outputs):
        if leaf.shape not in ((), (1,), (size,)):
            refuse(f"has a leaf of the shape {list(leaf.shape)} for vectors of {size} states")
    if not state:
        refuse("has no state")
    kinds = part_dtypes(state)
    lift = state_program(given, "lift", size, inputs, state)
    combine = state_program(given, "combine", size, (*state, *state), state)
    lower = state_program(given, "lower", size, (*state, *inputs), outputs)
    return VectorOperator(
        name, size, inputs, state, outputs, lift, combine, lower,
        literals(given["identity"], kinds), flag(given["saves_carries"], "saves_carries"),
        dimension(given["lane"]),
    )  # fmt: skip


def state_program(
    given: Parts, role: str, size: int, arguments: Sequence[Leaf], results: Sequence[Leaf]
) -> Program:
    """A program from leaves to leaves. A reduction takes a value that varies along the states, and
    a leaf without their axis is a value that does not."""
    read = program(given, role, part_dtypes(arguments), part_dtypes(results), REDUCTIONS)
    varies = varying(read, [axis for leaf in arguments for axis in varies_of(leaf, size)])
    for instruction in read.instructions:
        if instruction.op in REDUCTIONS and not varies[instruction.args[0]]:
            refuse(f"has a {role} with {instruction.op!r} of a value that is the same for all")
    wanted = [axis for leaf in results for axis in varies_of(leaf, size)]
    if any(varies[v] and not axis for v, axis in zip(read.outputs, wanted, strict=True)):
        refuse(f"has a {role} with a result that varies along the states, and has no such axis")
    return read


def varies_of(leaf: Leaf, size: int) -> list[bool]:
    return [leaf.shape == (size,)] * parts(leaf)


def vector_adjoint(name: str, given: Parts) -> VectorAdjoint:
    """The backward pass of these parts. Raises ScanValueError where they do not fit together."""
    forward = given["forward"]
    if not isinstance(forward, dict) or set(forward) != VECTOR_PARTS:
        refuse("has a backward pass without the parts of its forward operator")
    op = vector_operator(name.removesuffix(BACKWARD), forward)
    if op.saves_carries:
        refuse("has a backward pass whose forward operator saves carries")
    final, wanted, cotangents, seeded = (
        places(given, role, known)
        for role, known in zip(PLACES, (op.state, op.inputs, op.outputs, op.state), strict=True)
    )
    if not set(seeded) <= set(final):
        refuse(f"has cotangents of the finals {list(seeded)}, expected some of {list(final)}")
    for role, chosen in (
        ("wanted", [op.inputs[k] for k in wanted]),
        ("cotangents", [op.outputs[k] for k in cotangents]),
    ):
        if not all(leaf.dtype.is_floating_point or leaf.dtype.is_complex for leaf in chosen):
            refuse(f"has leaves in {role} that are no floats")
    repeated = tuple(
        indices(dims, "repeated", MAX_DIMS, MAX_DIMS)
        for dims in listed(given["repeated"], "repeated", len(wanted), len(wanted))
    )
    exclusive, first, wants_init = (flag(given[role], role) for role in FLAGS)
    if exclusive and first:
        refuse("has an exclusive scan whose first step has no carry")
    return VectorAdjoint(
        op, exclusive, first, final, wanted, cotangents, seeded, wants_init, repeated,
        dimension(given["lane"]),
    )  # fmt: skip


def places(given: Parts, role: str, known: Sequence[Leaf]) -> tuple[int, ...]:
    """Different numbers of leaves."""
    found = indices(given[role], role, MAX_LEAVES, len(known))
    if len(set(found)) < len(found):
        refuse(f"has {shown(list(found))} in {role}, expected different numbers")
    return found


def flag(value: Any, role: str) -> bool:
    if not isinstance(value, bool):
        refuse(f"has {shown(value)} for {role}, expected true or false")
    return value


def dimension(value: Any) -> int | None:
    """The batch dimension of the lanes."""
    return None if value is None else number(value, "lane", MAX_DIMS - 1)


def number(value: Any, what: str, most: int) -> int:
    return indices([value], what, 1, most + 1)[0]
