"""Names of operators: which are accepted, and that none of them becomes code."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from table import Engine

from assocscan import (
    Monoid,
    MonoidError,
    associative_scan,
    monoid,
    ops,
    product,
    segmented,
    with_lower,
)
from assocscan.autodiff.adjoint_operator import Request, derive
from assocscan.caching.bounded import BoundedCache
from assocscan.cuda import source as cuda_source
from assocscan.engines.cpu import kernel
from assocscan.engines.triton import source as triton_source
from assocscan.program import deserialization, serialization
from assocscan.program import operator_names as names
from assocscan.program.operator import Leaf, Operator
from assocscan.pytrees import flatten

ODD = [
    "<lambda>", "ends with a backslash\\", "*/ int injected() { return 1; } /*", "λ-Übung ∘ 和 🙂",
    '""" + str(1/0) + """', "'''", "??/", "??/\\", "%s %(a)s %20 {name} {0}", "\\u000a\\n\\N{DIGIT",
    "/* // # %: <?php ?> $(exit) `exit`", "a\u00a0b\u202eevil\u2066", "x" * names.MAX_LENGTH, " ",
    '")); exit(1); //',
]  # fmt: skip
REFUSED = {
    "empty": "", "newline": "a\nb", "return": "a\rb", "NUL": "a\0", "tab": "a\tb", "DEL": "a\x7f",
    "C1": "a\x85b", "line separator": "\u2028", "paragraph separator": "a\u2029",
    "lone surrogate": "a\ud800", "too long": "x" * (names.MAX_LENGTH + 1), "bytes": b"sum",
    "number": 7, "false": False,
}  # fmt: skip
SUM = ops.sum.trace_for(flatten(0)[1], (Leaf(torch.float32),)).operator
assert SUM is not None


def adding(left: Any, right: Any) -> Any:
    return left + right


@pytest.mark.parametrize("name", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_a_name_is_refused(name: Any) -> None:
    for make in (Monoid, monoid):
        with pytest.raises(MonoidError, match="a name has 1 to 200 characters") as caught:
            make(adding, name=name)
        assert str(caught.value).isascii() or "…" in str(caught.value)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["a\nb", "", "x" * 201])
def test_the_name_of_a_raw_callable_is_refused(name: str) -> None:
    def raw(left: Any, right: Any) -> Any:
        return left + right

    raw.__name__ = name
    with pytest.raises(MonoidError, match="the __name__ of the operator"):
        associative_scan(raw, torch.arange(3))
    with pytest.raises(MonoidError, match="a name has 1 to 200 characters"):
        monoid(raw)
    with pytest.raises(MonoidError, match="a name has 1 to 200 characters"):
        with_lower(ops.sum, raw) if name == "a\nb" else Monoid(raw)


def test_a_name_is_a_plain_string() -> None:
    class Changing(str):
        def __str__(self) -> str:
            return "*/\n"

        def __format__(self, _: str) -> str:
            return "*/\n"

    made = Monoid(adding, name=Changing("plain"))
    assert type(made.name) is str
    assert made.name == "plain"


def test_composed_names_are_cut_and_differ() -> None:
    long = Monoid(adding, identity=0, name="x" * 199)
    other = Monoid(adding, identity=0, name="x" * 150 + "y" + "x" * 48)
    made = [segmented(long), segmented(other), product(long, long), segmented(segmented(long))]
    assert all(len(op.name) <= names.MAX_LENGTH for op in made)
    assert len({op.name for op in made}) == len(made)
    assert made[0].name.startswith("segmented(xxx")
    assert made[0].name.endswith("xxx)")
    assert segmented(ops.sum).name == "segmented(sum)"
    x, starts = torch.arange(4), torch.tensor([False, False, True, False])
    assert associative_scan(made[0], (x, starts)).tolist() == [0, 1, 2, 5]


def test_derivatives_have_names_that_can_be_read() -> None:
    """However often an operator is derived: a graph holds the name."""
    operator = replace(logaddexp_operator(), name="x" * names.MAX_LENGTH)
    for _ in range(2):
        operator = derive(
            operator, Request(False, False, (0,), frozenset(), frozenset({0}))
        ).operator
        assert names.why_not(operator.name) is None


def logaddexp_operator() -> Operator:
    operator = ops.logaddexp.trace_for(flatten(0)[1], (Leaf(torch.float32),)).operator
    assert operator is not None
    return operator


def texts(operator: Operator) -> dict[str, str]:
    """What is generated of an operator, the name's line in front."""
    triton = triton_source.module(operator, [0], [0])
    return {
        "cpp": kernel.operator_source(operator, [0], [0]),
        "cuda": cuda_source.operator_source(operator, [0]),
        "triton": triton,
        "matrices": triton_source.header(operator.name),
    }


@pytest.mark.parametrize("name", [*ODD, "\n#error", "\ud800"], ids=ascii)
def test_a_name_stays_in_its_line(name: str) -> None:
    """The last two cannot be names, and would be harmless too."""
    plain = texts(replace(SUM, name="sum"))
    for language, text in texts(replace(SUM, name=name)).items():
        first, rest = text.split("\n", 1)
        expected, expected_rest = plain[language].split("\n", 1)
        assert rest == expected_rest
        written = re.fullmatch(re.escape(expected).replace("sum", "(.*)"), first)
        assert written is not None
        assert re.fullmatch(r"[\w \-.~()<>\[\],:;=+&|@#!%]+", written[1], re.ASCII)
        if language in ("triton", "matrices"):
            body = ast.parse(text).body
            assert isinstance(body[0], ast.Expr)
            assert len(body) == len(ast.parse(plain[language]).body)
        assert names.escaped(name) == written[1]


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_names_of_keys_can_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is ASCII that C++ and Python can quote: torch's generators do not escape it."""
    key, program = serialization.write(replace(SUM, name=name))
    assert key.isascii() and not set(key) & set("\"'\\\n?*/{}`$")
    monkeypatch.setattr(deserialization, "_KNOWN", BoundedCache())
    assert deserialization.read(key, program).name == name


def test_odd_names_run(engine: Engine) -> None:
    """The worst of all in one name, and at its end a backslash, which would continue a comment."""
    together = " ".join(ODD[1:6] + ODD[6:9])[: names.MAX_LENGTH - 1] + "\\"
    for factor, name in enumerate((together, "λ??/", '"""'), 2):  # programs of their own
        op = Monoid(lambda a, b, factor=factor: a + factor * b, name=name)
        x = engine.put(torch.tensor([1.0, 1.0]))
        y = engine.scan(op, x)
        assert y.tolist() == [1.0, 1.0 + factor]
    raw = lambda left, right: left * 3 + right  # noqa: E731, its name is <lambda>
    assert engine.scan(raw, engine.put(torch.tensor([1.0, 1.0]))).tolist() == [1.0, 4.0]


@pytest.mark.parametrize(
    "text", ["", "%", "%2", "%2f", "%41", "a/b", "a\nb", "%0A", "%ED%A0%80", "%FF", "λ", "x" * 201]
)
def test_what_was_not_written_is_not_read(text: str) -> None:
    with pytest.raises(MonoidError):
        names.unescaped(text)
