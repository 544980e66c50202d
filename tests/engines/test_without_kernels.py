"""What `auto` does where a kernel cannot be compiled or run: backward, warm calls, transforms.

Forward scans then run through the user's functions; all else through `engines.eager.interpreted`.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from processes import needs_compiler
from table import CASES, FLAGS, LAYOUTS, TWO_FLAGS, Engine, Problem, check_all
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from assocscan import (
    BackendError,
    FallbackWarning,
    associative_scan,
    cumsum,
    explain,
    monoid,
    monoids,
    ops,
    reduce,
)
from assocscan.autodiff.evaluate import evaluate
from assocscan.engines.base import commands
from assocscan.engines.base import fallback_warning as fallback
from assocscan.engines.cpu import prepare as cpu
from assocscan.engines.eager import program_interpreter as interpreted
from assocscan.program.dtypes import EXACT_DTYPES
from assocscan.program.program_builder import Builder
from assocscan.runtime import backends as engines
from assocscan.runtime import executable_cache as executables
from assocscan.runtime.native import runner

pytestmark = needs_compiler
CPU = Engine("cpu")


def forget() -> None:
    for known in monoids().values():
        known.calls.clear()
        known.reductions.clear()
    fallback._WARNED.clear()
    executables._PREPARED.clear()


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend "cpu" runs torch operations in place of kernels."""
    forget()
    monkeypatch.setitem(engines.SCALARS, "cpu", interpreted.prepare)
    yield
    forget()


@pytest.fixture
def without_adjoints(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel of a backward or forward derivative can be compiled."""
    load = cpu.load

    def refuse(source: str, *rest: Any) -> Any:
        if "(adjoint" in source or "(tangent" in source:
            raise BackendError("the disk is full")
        return load(source, *rest)

    forget()
    monkeypatch.setattr(cpu, "load", refuse)
    yield
    forget()


@pytest.mark.thinned(7)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("by_torch")
def test_programs_by_torch_operations(case: str) -> None:
    check_all(CPU, Problem(case, (2, 5, 3), axis=1))
    for layout in LAYOUTS:
        check_all(CPU, Problem(case, (4, 6), axis=0, layout=layout), TWO_FLAGS)
    for length in (0, 1, 2):
        check_all(CPU, Problem(case, (3, length), axis=1), TWO_FLAGS)
    for bounds in ((0, 5, 5, 6, 9), (0, 9)):
        check_all(CPU, Problem(case, (2, 9), axis=1, bounds=bounds), FLAGS)


@pytest.mark.parametrize("kind", ["u8", "i8", "i16", "i32", "i64"])
def test_integers_as_in_kernels(kind: str) -> None:
    """Division by zero and by −1, and shifts by anything."""
    dtype = EXACT_DTYPES[kind]
    info = torch.iinfo(dtype)
    a = torch.tensor([0, 1, 7, 100, info.min, info.max], dtype=dtype)[:, None]
    b = torch.tensor([0, 1, 3, info.max, info.min], dtype=dtype)[None, :]
    if info.min < 0:
        b = torch.cat([b, torch.tensor([[-1, -3]], dtype=dtype)], 1)
    for op in ("floordiv", "truncdiv", "remainder", "fmod", "shl", "shr"):
        builder = Builder((kind, kind))
        (got,) = evaluate(builder.build([builder.emit(op, 0, 1)]), [a, b], EXACT_DTYPES)
        for i, x in enumerate(a.flatten().tolist()):
            for k, n in enumerate(b.flatten().tolist()):
                want = torch.tensor(exact(op, x, n, info.bits)).to(dtype)
                assert got[i, k] == want, (op, x, n, got[i, k], want)


def exact(op: str, a: int, b: int, bits: int) -> int:
    """By Python's integers, wrapped afterwards to 64 bits."""
    if op in ("shl", "shr"):
        if 0 <= b < bits:
            return wrapped(a << b) if op == "shl" else a >> b
        return -1 if op == "shr" and a < 0 else 0
    if b == 0:
        return 0
    if op == "floordiv":
        return wrapped(a // b)
    if op == "remainder":
        return a % b
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return wrapped(quotient) if op == "truncdiv" else a - quotient * b


def wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def gradients(backend: str, create_graph: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(3, 20, generator=generator, dtype=torch.float64) for _ in range(2))
    a, b = a.requires_grad_(), b.requires_grad_()
    _, h = associative_scan(ops.affine, (a, b), 1, backend=backend)
    found = list(torch.autograd.grad(h.square().sum(), (a, b), create_graph=create_graph))
    if create_graph:
        found += torch.autograd.grad(sum(g.sin().sum() for g in found), (a, b))
    return found


@pytest.mark.usefixtures("without_adjoints")
@pytest.mark.parametrize("twice", [False, True])
def test_backward_survives_what_forward_does(twice: bool) -> None:
    """Once and twice differentiated, with one warning per operator."""
    with pytest.warns(FallbackWarning, match="adjoint.*the disk is full") as caught:
        got = [gradients("auto", twice) for _ in range(2)]
    assert len({str(w.message) for w in caught}) == len(caught)
    for one in got:
        for g, want in zip(one, gradients("eager", twice), strict=True):
            torch.testing.assert_close(g, want)


@pytest.mark.usefixtures("without_adjoints")
def test_a_named_backend_raises_in_backward() -> None:
    with pytest.raises(BackendError, match="the disk is full"):
        gradients("cpu")


@pytest.mark.usefixtures("without_adjoints")
def test_explain_tells_a_backward_that_fails_from_the_forward(
    recwarn: pytest.WarningsRecorder,
) -> None:
    a, b = (torch.rand(3, 20, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for backend, said in (("auto", "eager; "), ("cpu", "raises BackendError: ")):
        plan = explain(ops.affine, (a, b), 1, backend=backend)
        assert plan.engine.startswith("cpu")
        assert plan.gradient.startswith(said) and "the disk is full" in plan.gradient
        associative_scan(ops.affine, (a, b), 1, backend=backend)
    assert not recwarn.list


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel can be compiled."""

    def refuse(*_: Any) -> Any:
        raise BackendError("the disk is full")

    forget()
    monkeypatch.setattr(cpu, "load", refuse)
    yield
    forget()


@pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")
@pytest.mark.usefixtures("without_kernels")
def test_results_under_vmap_have_memory_of_their_own() -> None:
    """One step is the same as its result, and as its final carry: the caller may write to each."""
    x = torch.rand(3, 1, dtype=torch.float64)
    before = x.clone()

    def calls(x: Tensor) -> tuple[Tensor, ...]:
        _, h = associative_scan(ops.affine, (x, x))
        y, last = associative_scan(ops.sum, x, return_final=True)
        return cumsum(x, 0), reduce(ops.sum, x), h, y, last

    results = torch.vmap(calls)(x)
    expected = [t.clone() for t in results]
    for k, written in enumerate(results):
        assert written.flatten().equal(before.flatten())
        written.fill_(-1)
        assert x.equal(before)
        for other, value in zip(results[k + 1 :], expected[k + 1 :], strict=True):
            assert other.equal(value)

    leaf = x.clone().requires_grad_()
    y = torch.vmap(lambda x: cumsum(x, 0))(leaf)
    y.square_()  # no leaf, so it may be changed in place
    cotangent = torch.rand_like(y)
    (found,) = torch.autograd.grad(y, leaf, cotangent)
    torch.testing.assert_close(found, 2 * before * cotangent)
    assert leaf.equal(before)


@pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")
@pytest.mark.usefixtures("without_kernels")
def test_compiled_results_have_the_declared_strides() -> None:
    """A compiled graph was made for the strides of a kernel's results."""
    x = torch.rand(5, 4, 3).transpose(1, 2)
    compiled = torch.compile(lambda x: cumsum(x, 0) * 1)
    torch.testing.assert_close(compiled(x), x.cumsum(0))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.usefixtures("without_adjoints")
def test_transforms_survive() -> None:
    """Reverse and forward mode, and vmap: the operation of torch falls back by itself."""

    def loss(x: Tensor) -> Tensor:
        y: Tensor = associative_scan(ops.prod, x, 0)
        return y.square().sum()

    x = torch.rand(4, 7, dtype=torch.float64) + 0.5
    with pytest.warns(FallbackWarning, match="the disk is full"):
        got = torch.vmap(torch.func.grad(loss))(x)
        _, moved = torch.func.jvp(loss, (x[0],), (torch.ones(7, dtype=torch.float64),))
    for row, g in zip(x, got, strict=True):
        again = row.clone().requires_grad_()
        want = torch.autograd.grad(again.cumprod(0).square().sum(), again)[0]
        torch.testing.assert_close(g, want)
    torch.testing.assert_close(moved, got[0].sum())


class Watching(TorchDispatchMode):
    """Sees every operation; inside, a scan is the operation of torch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_operation_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise BackendError("the disk is full")

    forget()
    monkeypatch.setattr(cpu, "load", refuse)
    x = torch.arange(1, 6, dtype=torch.float64)
    with Watching():
        with pytest.warns(FallbackWarning, match="'prod'.*the disk is full"):
            assert associative_scan(ops.prod, x).equal(x.cumprod(0))
        with pytest.raises(BackendError, match="the disk is full"):
            associative_scan(ops.prod, x, backend="cpu")
    forget()


def test_a_warm_call_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, say: `auto` runs eagerly this time, by the kernel the next."""
    op = monoid(lambda a, b: a + b, identity=0, name="fallback_warm")
    x = torch.arange(6.0)
    for backend in ("auto", "cpu"):
        for _ in range(2):
            associative_scan(op, x, backend=backend)
    assert op.calls
    with monkeypatch.context() as patch:
        patch.setattr(commands, "NO_MEMORY", 0)  # what every kernel returns
        patch.setattr(runner, "call", runner.never)
        patch.setattr(runner, "module", None)
        with pytest.warns(FallbackWarning, match="no memory left"):
            assert associative_scan(op, x).equal(x.cumsum(0))
        with pytest.raises(BackendError, match="no memory left"):
            associative_scan(op, x, backend="cpu")
    assert associative_scan(op, x).equal(x.cumsum(0))


def test_explain_says_why_a_scan_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise BackendError("the disk is full")

    monkeypatch.setattr(cpu, "load", refuse)
    op = monoid(lambda a, b: a + 2 * b - b, name="fallback_explained")
    plan = explain(op, torch.ones(5))
    assert plan.engine == "eager" and plan.why == "the disk is full"
    with pytest.raises(BackendError, match="the disk is full"):
        explain(op, torch.ones(5), backend="cpu")
