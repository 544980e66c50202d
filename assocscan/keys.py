"""Operators as text: the key that a graph names one by, and the program that the key stands for.

A graph that holds a scan (of `torch.compile`, `torch.export`, `torch.jit.trace`) may run in another
process than the one that traced the user's function. So it holds two strings: the key, which is the
operator's name and a hash of its lift, combine, lower and identity, and the operator itself written
down. A key that is known is looked up; one that is not is read from the text. Adjoints are
operators like any other.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from typing import Any

import torch

from .errors import MonoidError, ScanValueError
from .locks import ForkSafeLock
from .matrices import MatrixOperator, MatrixProgram, Step
from .names import escaped, unescaped
from .operator import Edge, Leaf, Operator
from .program import Instruction, Program

AnyOperator = Operator | MatrixOperator

_LOCK = ForkSafeLock()
_KNOWN: dict[str, AnyOperator] = {}
_WRITTEN: dict[tuple[str, AnyOperator], tuple[str, str]] = {}


def write(op: AnyOperator) -> tuple[str, str]:
    """(key, program): the key can be read in this process from now on, the program anywhere."""
    known = _WRITTEN.get((op.name, op))
    if known is None:
        parts = matrix_parts(op) if isinstance(op, MatrixOperator) else scalar_parts(op)
        text = json.dumps(parts, separators=(",", ":")).encode()
        program = base64.b64encode(zlib.compress(text, 9)).decode()
        known = f"{escaped(op.name)}:{digest(text)}", program
        with _LOCK:
            _KNOWN[known[0]] = op
            _WRITTEN[op.name, op] = known
    return known


def read(key: str, program: str) -> AnyOperator:
    """The operator of a key. Raises ScanValueError where the text is not what the key says."""
    known = _KNOWN.get(key)
    if known is not None:
        return known
    written, _, expected = key.rpartition(":")
    try:
        name = unescaped(written)
    except MonoidError as error:
        raise ScanValueError(f"the key of an operator of a saved graph: {error}") from None
    text = zlib.decompress(base64.b64decode(program))
    if digest(text) != expected:
        raise ScanValueError(
            f"the operator {name!r} of a saved graph has the hash {digest(text)}, and its key says "
            f"{expected}: the graph was changed, or written by another version of assocscan"
        )
    parts = json.loads(text)
    op = (matrix_operator if "shown" in parts else scalar_operator)(name, parts)
    with _LOCK:
        _KNOWN[key] = op
    return op


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def scalar_parts(op: Operator) -> dict[str, Any]:
    parts: dict[str, Any] = {
        role: [leaf_parts(leaf) for leaf in getattr(op, role)]
        for role in ("inputs", "state", "outputs")
    }
    for role in ("lift", "combine", "lower"):
        program: Program = getattr(op, role)
        steps = [[i.op, i.args, i.dtype, i.literal] for i in program.instructions]
        parts[role] = [program.inputs, steps, program.outputs]
    parts["identity"] = op.identity
    if op.edge is not None:  # of derived operators alone
        parts["edge"] = [op.edge.place, op.edge.fixed.start, op.edge.fixed.stop]
    return parts


def scalar_operator(name: str, parts: dict[str, Any]) -> Operator:
    inputs, state, outputs = (tuple(map(leaf, parts[r])) for r in ("inputs", "state", "outputs"))
    lift, combine, lower = (scalar_program(parts[role]) for role in ("lift", "combine", "lower"))
    identity = None if parts["identity"] is None else tuple(parts["identity"])
    edge = None
    if "edge" in parts:
        place, start, stop = parts["edge"]
        edge = Edge(place, range(start, stop))
    return Operator(name, inputs, state, outputs, lift, combine, lower, identity, edge)


def scalar_program(parts: Any) -> Program:
    inputs, steps, outputs = parts
    instructions = tuple(Instruction(o, tuple(args), d, lit) for o, args, d, lit in steps)
    return Program(tuple(inputs), instructions, tuple(outputs))


def matrix_parts(op: MatrixOperator) -> dict[str, Any]:
    steps = [[s.op, s.arguments, s.shape, s.number, s.axis] for s in op.combine.steps]
    return {
        "inputs": [leaf_parts(leaf) for leaf in op.inputs],
        "outputs": [leaf_parts(leaf) for leaf in op.outputs],
        "combine": [op.combine.inputs, steps, op.combine.outputs],
        "shown": op.shown,
        "identity": op.identity,
    }


def matrix_operator(name: str, parts: dict[str, Any]) -> MatrixOperator:
    inputs, steps, outputs = parts["combine"]
    program = MatrixProgram(
        tuple(map(tuple, inputs)),
        tuple(Step(o, tuple(args), tuple(shape), n, axis) for o, args, shape, n, axis in steps),
        tuple(outputs),
    )
    identity = parts["identity"]
    return MatrixOperator(
        name, tuple(map(leaf, parts["inputs"])), tuple(map(leaf, parts["outputs"])), program,
        tuple(parts["shown"]), None if identity is None else tuple(map(tuple, identity)),
    )  # fmt: skip


def leaf_parts(described: Leaf) -> list[Any]:
    return [str(described.dtype).removeprefix("torch."), list(described.shape)]


def leaf(parts: list[Any]) -> Leaf:
    dtype = getattr(torch, parts[0])
    assert isinstance(dtype, torch.dtype)
    return Leaf(dtype, tuple(parts[1]))
