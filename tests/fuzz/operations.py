"""Random names, texts of operators and arguments of the raw operation, for `python tests/fuzz`."""

from __future__ import annotations

import ast
import copy
import functools
import json
import random
import re
import subprocess
import tempfile
import zlib
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from processes import COMPILER

from assocscan import AssocScanError, Monoid, MonoidError, associative_scan, ops
from assocscan.cuda import source as cuda_source
from assocscan.engines.cpu import compiler, kernel
from assocscan.engines.eager import program_interpreter as interpreted
from assocscan.engines.triton import source as triton_source
from assocscan.program import deserialization, serialization
from assocscan.program.grammar import why_not_program
from assocscan.program.matrix_operator import MatrixOperator
from assocscan.program.operator import Leaf, Operator
from assocscan.program.program_builder import Program
from assocscan.pytrees import flatten
from assocscan.runtime import operation_arguments
from assocscan.testing import tolerance

COMPILED = 0.005  # of the texts: the compiler looks at them
SYNTAX = ("-std=c++17", "-fsyntax-only", "-w", "-fwrapv")
CHARACTERS = re.compile(r"[\w \-.~()<>\[\],:;=+&|@#!%]+", re.ASCII)
FRAGMENTS = (
    "*/", "/*", "//", '"""', "'''", '"', "'", "\\", "??/", "\\\n", "\n", "\r", "\x85", "\u2028",
    "#include <x>", "%:", "{name}", "%s", "$(x)", "`", "\0", "\x7f", "\ud800", "\udc00", "é", "∘",
    "🙂", "\u202e", "\ufeff", "_Pragma", "<lambda>", "%0A", ":", "#", "f(x, y)", "abc", " ", "}{",
)  # fmt: skip
CONSTANTS = (0, 1, -1, 2, 255, 1 << 31, 1 << 63, 1e300, float("nan"), "", "f32", "f64", "b1", "i64",
             "add", "div", "where", "load", "0x1.0p+0", "inf", "abs(0); abort()", None, True, [],
             [0], [0, 1], {}, "float32", "int64", "complex64")  # fmt: skip


def material() -> None:
    """Traced once, before the first case."""
    operators()


def kernels() -> None:
    """Compiled once, before the first case."""
    compiler.SHORT = compiler.LONG = compiler.LONG_FOR_FEW = ("-O0",)
    for op in CALLED:
        right_call(operators()[op])


@functools.cache
def operators() -> tuple[Operator | MatrixOperator, ...]:
    f32, i64, b1 = Leaf(torch.float32), Leaf(torch.int64), Leaf(torch.bool)
    matrix, vector = Leaf(torch.float32, (8, 8)), Leaf(torch.float32, (8,))
    return (
        traced(ops.sum, f32), traced(ops.sum, i64), traced(ops.any, b1), traced(ops.logaddexp, f32),
        traced(ops.affine, f32, f32), traced(ops.affine, *[Leaf(torch.complex64)] * 2),
        traced(ops.matmul, Leaf(torch.float32, (2, 2))), traced(ops.matrix_affine, matrix, vector),
        traced(Monoid(torch.mul, name="without identity"), Leaf(torch.bfloat16)),
    )  # fmt: skip


def traced(op: Monoid, *leaves: Leaf) -> Any:
    example: Any = tuple(range(len(leaves))) if len(leaves) > 1 else 0
    traced = op.trace_for(flatten(example)[1], leaves)
    return traced.matrices or traced.operator


def syntax_errors(text: str) -> str:
    """What the compiler says of C++ that includes the headers of kernels."""
    assert COMPILER is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, header in {**kernel.headers(), "kernel.cpp": text}.items():
            (folder / file).write_text(header, encoding="utf-8")
        run = subprocess.run(
            [COMPILER, *SYNTAX, folder / "kernel.cpp"], capture_output=True, text=True, check=False
        )
    return run.stderr


# ---- Names ----


def random_name(rng: random.Random) -> str:
    def piece() -> str:
        kind = rng.randrange(4)
        if kind == 0:
            return rng.choice(FRAGMENTS)
        if kind == 1:
            return chr(rng.randrange(0x110000))
        return chr(rng.randrange(0x180)) if kind == 2 else rng.choice("abc xyz_(),")

    name = "".join(piece() for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 8, 20, 60])))
    return name * rng.choice([1, 1, 1, 1, 2, 30])


def is_name(name: str) -> bool:
    """By the rule, said in another way."""
    codes = [ord(c) for c in name]
    wrong = [c for c in codes if c < 32 or 127 <= c < 160 or c in (0x2028, 0x2029)
             or 0xD800 <= c < 0xE000]  # fmt: skip
    return 1 <= len(codes) <= 200 and not wrong


def names_case(rng: random.Random) -> str:
    """A name is refused or stays in its line, in every language; its key gives it back."""
    name = random_name(rng)
    operator = operators()[rng.randrange(4)]
    assert isinstance(operator, Operator)
    named = replace(operator, name=name)
    everything = list(range(operator.width))
    text = {
        "cpp": kernel.operator_source(named, everything, everything),
        "cuda": cuda_source.operator_source(named, everything),
        "triton": triton_source.module(named, everything, everything),
        "matrices": triton_source.header(name),
    }
    for language, generated in text.items():  # whether or not it can be a name
        first = generated.split("\n", 1)[0]
        start, end = (
            ("// ", "") if language in ("cpp", "cuda") else ('"""Generated by assocscan: ', '."""')
        )
        assert first.startswith(start) and first.endswith(end), first
        inside = first[len(start) : len(first) - len(end)]
        assert name == "" or CHARACTERS.fullmatch(inside), first
        assert not inside.endswith("\\")
        if language in ("triton", "matrices"):
            docstring = ast.parse(generated).body[0]
            assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
    plain = kernel.operator_source(operator, everything, everything)
    assert text["cpp"].split("\n", 1)[1] == plain.split("\n", 1)[1]
    if rng.random() < COMPILED:
        assert syntax_errors('#include "scalar.h"\n' + text["cpp"]) == ""
    try:
        made = Monoid(lambda a, b: a + b, name=name)
    except MonoidError as error:
        assert name == "<lambda>" or not is_name(name), error
        assert str(error).replace("…", "").isascii() and str(error).isprintable()
        return "refused"
    assert is_name(name) and made.name == name
    key, program = serialization.write(named)
    deserialization._KNOWN.clear()
    assert key.isascii() and deserialization.read(key, program).name == name
    if rng.random() < COMPILED:
        factor = rng.randrange(2, 1 << 20)  # a kernel of its own
        op = Monoid(lambda a, b: a + factor * b, name=name)
        assert associative_scan(op, torch.ones(2), backend="cpu").tolist() == [1, 1 + factor]
        return "compiled"
    return "accepted"


# ---- Texts ----


def change(rng: random.Random, value: Any) -> Any:
    """The same tree of JSON with one entry changed, removed, repeated or exchanged."""
    path: list[Any] = []
    place = value
    while isinstance(place, (list, dict)) and place and (not path or rng.random() < 0.9):
        path.append(rng.choice(list(place) if isinstance(place, dict) else range(len(place))))
        place = place[path[-1]]
    parent = value
    for step in path[:-1]:
        parent = parent[step]
    kind = rng.randrange(5)
    if not path:
        return rng.choice(CONSTANTS)
    if kind == 0 and isinstance(parent, list):
        del parent[path[-1]]
    elif kind == 1 and isinstance(parent, list):
        parent.insert(path[-1], copy.deepcopy(place))
    elif kind == 2 and isinstance(place, int) and not isinstance(place, bool):
        parent[path[-1]] = place + rng.choice([-1, 1, 7])
    else:
        parent[path[-1]] = copy.deepcopy(rng.choice(CONSTANTS))
    return value


def texts_case(rng: random.Random) -> str:
    """A changed text is refused with the one error there is for it, or is a right operator."""
    op = rng.choice(operators())
    key, program = serialization.write(op)
    parts = json.loads(deserialization.text_of(program))
    kind = rng.choice(["parts"] * 8 + ["bytes", "packed", "key"])
    if kind == "parts":
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            parts = change(rng, parts) if isinstance(parts, dict) else parts
        text = json.dumps(parts).encode()
        key = f"changed:{deserialization.digest(text)}"
        program = b64encode(zlib.compress(text)).decode()
    elif kind == "bytes":
        raw = bytearray(deserialization.text_of(program))
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        key = f"changed:{deserialization.digest(bytes(raw))}"
        program = b64encode(zlib.compress(bytes(raw))).decode()
    elif kind == "packed":
        at = rng.randrange(len(program))
        program = program[:at] + rng.choice(["", "A", "=", "\n", "λ"]) + program[at + 1 :]
    else:
        key = random_name(rng) + rng.choice([":", ""]) + key.rpartition(":")[2]
    deserialization._KNOWN.clear()
    try:
        read = deserialization.read(key, program)
    except AssocScanError as error:
        assert "saved graph" in str(error), error
        assert not deserialization._KNOWN
        return f"{kind}: refused"
    if isinstance(read, Operator):
        require_right(read)
        everything = list(range(read.width))
        generated = kernel.operator_source(read, everything, everything)
        assert "abort" not in generated and "load" not in generated
        if rng.random() < COMPILED:
            assert syntax_errors('#include "scalar.h"\n' + generated) == ""
    return f"{kind}: read"


def require_right(op: Operator) -> None:
    for program in (op.lift, op.combine, op.lower):
        assert isinstance(program, Program) and why_not_program(program) is None
    assert op.combine.output_dtypes == op.lift.output_dtypes


# ---- Arguments ----

ARGUMENTS = (
    "key", "program", "inputs", "init", "edges", "offsets", "batch", "axis", "reverse", "exclusive",
    "from_identity", "read", "given", "final", "ahead", "edged", "backend",
)  # fmt: skip
BATCH, AXIS = [2, 5, 3], 1
CALLED = (0, 2, 4, 5)  # of the operators


def tensor(rng: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    count = 1
    for n in shape:
        count *= n
    t = torch.tensor([rng.randrange(2) for _ in range(count)]).to(dtype).view(shape)
    return t


def right_call(op: Any, rng: random.Random | None = None) -> dict[str, Any]:
    """A call that works; without random numbers it runs, so that its kernels are compiled."""
    draw = rng or random.Random(0)
    final = list(range(len(op.state)))
    key, program = serialization.write(op)
    carry = [n for d, n in enumerate(BATCH) if d != AXIS]
    given = dict(zip(ARGUMENTS, (
        key, program, [tensor(draw, [*BATCH, *leaf.shape], leaf.dtype) for leaf in op.inputs],
        [tensor(draw, [*carry, *leaf.shape], leaf.dtype) for leaf in op.state], [], None,
        list(BATCH), AXIS, draw.random() < 0.5, draw.random() < 0.5, False,
        list(range(len(op.inputs))), final, final, [], [], "cpu",
    ), strict=True))  # fmt: skip
    for exclusive in (False, True) if rng is None else ():
        run(given | {"exclusive": exclusive})
    return given


def run(given: dict[str, Any]) -> list[torch.Tensor]:
    results: list[torch.Tensor] = torch.ops.assocscan.scan(*given.values())
    return results


def spoilt(rng: random.Random, given: dict[str, Any], name: str) -> None:
    """One argument changed."""
    value = given[name]
    if name in ("inputs", "init", "edges"):
        given[name] = [spoilt_tensor(rng, t) if rng.random() < 0.5 else t for t in value]
        if rng.random() < 0.3:
            given[name] = given[name][: rng.randrange(len(value) + 1)]
        if rng.random() < 0.2:
            given[name].append(torch.ones(rng.choice([1, 2, 3])))
    elif name == "offsets":
        entries = sorted(rng.choices([0, 0, 1, 2, 5, 5, 9, -3, 1 << 40], k=rng.randrange(5)))
        if rng.random() < 0.3:
            rng.shuffle(entries)
        kind = rng.choice([torch.int64, torch.int32, torch.float32])
        entries = [e % (1 << 31) if kind == torch.int32 else e for e in entries]
        given[name] = torch.tensor(entries, dtype=kind)
    elif name == "batch":
        given[name] = [rng.choice([n, n, 1, 0, -1, n + 1, 4000, 1 << 40, 1 << 62]) for n in value][
            : rng.choice([len(value), len(value), rng.randrange(4)])
        ]
        if rng.random() < 0.2:
            given[name].insert(0, rng.choice([1, 2, 1 << 62]))
    elif name == "axis":
        given[name] = rng.choice([0, 1, 2, 3, -1, 7, -(1 << 40), 1 << 40])
    elif name in ("reverse", "exclusive", "from_identity"):
        given[name] = not value
    elif name == "backend":
        given[name] = rng.choice(["auto", "eager", "gpu", "", "cuda", "__class__"])
    elif name in ("key", "program"):
        other = serialization.write(rng.choice(operators()))
        given["key"], given["program"] = other
    else:
        given[name] = [rng.choice([0, 1, 2, 3, -1, 1 << 40]) for _ in range(rng.randrange(4))]


def spoilt_tensor(rng: random.Random, t: torch.Tensor) -> torch.Tensor:
    kind = rng.randrange(7)
    if kind == 0 and not t.is_complex():
        return t.to(rng.choice([torch.float64, torch.int8, torch.bool, torch.complex128]))
    if kind == 1:
        t.untyped_storage().resize_(rng.randrange(t.untyped_storage().nbytes() + 1))
        return t
    if kind == 2:
        return t[:1]
    if kind == 3:
        return t.unsqueeze(rng.randrange(t.dim() + 1))
    if kind == 4:
        return t.flatten()
    if kind == 5:
        return t.to("meta")
    return t.to_sparse() if t.dim() and t.layout is torch.strided else t


class NewKernelError(Exception):
    """A call that was let through needs a kernel that is not compiled yet."""


def arguments_case(rng: random.Random) -> str:
    """A wrong call is refused, or is a right one of another problem: kernels give then what torch's
    operations, which look at the sizes of memory themselves, give."""
    op = operators()[rng.choice(CALLED)]
    given = right_call(op, rng)
    changed = rng.sample(ARGUMENTS, rng.choice([0, 1, 1, 1, 2, 3]))
    for name in changed:
        spoilt(rng, given, name)
    label = changed[0] if len(changed) == 1 else f"{len(changed)} changes"
    try:
        results, done = run_known(given, rng.random() < COMPILED), "run"
    except NewKernelError:
        results, done = [], "let through"
    except Exception as error:
        assert changed, error
        if not isinstance(error, AssocScanError):  # of torch, before the operation is reached
            assert isinstance(error, (NotImplementedError, RuntimeError)), error
            assert too_large(given) or by_torch(str(error)), error
        return f"{label}: refused"
    spec, tensors = operation_arguments.scan_of(*given.values())
    if spec.sequences is not None and tensors[-1] is not None:
        tensors[-1] = tensors[-1].long()
    outputs, finals = interpreted.scan(spec, tensors)
    if done == "run":
        for one, other in zip(results, [*outputs, *finals], strict=True):
            assert_both_close(one, other, spec.length)
    return f"{label}: {done}"


def assert_both_close(one: torch.Tensor, other: torch.Tensor, length: int) -> None:
    """Two scans of that many steps, each of which may be off by its rounding."""
    rtol, atol = (2 * bound for bound in tolerance(one.dtype, length))
    if atol:  # zero for integers and bool
        finite = other[other.isfinite()].abs()
        atol *= max(1.0, float(finite.max()) if finite.numel() else 0.0)
    torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)


def run_known(given: dict[str, Any], compiles: bool) -> list[torch.Tensor]:
    """The results, from a kernel that is compiled already unless `compiles`."""
    build = compiler._load

    def only_known(source: str, level: tuple[str, ...], what: str) -> Any:
        if not compiles:
            raise NewKernelError
        return build(source, level, what)

    with mock.patch.object(compiler, "_load", only_known):
        return run(given)


def too_large(given: dict[str, Any]) -> bool:
    """Whether the results would not fit in memory."""
    count = 1
    for n in given["batch"]:
        count *= max(n, 1)
    return count > 1 << 30


def by_torch(words: str) -> bool:
    return "assocscan::scan" in words or "Overflow" in words
