"""The text of an operator in a graph is data: whatever is changed in it, nothing of it is run."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from assocscan import Monoid, ScanValueError, ops
from assocscan.autodiff.adjoint_operator import Request, derive
from assocscan.engines.cpu import kernel
from assocscan.program import deserialization, grammar, serialization
from assocscan.program.cpp_and_triton_expressions import CPP
from assocscan.program.operator import Leaf, Operator
from assocscan.program.vectors.vector_adjoint import VectorAdjoint
from assocscan.pytrees import flatten

SELECTED = Monoid(
    ops.affine.combine, identity=(1.0, 0.0), name="saved_vectors", element_ndim=1,
    lower=lambda state, xs: (state[1] * xs[0]).sum(-1),
)  # fmt: skip
VECTORS = SELECTED.trace_for(flatten((0, 1))[1], (Leaf(torch.float32, (4,)),) * 2).vectors
assert VECTORS is not None
ADJOINT = VectorAdjoint(
    VECTORS, False, True, (1,), (0, 1), (0,), (1,), False, ((1, 2), ()), lane=2
)  # fmt: skip

Parts = dict[str, Any]
Change = Callable[[Parts], Any]


def operator(op: Any, *leaves: Leaf) -> Any:
    example: Any = tuple(range(len(leaves))) if len(leaves) > 1 else 0
    traced = op.trace_for(flatten(example)[1], leaves)
    return traced.matrices or traced.operator


F32 = Leaf(torch.float32)
LOGADDEXP = operator(ops.logaddexp, F32)
MATRICES = operator(ops.matrix_affine, Leaf(torch.float32, (8, 8)), Leaf(torch.float32, (8,)))
DERIVED = derive(LOGADDEXP, Request(False, False, (0,), frozenset(), frozenset({0}))).operator


def parts_of(op: Any) -> Parts:
    text = deserialization.text_of(serialization.write(op)[1])
    parts: Parts = json.loads(text)
    return parts


def saved(parts: Any) -> tuple[str, str]:
    """A key that fits its text, changed or not: the hash in it has no secret."""
    text = parts if isinstance(parts, bytes) else json.dumps(parts).encode()
    return f"changed:{deserialization.digest(text)}", base64.b64encode(zlib.compress(text)).decode()


def setter(value: Any, *path: Any) -> Change:
    def change(parts: Parts) -> None:
        place: Any = parts
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


INJECTED = 'abs(0); __import__("os").abort()'
SCALAR: dict[str, Change] = {
    "operation": setter(INJECTED, "combine", 1, 0, 0),
    "operation of torch": setter("load", "combine", 1, 0, 0),
    "operation of no type": setter(["add"], "combine", 1, 0, 0),
    "operands of 1": setter([0], "combine", 1, 0, 1),
    "operands of 3": setter([0, 0, 0], "combine", 1, 0, 1),
    "later operand": setter([0, 99], "combine", 1, 0, 1),
    "itself": setter([0, 2], "combine", 1, 0, 1),
    "negative operand": setter([0, -1], "combine", 1, 0, 1),
    "text operand": setter([0, INJECTED], "combine", 1, 0, 1),
    "number with a point": setter([0, 1.0], "combine", 1, 0, 1),
    "bool operand": setter([0, True], "combine", 1, 0, 1),
    "dtype of a value": setter("float; } //", "combine", 1, 0, 2),
    "wrong dtype of a value": setter("f64", "combine", 1, 0, 2),
    "literal of no constant": setter(INJECTED, "combine", 1, 0, 3),
    "constant": setter([["const", [], "f32", INJECTED]], "combine", 1),
    "constant of another dtype": setter([["const", [], "f32", 1]], "combine", 1),
    "integer that is too large": setter([["const", [], "u8", 256]], "combine", 1),
    "text for an integer": setter([["const", [], "i64", "1); abort("]], "combine", 1),
    "bool for an integer": setter([["const", [], "i64", True]], "combine", 1),
    "constant with an operand": setter([["const", [0], "f32", "0x1.0p+0"]], "combine", 1),
    "division of integers": lambda parts: integers(parts),
    "output": setter([99], "combine", 2),
    "negative output": setter([-1], "combine", 2),
    "no output": setter([], "combine", 2),
    "two outputs": setter([0, 0], "combine", 2),
    "inputs of combine": setter(["f32"], "combine", 0),
    "inputs of lift": setter(["f64"], "lift", 0),
    "inputs of lower": setter(["f32", "f32"], "lower", 0),
    "no program": setter(None, "lift"),
    "program of text": setter("abc", "lift"),
    "instruction of three": setter([["neg", [0], "f32"]], "combine", 1),
    "dtype of a leaf": setter("load", "inputs", 0, 0),
    "dtype of no tensor": setter("int4", "inputs", 0, 0),
    "dtype of no type": setter(["float32"], "inputs", 0, 0),
    "negative size": setter([-1], "inputs", 0, 1),
    "large size": setter([1 << 40], "inputs", 0, 1),
    "many sizes": setter([1] * 100, "inputs", 0, 1),
    "many scalars": setter([["float32", [1 << 15]]] * 9, "inputs"),
    "another shape": setter([2], "state", 0, 1),
    "no leaves": setter([], "state"),
    "identity of text": setter([INJECTED], "identity"),
    "identity of an integer": setter([0], "identity"),
    "identity in decimals": setter(["0.1"], "identity"),
    "long identity": setter(["-inf"] * 2, "identity"),
    "no list": setter("-inf", "identity"),
    "edge": setter([7, 0, 0], "edge"),
    "edge that is no flag": setter([0, 0, 0], "edge"),
    "edge of text": setter([1, INJECTED, 0], "edge"),
    "short edge": setter([1], "edge"),
    "another part": setter(1, "code"),
    "a part missing": lambda parts: parts.pop("lower"),
}


def integers(parts: Parts) -> None:
    """As if a sum of integers were a quotient, which the processor traps on."""
    parts.update(parts_of(operator(ops.sum, Leaf(torch.int64))))
    parts["combine"][1][0][0] = "div"


VECTOR: dict[str, Change] = {
    "operation": setter(INJECTED, "lower", 1, 0, 0),
    "operation of no type": setter(["mul"], "lower", 1, 0, 0),
    "operands of a sum": setter([0, 1], "lower", 1, -1, 1),
    "later operand": setter([99], "lower", 1, -1, 1),
    "dtype of a sum": setter("f64", "lower", 1, -1, 2),
    "literal of a sum": setter(INJECTED, "lower", 1, -1, 3),
    "sum of a value that is the same for all": setter(
        [["sum_states", [2], "f32", None]], "lower", 1
    ),
    "result that varies": setter([0], "lower", 2),
    "state that varies": setter([["float32", []], ["float32", [4]]], "state"),
    "inputs of combine": setter(["f32"], "combine", 0),
    "no state": setter([], "state"),
    "size": setter(5, "size"),
    "size of one": setter(1, "size"),
    "large size": setter(1 << 40, "size"),
    "size of text": setter(INJECTED, "size"),
    "size with a point": setter(4.0, "size"),
    "shape of a leaf": setter([4, 4], "inputs", 0, 1),
    "dtype of a leaf": setter("load", "inputs", 0, 0),
    "identity of text": setter([INJECTED] * 2, "identity"),
    "long identity": setter(["0x0.0p+0"] * 3, "identity"),
    "lane of text": setter(INJECTED, "lane"),
    "negative lane": setter(-1, "lane"),
    "large lane": setter(64, "lane"),
    "flag": setter(1, "saves_carries"),
    "format": setter(0, "format"),
    "format of text": setter(INJECTED, "format"),
    "a part missing": lambda parts: parts.pop("lift"),
    "another part": setter(1, "code"),
}
BACKWARD: dict[str, Change] = {
    "forward operation": setter(INJECTED, "forward", "lower", 1, 0, 0),
    "forward of text": setter(INJECTED, "forward"),
    "forward of scalars": lambda parts: parts.update(forward=parts_of(LOGADDEXP)),
    "forward that saves": setter(True, "forward", "saves_carries"),
    "wanted leaf": setter([7], "wanted"),
    "wanted leaf of text": setter([INJECTED], "wanted"),
    "wanted twice": setter([0, 0], "wanted"),
    "wanted integer": setter("int64", "forward", "inputs", 0, 0),
    "cotangent": setter([3], "cotangents"),
    "seeded": setter([0], "seeded"),
    "seeded of no state": setter([9], "seeded"),
    "final": setter([9], "final"),
    "short repeated": setter([], "repeated"),
    "repeated of text": setter([[INJECTED], []], "repeated"),
    "repeated dimension": setter([[64], []], "repeated"),
    "lane": setter(True, "lane"),
    "flag": setter("false", "wants_init"),
    "exclusive first": lambda parts: parts.update(exclusive=True, first=True),
    "a part missing": lambda parts: parts.pop("first"),
}
MATRIX: dict[str, Change] = {
    "step": setter(INJECTED, "combine", 1, 0, 0),
    "axis of text": setter(f"0) + {INJECTED}", "combine", 1, 0, 4),
    "axis": setter(2, "combine", 1, 0, 4),
    "number of text": setter(INJECTED, "combine", 1, 0, 3),
    "operand": setter([0, 99], "combine", 1, 0, 1),
    "operands": setter([0], "combine", 1, 0, 1),
    "shape": setter([8, 16], "combine", 1, 0, 2),
    "shape of text": setter([8, INJECTED], "combine", 1, 0, 2),
    "results": setter([0], "combine", 2),
    "results of other shapes": setter([1, 0], "combine", 2),
    "inputs": setter([[8, 8]], "combine", 0),
    "size of a leaf": setter([7, 7], "inputs", 0, 1),
    "dtype of a leaf": setter("int64", "inputs", 0, 0),
    "shown": setter([5], "shown"),
    "outputs": setter([], "outputs"),
    "identity": setter([[1.0]], "identity"),
    "identity of text": setter([[INJECTED] * 64, [0.0] * 8], "identity"),
}
TEXTS: dict[str, Any] = {
    "list": [1, 2], "number": 3, "null": None, "no JSON": b"{", "python": b"__import__('os')",
    "deep": b"[" * 100_000, "not UTF-8": b"\xff\xfe", "empty": b"", "no parts": {},
    "long integer": b"[" + b"9" * 10_000 + b"]",
}  # fmt: skip


def refused(key: str, program: str) -> None:
    known = dict(deserialization._KNOWN)
    with pytest.raises(ScanValueError, match="saved graph"):
        deserialization.read(key, program)
    assert known == deserialization._KNOWN


@pytest.mark.parametrize("change", SCALAR)
def test_changed_operators_are_refused(change: str) -> None:
    parts = copy.deepcopy(parts_of(LOGADDEXP))
    SCALAR[change](parts)
    refused(*saved(parts))


@pytest.mark.parametrize("change", MATRIX)
def test_changed_operators_of_matrices_are_refused(change: str) -> None:
    parts = copy.deepcopy(parts_of(MATRICES))
    MATRIX[change](parts)
    refused(*saved(parts))


@pytest.mark.parametrize("change", VECTOR)
def test_changed_operators_of_vectors_are_refused(change: str) -> None:
    parts = copy.deepcopy(parts_of(VECTORS))
    VECTOR[change](parts)
    refused(*saved(parts))


@pytest.mark.parametrize("change", BACKWARD)
def test_changed_backward_passes_are_refused(change: str) -> None:
    parts = copy.deepcopy(parts_of(ADJOINT))
    BACKWARD[change](parts)
    refused(*saved(parts))


@pytest.mark.parametrize("text", TEXTS)
def test_other_texts_are_refused(text: str) -> None:
    refused(*saved(TEXTS[text]))


def test_texts_that_are_no_compressed_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    key, program = saved(parts_of(LOGADDEXP))
    for other in ("", "?", "λ", "AAAA", program[:-8], program + "AAAA", "x" + program):
        refused(key, other)
    monkeypatch.setattr(deserialization, "MAX_TEXT", 100)
    refused(key, program)


@pytest.mark.parametrize("name", ["a\n#error", "", "a/b", "%0A", "λ", "x" * 300, '"'])
def test_changed_names_are_refused(name: str) -> None:
    key, program = saved(parts_of(LOGADDEXP))
    refused(key.replace("changed", name), program)


@pytest.mark.parametrize("key", ["", ":", "sum", "sum:", ":0123"])
def test_keys_without_their_parts_are_refused(key: str) -> None:
    refused(key, saved(parts_of(LOGADDEXP))[1])


UNCHANGED = {
    "scalar": LOGADDEXP, "matrix": MATRICES, "derived": DERIVED, "vectors": VECTORS,
    "vectors with carries": VECTORS.saving_carries(3), "backward": ADJOINT,
}  # fmt: skip


@pytest.mark.parametrize("name", UNCHANGED)
def test_unchanged_operators_are_read(name: str) -> None:
    """Under another name, so that nothing is known of them."""
    op: Any = UNCHANGED[name]
    key, program = saved(parts_of(op))
    assert deserialization.read(key, program) == op
    expected = "changed (backward)" if op is ADJOINT else "changed"
    assert deserialization.read(key, program).name == expected


def test_long_names_of_backward_passes() -> None:
    """The name of a forward operator may be as long as names may be."""
    adjoint = replace(ADJOINT, op=replace(VECTORS, name="x" * 200))
    key, program = serialization.write(adjoint)
    deserialization._KNOWN.clear()
    assert deserialization.read(key, program) == adjoint


def test_a_changed_operation_runs_nothing() -> None:
    """From the operation to the error, on every backend that this machine has."""
    parts = copy.deepcopy(parts_of(LOGADDEXP))
    SCALAR["operation"](parts)
    key, program = saved(parts)
    for backend in ("auto", "cpu", "triton"):
        with pytest.raises(ScanValueError, match="unknown operation"):
            torch.ops.assocscan.scan(
                key, program, [torch.ones(4)], [], [], None, [4], 0, False, False, False, [0], [],
                [], [], [], backend,
            )  # fmt: skip


def test_the_grammar_knows_every_operation() -> None:
    known = {*CPP.functions, *CPP.operations, *itertools.chain(*CPP.by_operand.values())}
    assert set(grammar.ARITY) == {"const", *grammar.LIBRARY, *known}


def test_a_saved_operator_generates_the_same_text() -> None:
    key, program = saved(parts_of(LOGADDEXP))
    again = deserialization.read(key, program)
    assert isinstance(again, Operator)
    texts = [kernel.operator_source(op, [0], [0]).split("\n", 1)[1] for op in (LOGADDEXP, again)]
    assert texts[0] == texts[1]
