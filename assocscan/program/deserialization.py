"""Reads operators: the key and the text of one, as a graph holds them (`serialization`) → it.

The text is data of unknown origin, and its hash, which stands beside it, is no signature. So it is
JSON, every part of it is held against what the package itself can have written, and nothing of it
is looked up in a module, run, or written into a source before.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..caching.bounded import BoundedCache
from ..errors import MonoidError, ScanValueError
from .grammar import is_index
from .matrix_operator import ACCUMULATORS, SIZES, MatrixOperator, MatrixProgram, Step
from .operator import Edge, Operator, scalars, spans
from .operator_names import ascii_start as shown
from .operator_names import unescaped
from .saved.checked_parts import (
    MAX_INSTRUCTIONS,
    MAX_LEAVES,
    indices,
    leaves,
    listed,
    literals,
    program,
    refuse,
)
from .saved.vectors import ADJOINT_PARTS, VECTOR_PARTS, vector_adjoint, vector_operator
from .vectors.vector_adjoint import VectorAdjoint
from .vectors.vector_operator import VectorOperator

MAX_TEXT = 1 << 26  # bytes, far above what is ever written

SCALAR_PARTS = {"inputs", "state", "outputs", "lift", "combine", "lower", "identity"}
MATRIX_PARTS = {"inputs", "outputs", "combine", "shown", "identity"}
# The operands of a step of a program over matrices.
STEPS = {"dot": 2, "add": 2, "sub": 2, "mul": 2, "scale": 1, "shift": 1, "neg": 1, "trans": 1,
         "sum": 1, "expand": 1}  # fmt: skip

Shape = tuple[int, ...]
AnyOperator = Operator | MatrixOperator | VectorOperator | VectorAdjoint

# By key. They can be made again: a graph has the text beside the key.
_KNOWN: BoundedCache[str, AnyOperator] = BoundedCache()


def remember(key: str, op: AnyOperator) -> AnyOperator:
    """Let `read` find the operator in this process without its text."""
    return _KNOWN.insert(key, op)


def read(key: str, program: str) -> AnyOperator:
    """The operator of a key. Raises ScanValueError where key or text is not what `write` gives."""
    known = _KNOWN.get(key)
    if known is not None:
        return known
    written, _, expected = key.rpartition(":")
    try:
        name = unescaped(written)
    except MonoidError as error:
        raise ScanValueError(f"the key of an operator of a saved graph: {error}") from None
    text = text_of(program)
    if digest(text) != expected:
        raise ScanValueError(
            f"the operator {name!r} of a saved graph has the hash {digest(text)}, and its key says "
            f"{shown(expected)}: the graph was changed, or written by another version of assocscan"
        )
    return remember(key, operator_of(name, text))


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def text_of(program: str) -> bytes:
    """The text in its written form: compressed, in base64. Raises ScanValueError."""
    try:
        stream = zlib.decompressobj()
        text = stream.decompress(base64.b64decode(program, validate=True), MAX_TEXT)
    except (ValueError, zlib.error):
        refuse("is no compressed text")
    if not stream.eof or stream.unused_data:
        refuse(f"is cut short, too long, or has more than {MAX_TEXT} bytes")
    return text


def operator_of(name: str, text: bytes) -> AnyOperator:
    """The operator of a text. Raises ScanValueError where it is not one."""
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError):
        refuse("is no JSON")
    if not isinstance(parts, dict):
        refuse(f"is a {type(parts).__name__} of JSON, expected an object")
    found = set(parts)
    if found == MATRIX_PARTS:
        return matrix_operator(name, parts)
    if found - {"edge", "constant"} == SCALAR_PARTS:
        return scalar_operator(name, parts)
    if found == VECTOR_PARTS:
        return vector_operator(name, parts)
    if found == ADJOINT_PARTS:
        return vector_adjoint(name, parts)
    refuse("has not the parts of an operator")


def scalar_operator(name: str, parts: dict[str, Any]) -> Operator:
    inputs, state, outputs = (leaves(parts, role) for role in ("inputs", "state", "outputs"))
    raw, kinds, written = scalars(inputs), scalars(state), scalars(outputs)
    lift = program(parts, "lift", raw, kinds)
    combine = program(parts, "combine", (*kinds, *kinds), kinds)
    lower = program(parts, "lower", (*kinds, *raw, "b1"), written)
    identity = literals(parts["identity"], kinds)
    edge = None
    if "edge" in parts:
        edge = edge_of(parts["edge"], raw)
    op = Operator(name, inputs, state, outputs, lift, combine, lower, identity, edge)
    return sequential_operator(op, parts["constant"]) if "constant" in parts else op


def sequential_operator(op: Operator, part: Any) -> Operator:
    """The operator as one of steps that are not associative, with its constant state leaves."""
    constant = indices(part, "the constant leaves", len(op.state), len(op.state))
    parts = spans(op.state)
    if any(op.combine.outputs[c] != c for k in constant for c in parts[k]):
        refuse(f"has the constant leaves {shown(part)}, but combine changes one of them")
    return replace(op, sequential=True, constant=constant)


def edge_of(part: Any, raw: Sequence[str]) -> Edge:
    """Which input component is the flag of the edge, or that none is, and which ones are fixed."""
    place, start, stop = indices(listed(part, "the edge", 3, 3), "the edge", 3, len(raw) + 1)
    if start > stop or (*raw, "b1")[place] != "b1":
        refuse(f"has the edge {part}")
    return Edge(place, range(start, stop))


def matrix_operator(name: str, parts: dict[str, Any]) -> MatrixOperator:
    inputs, outputs = leaves(parts, "inputs"), leaves(parts, "outputs")
    sizes = [one.shape for one in inputs]
    dtypes = {one.accumulator for one in inputs}
    if len(dtypes) != 1 or not dtypes <= set(ACCUMULATORS):
        refuse("has matrices of several dtypes, or of none that matrices have")
    if not all(len(shape) in (1, 2) and set(shape) <= set(SIZES) for shape in sizes):
        refuse(f"has leaves of the shapes {shown(sizes)}, expected sizes of {SIZES}")
    combine = matrix_program(parts["combine"], sizes)
    picked = indices(parts["shown"], "what is shown", MAX_LEAVES, len(inputs))
    if outputs != tuple(inputs[k] for k in picked):
        refuse("has other outputs than the leaves that it shows")
    identity = parts["identity"]
    if identity is not None:
        entries = listed(identity, "the identity", len(inputs), len(inputs))
        counts = [one.components for one in inputs]
        for row, count in zip(entries, counts, strict=True):
            for value in listed(row, "a leaf of the identity", count, count):
                require_number(value)
        identity = tuple(map(tuple, entries))
    return MatrixOperator(name, inputs, outputs, combine, picked, identity)


def require_number(value: Any) -> None:
    if type(value) is not float:
        refuse(f"has {shown(value)} in place of a number with a point")


def matrix_program(part: Any, sizes: list[Shape]) -> MatrixProgram:
    """The combine of states whose leaves have these shapes."""
    given, steps, results = listed(part, "combine", 3, 3)
    both = [list(shape) for shape in (*sizes, *sizes)]
    if given != both:
        refuse(f"has a combine of {shown(given)}, but its leaves are {shown(both)}")
    shapes = [*sizes, *sizes]
    read = []
    for one in listed(steps, "combine", MAX_INSTRUCTIONS):
        step = matrix_step(one, shapes)
        read.append(step)
        shapes.append(step.shape)
    outputs = indices(results, "the outputs of combine", len(sizes), len(shapes))
    if [shapes[v] for v in outputs] != sizes:
        refuse("has a combine whose results are not shaped as its operands")
    return MatrixProgram((*sizes, *sizes), tuple(read), outputs)


def matrix_step(part: Any, shapes: list[Shape]) -> Step:
    """A step after values of these shapes."""
    op, places, size, number, axis = listed(part, "a step of combine", 5, 5)
    if not isinstance(op, str) or op not in STEPS:
        refuse(f"has the unknown step {shown(op)} in combine")
    arguments = indices(places, f"the operands of {op!r}", STEPS[op], len(shapes))
    shape = indices(size, f"the shape of {op!r}", 2, max(SIZES) + 1)
    require_number(number)
    if not is_index(axis, 2):
        refuse(f"has the axis {shown(axis)} in combine, expected 0 or 1")
    operands = [shapes[a] for a in arguments]
    if len(operands) != STEPS[op] or shape not in RESULTS[op](*operands, axis):
        refuse(f"has the step {op!r} of {shown(operands)} with a result shaped {list(shape)}")
    return Step(op, arguments, shape, number, axis)


def same(a: Shape, _: int) -> list[Shape]:
    return [a]


def broadcast(a: Shape, b: Shape, _: int) -> list[Shape]:
    """Sizes that are equal, or 1; a vector is a row."""
    rank = max(len(a), len(b))
    pairs = list(zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True))
    fits = all(m == n or 1 in (m, n) for m, n in pairs)
    return [tuple(max(pair) for pair in pairs)] if fits else []


def product(a: Shape, b: Shape, _: int) -> list[Shape]:
    fits = len(a) == len(b) == 2 and a[1] == b[0]
    return [(a[0], b[1])] if fits else []


def transposed(a: Shape, _: int) -> list[Shape]:
    return [a[::-1]] if len(a) == 2 else []


def summed(a: Shape, axis: int) -> list[Shape]:
    return [(a[1 - axis],)] if len(a) == 2 else []


def expanded(a: Shape, axis: int) -> list[Shape]:
    return [(1, *a) if axis == 0 else (*a, 1)] if len(a) == 1 else []


# The shapes that the result of a step may have, by its operands and its axis.
RESULTS: dict[str, Callable[..., list[Shape]]] = {
    "dot": product, "add": broadcast, "sub": broadcast, "mul": broadcast, "scale": same,
    "shift": same, "neg": same, "trans": transposed, "sum": summed, "expand": expanded,
}  # fmt: skip
