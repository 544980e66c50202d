"""Writes operators as text: the key that names one in a graph, and the text that goes with the key.

A graph that holds a scan (of `torch.compile`, `torch.export`, `torch.jit.trace`) may run in another
process than the one that traced the user's function. So it holds two strings: the key, which is the
operator's name and a hash of its lift, combine, lower and identity, and the operator itself written
down. `deserialization` reads them: a key that is known is looked up; one that is not is read from
the text. Adjoints are operators like any other.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from ..caching.bounded import BoundedCache
from .deserialization import AnyOperator, digest, remember
from .matrix_operator import MatrixOperator
from .operator import Operator
from .operator_names import escaped
from .saved.vectors import adjoint_parts, vector_parts
from .saved.written_parts import leaf_parts, program_parts
from .vectors.vector_adjoint import VectorAdjoint
from .vectors.vector_operator import VectorOperator

# (key, program) by operator; they can be written again.
_WRITTEN: BoundedCache[tuple[str, AnyOperator], tuple[str, str]] = BoundedCache()


def write(op: AnyOperator) -> tuple[str, str]:
    """(key, program): the key can be read in this process from now on, the program anywhere."""
    known = _WRITTEN.get((op.name, op))
    if known is None:
        text = json.dumps(parts_of(op), separators=(",", ":")).encode()
        program = base64.b64encode(zlib.compress(text, 9)).decode()
        known = f"{escaped(op.name)}:{digest(text)}", program
        remember(known[0], op)
        _WRITTEN.insert((op.name, op), known)
    return known


def parts_of(op: AnyOperator) -> dict[str, Any]:
    if isinstance(op, MatrixOperator):
        return matrix_parts(op)
    if isinstance(op, VectorOperator):
        return vector_parts(op)
    return adjoint_parts(op) if isinstance(op, VectorAdjoint) else scalar_parts(op)


def scalar_parts(op: Operator) -> dict[str, Any]:
    parts: dict[str, Any] = {
        role: [leaf_parts(leaf) for leaf in getattr(op, role)]
        for role in ("inputs", "state", "outputs")
    }
    for role in ("lift", "combine", "lower"):
        parts[role] = program_parts(getattr(op, role))
    parts["identity"] = op.identity
    if op.edge is not None:  # of derived operators alone
        parts["edge"] = [op.edge.place, op.edge.fixed.start, op.edge.fixed.stop]
    if op.sequential:
        parts["constant"] = op.constant
    return parts


def matrix_parts(op: MatrixOperator) -> dict[str, Any]:
    steps = [[s.op, s.arguments, s.shape, s.number, s.axis] for s in op.combine.steps]
    return {
        "inputs": [leaf_parts(leaf) for leaf in op.inputs],
        "outputs": [leaf_parts(leaf) for leaf in op.outputs],
        "combine": [op.combine.inputs, steps, op.combine.outputs],
        "shown": op.shown,
        "identity": op.identity,
    }
