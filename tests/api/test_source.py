"""The generated code of operators and the programs of their derivatives, against golden files.

After a change that is meant: ASSOCSCAN_UPDATE_GOLDEN=1 python -m pytest tests/api/test_source.py
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from golden import check_golden

from assocscan import BackendError, MonoidError, ops
from assocscan.autodiff.adjoint_operator import Adjoint, Request, derive
from assocscan.engines.base import cpp_and_cuda
from assocscan.engines.cpu.compiler import compiler_command
from assocscan.monoids.monoid import Monoid
from assocscan.program.operator import Operator
from assocscan.program.transforms import with_edge_input


def one(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


MATRIX = (one(torch.float32, 2, 2), one(torch.float32, 2))
COMPLEX = (one(torch.complex64), one(torch.complex64))
SOURCES: dict[str, tuple[Monoid, Any]] = {
    "affine": (ops.affine, None),
    "sum": (ops.sum, None),
    "logaddexp": (ops.logaddexp, None),
    "welford": (ops.welford, one()),
    "matrix_affine": (ops.matrix_affine, MATRIX),
    "complex_affine": (ops.affine, COMPLEX),
    "max": (ops.max, one(torch.int64)),
}


def only_h(op: Monoid) -> Monoid:
    """`op` on pairs, of which the caller gets the second."""
    return Monoid(op.combine, identity=op.identity, name="recurrence", lower=lambda state: state[1],
                  element_ndim=op.element_ndim)  # fmt: skip


ADJOINTS: dict[str, tuple[Monoid, Any]] = {
    "recurrence": (only_h(ops.affine), (one(), one())),
    "complex_recurrence": (only_h(ops.affine), COMPLEX),
    "matrix_affine": (ops.matrix_affine, MATRIX),
}


def operator(monoid: Monoid, like: Any) -> Operator:
    made = monoid.of(like)[0].operator
    assert made is not None
    return made


def adjoint(monoid: Monoid, like: Any, exclusive: bool = False, init: bool = False) -> Adjoint:
    """With a cotangent of every output and of no final, all inputs wanted."""
    op = operator(monoid, like)
    every = range(len(op.inputs)), range(len(op.outputs))
    return derive(op, Request(exclusive, init, tuple(every[0]), frozenset(), frozenset(every[1])))


def described(derived: Adjoint) -> str:
    op = derived.operator
    parts = [
        f"carries {derived.matrix_size} + {len(derived.carried)}",
        f"reads {', '.join(f'x{c}' for c in sorted(op.used_inputs))}",
        *(f"{role}: {getattr(op, role)}" for role in ("lift", "combine", "lower")),
    ]
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize("name", SOURCES)
def test_source(name: str) -> None:
    monoid, like = SOURCES[name]
    check_golden(f"{name}.cpp", monoid.source("cpp", like=like))


@pytest.mark.parametrize(
    "name",
    [
        "recurrence",
        "complex_recurrence",
        "matrix_affine",
    ],
)
def test_adjoint_programs(name: str) -> None:
    check_golden(f"{name}_adjoint.txt", described(adjoint(*ADJOINTS[name])))


@pytest.mark.parametrize("name", ["recurrence", "complex_recurrence"])
def test_second_adjoint_carries_as_few_numbers(name: str) -> None:
    """What stands at the edge keeps entries of the matrix that are equal up to sign equal."""
    first = adjoint(*ADJOINTS[name])
    op = with_edge_input(first.operator)
    wanted = tuple(k for k, leaf in enumerate(op.inputs) if leaf.dtype != torch.bool)
    every = frozenset(range(len(op.outputs)))
    second = derive(op, Request(True, True, wanted, frozenset(), every))
    assert second.matrix_size == first.matrix_size
    assert len(second.carried) == len(first.carried)


def test_every_golden_file_has_its_test() -> None:
    known = {f"{name}.cpp" for name in SOURCES} | {f"{name}_adjoint.txt" for name in ADJOINTS}
    known |= {"affine.triton", "affine.cu", "triton"}  # in engines/triton and here
    assert {path.name for path in golden.GOLDEN.iterdir()} - known == set()


def test_a_changed_line_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "GOLDEN", tmp_path / "golden")
    monkeypatch.setenv("ASSOCSCAN_UPDATE_GOLDEN", "1")
    check_golden("a.cpp", "first\nsecond\n")
    monkeypatch.delenv("ASSOCSCAN_UPDATE_GOLDEN")
    check_golden("a.cpp", "first\nsecond\n")
    with pytest.raises(pytest.fail.Exception, match=r"-second\n\+changed\n(.*\n)*.*GOLDEN=1"):
        check_golden("a.cpp", "first\nchanged\n")
    with pytest.raises(pytest.fail.Exception, match=r"\+first"):
        check_golden("missing.cpp", "first\n")


def test_the_source_compiles(tmp_path: Path) -> None:
    command = compiler_command()
    if not command:
        pytest.skip("no C++ compiler")
    texts = [f"namespace {name} {{\n{op.source('cpp', x)}}}\n" for name, (op, x) in SOURCES.items()]
    (tmp_path / "all.cpp").write_text('#include "scalar.h"\n' + "".join(texts), encoding="utf-8")
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Werror", "-Wno-unused-function"]
    headers = f"-I{Path(cpp_and_cuda.__file__).parent}"
    command = (*command, *flags, headers, str(tmp_path / "all.cpp"))
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("init", [False, True], ids=["", "init"])
@pytest.mark.parametrize("exclusive", [False, True], ids=["inclusive", "exclusive"])
class TestAdjointStructure:
    """What the backward scan carries: matrix entries and cotangents, nothing equal twice."""

    def test_recurrence(self, exclusive: bool, init: bool) -> None:
        """μ[t−1] = a[t] (μ[t] + g[t]): one entry, one cotangent; reads a, h and g alone."""
        derived = adjoint(*ADJOINTS["recurrence"], exclusive, init)
        names = ["a", "b", "cumulative product", "h", "g"]
        assert (derived.matrix_size, derived.carried) == (1, (1,))
        assert {names[c] for c in derived.operator.used_inputs} == {"a", "h", "g"}
        assert derived.saved_state(operator(*ADJOINTS["recurrence"])) == {1}
        combine = [i.op for i in derived.operator.combine.instructions]
        assert sorted(combine) == ["add", "mul", "mul"]

    def test_complex_recurrence(self, exclusive: bool, init: bool) -> None:
        """[[re, im], [−im, re]] is two numbers."""
        derived = adjoint(*ADJOINTS["complex_recurrence"], exclusive, init)
        assert (derived.matrix_size, derived.carried) == (2, (2, 3))
        assert derived.operator.used_inputs == {0, 1, 6, 7, 8, 9}

    def test_matrix_affine(self, exclusive: bool, init: bool) -> None:
        """Aᵀ acts on both columns of the product and on h: 4 entries, not 3·4."""
        derived = adjoint(*ADJOINTS["matrix_affine"], exclusive, init)
        assert (derived.matrix_size, derived.carried) == (4, tuple(range(6)))
        alone = adjoint(only_h(ops.matrix_affine), MATRIX, exclusive, init)
        assert (alone.matrix_size, alone.carried) == (4, (4, 5))

    def test_what_is_one_is_not_carried(self, exclusive: bool, init: bool) -> None:
        derived = adjoint(ops.sum, one(), exclusive, init)
        assert (derived.matrix_size, derived.carried) == (0, (0,))
        assert derived.operator.used_inputs == {2}


def test_cuda_source() -> None:
    check_golden("affine.cu", ops.affine.source("cuda"))


def test_unknown_target() -> None:
    with pytest.raises(ValueError, match=r"'metal'.*triton, cuda, cpp"):
        ops.affine.source("metal")


def pair(left: Any, right: Any) -> Any:
    return left[0] + right[0], left[1] + right[1]


@pytest.mark.parametrize(
    "op",
    [
        ops.matrix_affine,
        ops.argmax,
        Monoid(pair, identity=lambda a, b: (0.0, 0)),
        Monoid(pair, identity=(0.0, torch.zeros(2))),
        Monoid(torch.add, name="sum of all", lift=lambda *xs: sum(xs)),
    ],
    ids=["matrices", "no identity", "callable", "vector", "lift(*xs)"],
)
def test_an_example_is_needed(op: Monoid) -> None:
    with pytest.raises(TypeError, match=f"{op.name}.*like="):
        op.source("cpp")


@pytest.mark.parametrize("name", ops.__all__)
@pytest.mark.parametrize("target", ["cpp", "triton", "cuda"])
def test_every_operator_is_shown_or_needs_an_example(name: str, target: str) -> None:
    """Whatever the reason why it cannot be guessed what an operator scans."""
    op = getattr(ops, name)
    try:
        text = op.source(target)
    except TypeError as error:
        assert f"{name!r} needs like=" in str(error)
        with pytest.raises(TypeError, match="needs like="):
            op.check()
    else:
        assert "s0" in text or "def " in text


def test_which_examples_are_needed() -> None:
    """`last_valid` lifts a number and a bool, which its parameters do not say."""
    with pytest.raises(TypeError, match=r"'last_valid' needs like=.*float32.*bool"):
        ops.last_valid.source("cpp")
    assert "struct State" in ops.last_valid.source("cpp", like=(one(), one(torch.bool)))


def test_dtypes_without_an_example() -> None:
    """float32, int64 and bool after the identity's types; float32 for what lift takes."""
    mixed = Monoid(
        lambda left, right: (left[0] + right[0], left[1] | right[1], left[2] * right[2]),
        identity=(0, False, 1.0),
        name="mixed",
    )
    assert "struct State { int64_t s0; int32_t s1; float s2; };" in mixed.source("cpp")
    both = Monoid(lambda left, right: left & right, identity=True, name="both")
    assert "struct State { uint8_t s0; };" in both.source("cpp")
    assert ops.welford.source("cpp") == ops.welford.source("cpp", like=one())
    assert "double" in ops.welford.source("cpp", like=one(torch.float64))


def test_an_operator_that_cannot_be_generated() -> None:
    op = Monoid(lambda x, y: torch.fft.fft(x).real + y, name="spectral", element_ndim=1)
    with pytest.raises(BackendError, match=r"'spectral'.*fft"):
        op.source("cpp", like=one(torch.float32, 4))


def test_source_does_not_depend_on_the_default_dtype() -> None:
    """An example that is not given has float32 numbers for the parameters of `lift`."""
    lifted = Monoid(torch.add, lift=lambda a, b: a * b, name="source_lifted")
    expected = lifted.source("cpp")
    torch.set_default_dtype(torch.float64)
    try:
        assert lifted.source("cpp") == expected
    finally:
        torch.set_default_dtype(torch.float32)


def pairs(left: Any, right: Any) -> Any:
    return right[0] @ left[0], right[0] @ left[1] + right[1]


def test_the_shapes_of_an_identity_of_tensors_are_the_example() -> None:
    identity = (torch.eye(3), torch.zeros(3))
    told = Monoid(pairs, identity=identity, element_ndim=(2, 1))
    told.check()
    assert told.source("cpp") == told.source("cpp", like=identity)
    Monoid(torch.add, identity=torch.tensor(0.0)).check()
    with pytest.raises(MonoidError):
        Monoid(pairs, identity=(torch.eye(3), torch.ones(3)), element_ndim=(2, 1)).check()


SAID = (
    (Monoid(pairs, element_ndim=(2, 1)), "like=(torch.eye(3), torch.zeros(3)):"),
    (Monoid(pairs, identity=(torch.eye(3), 0.0), element_ndim=(2, 1)), "torch.zeros(3)):"),
    (Monoid(torch.matmul, name="m", element_ndim=2, identity=lambda s: torch.eye(s[-1])),
     "like=torch.eye(3):"),
    (Monoid(pairs, element_ndim=(0, 3)), "like=(torch.zeros(()), torch.zeros(3, 3, 3)):"),
    (Monoid(pairs, element_ndim=2), "like=, example leaves of xs:"),
)  # fmt: skip


@pytest.mark.parametrize(("op", "said"), SAID)
def test_an_example_is_said(op: Monoid, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        op.check()
