"""`reduce` on every engine: values, gradients, and that nothing but the result is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from table import CASES, Engine, Flags, Problem, expected, options
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from assocscan import ScanTypeError, ScanValueError, monoid, ops, reduce, with_lower
from assocscan.program.operator import Operator
from assocscan.runtime import executable_cache as executables
from assocscan.testing import assert_scan_close, reference_scan

pytestmark = pytest.mark.thinned(4)

F64 = torch.float64
FLAGS = (Flags(final=True), Flags(reverse=True, init=True, final=True))


def arguments(problem: Problem, flags: Flags, init: Any) -> dict[str, Any]:
    given = options(problem, flags, init)
    return {k: v for k, v in given.items() if k not in ("inclusive", "return_final")}


def check(engine: Engine, problem: Problem, flags: Flags) -> None:
    xs, init = problem.inputs(engine.device)
    result = reduce(
        CASES[problem.case].op, xs, **arguments(problem, flags, init), backend=engine.name
    )
    assert_scan_close(result, expected(problem, flags)[1], problem.steps)


@pytest.mark.thinned(9)
@pytest.mark.parametrize("shape", [(3, 1), (3, 65), (2, 200), (2, 66, 9)], ids=str)
@pytest.mark.parametrize("case", ["bicyclic", "matrix", "band", "bfloat16"])
def test_ordered(engine: Engine, case: str, shape: tuple[int, ...]) -> None:
    if engine.repeats(shape[1]) or (engine.interpreted and case == "matrix"):
        return
    flags = FLAGS if case != "bfloat16" else FLAGS[1:]
    for each in flags:
        problem = Problem(case, shape, 1)
        if case == "bfloat16":
            xs, init = problem.inputs(engine.device)
            op = CASES[case].op
            result = reduce(op, xs, **arguments(problem, each, init), backend=engine.name)
            assert [t.dtype for t in result] == [torch.bfloat16] * 2
            assert_scan_close(result, expected(problem, each)[1], problem.steps)
        else:
            check(engine, problem, each)


@pytest.mark.parametrize("bounds", [(0, 0, 3, 3, 140, 141), (0, 64, 128, 130)], ids=str)
def test_packed_sequences(engine: Engine, bounds: tuple[int, ...]) -> None:
    for flags in FLAGS:
        check(engine, Problem("bicyclic", (2, bounds[-1]), 1, bounds=bounds), flags)
    if not engine.interpreted:
        check(engine, Problem("bicyclic", (bounds[-1], 9), 0, bounds=bounds), FLAGS[1])


def test_of_a_long_row(engine: Engine) -> None:
    """Cut into chunks on every engine that cuts."""
    length = 300 if engine.interpreted else 13_001  # two threads share more than 12288 steps
    for flags in FLAGS:
        check(engine, Problem("bicyclic", (1, length), 1), flags)


def test_of_nothing(engine: Engine) -> None:
    for flags in FLAGS:
        check(engine, Problem("bicyclic", (3, 0), 1), flags)
        check(engine, Problem("bicyclic", (0, 5), 1), flags)
    with pytest.raises(ScanValueError, match="identity"):
        reduce(CASES["band"].op, Problem("band", (3, 0), 1).inputs()[0], 1, backend=engine.name)


@pytest.mark.parametrize("reverse", [False, True])
def test_lower_is_that_of_the_last_output(engine: Engine, reverse: bool) -> None:
    """A lower of the state, and one that takes the inputs at the last step."""
    x = engine.put(torch.randn(3, 70, generator=torch.Generator().manual_seed(0)))
    mean = reduce(ops.mean, x, 1, reverse, backend=engine.name)
    torch.testing.assert_close(mean.cpu(), x.cpu().mean(1))
    bounds = torch.tensor([0, 3, 70])
    problem = Problem("brackets", (3, 70), 1, bounds=(0, 3, 70))
    xs, _ = problem.inputs(engine.device)
    op = CASES["brackets"].op
    for offsets, ends in ((None, [70]), (bounds, [3, 70])):
        ys = reference_scan(op, xs.cpu(), 1, reverse, offsets=offsets)
        last = [0, *ends[:-1]] if reverse else [end - 1 for end in ends]
        result = reduce(op, xs, 1, reverse, offsets=offsets, backend=engine.name)
        shown = tree_map(lambda y, last=last: y[:, last].movedim(1, 0), ys)
        result = result if offsets is not None else tree_map(lambda y: y[None], result)
        assert_scan_close(result, shown, 70)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_lower_of_inputs_needs_a_last_step() -> None:
    x = torch.zeros(0, dtype=torch.int8)
    with pytest.raises(ScanValueError, match="last step"):
        reduce(CASES["brackets"].op, x)
    empty = torch.tensor([0, 0])  # not to be read where a mode sees each operation
    with Passing(), pytest.raises(ScanValueError, match="last step"):
        reduce(CASES["brackets"].op, x, offsets=empty)
    with Passing():
        none = reduce(CASES["brackets"].op, x, offsets=empty[:1])
    assert all(t.shape == (0,) for t in tree_leaves(none))
    with pytest.raises(ScanValueError, match="unknown backend"):
        reduce(ops.sum, x, backend="gpu")
    with pytest.raises(ScanTypeError, match="tensor"):
        reduce(ops.sum, [1, 2])


def test_gradient_that_reads_no_input(engine: Engine) -> None:
    x = engine.put(torch.rand(2, 66)).requires_grad_()
    (gradient,) = torch.autograd.grad(reduce(ops.sum, x, 1, backend=engine.name).sum(), x)
    assert torch.equal(gradient.cpu(), torch.ones(2, 66))


@pytest.mark.parametrize("kind", ["plain", "packed", "init"])
def test_repeated_reductions_of_16_bits(engine: Engine, kind: str) -> None:
    """Kernels write totals in float32. Repeated calls round them too: then at another address, of
    other strides, with a gradient."""
    x = torch.randn(66, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    given: dict[str, Any] = {}
    if kind == "init":
        given["init"] = engine.put(torch.tensor(2.0))
    if kind == "packed":
        given["offsets"] = engine.put(torch.tensor([0, 3, 3, 66]))
    want, rounding = x.double(), torch.finfo(x.dtype).eps / 2
    if kind == "packed":
        want = torch.stack([want[a:b].sum(0) for a, b in ((0, 3), (3, 3), (3, 66))])
    else:
        want = want.sum(0) + (2 if kind == "init" else 0)
    moved = engine.put(torch.cat([x[:1], x]))[1:]
    tensors = [*[engine.put(x)] * 3, moved, engine.put(x.mT.contiguous()).mT]
    for t in (*tensors, *[engine.put(x).requires_grad_()] * 3):
        y = reduce(ops.sum, t, backend=engine.name, **given)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.detach().cpu().double(), want, rtol=rounding, atol=rounding)
        if t.requires_grad:
            (gradient,) = torch.autograd.grad(y, t, torch.full_like(y, 3.0))
            assert torch.equal(gradient.cpu(), torch.full_like(x, 3.0))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bounds", [None, (0, 3, 3, 66)], ids=str)
def test_gradient(engine: Engine, reverse: bool, bounds: tuple[int, ...] | None) -> None:
    """Of inputs and init, by the loop; one pair of leaves, so that h needs the states saved."""
    if engine.name == "multipass" and reverse:
        return
    generator = torch.Generator().manual_seed(3)
    sequences = () if bounds is None else (len(bounds) - 1,)
    shapes = [(2, 66), (2, 66), (*sequences, 2), (*sequences, 2)]
    leaves = [torch.rand(s, generator=generator, dtype=F64) for s in shapes]
    offsets = None if bounds is None else torch.tensor(bounds)
    cotangents = [torch.randn(shapes[2], generator=generator, dtype=F64) for _ in range(2)]

    def gradients(last: Any, given: list[Tensor], put: Any) -> list[Tensor]:
        given = [put(t).requires_grad_() for t in given]
        a, b, *init = given
        results = last(ops.affine, (a, b), tuple(init))
        return torch.autograd.grad(results, given, [put(c) for c in cotangents])

    def by_engine(op: Any, xs: Any, init: Any) -> Any:
        return reduce(op, xs, 1, reverse, init=init, offsets=offsets, backend=engine.name)

    def by_loop(op: Any, xs: Any, init: Any) -> Any:
        return reference_scan(op, xs, 1, reverse, init=init, return_final=True, offsets=offsets)[1]

    found = gradients(by_engine, leaves, engine.put)
    wanted = gradients(by_loop, leaves, lambda t: t.clone())
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.cpu(), want)


@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_gradient_by_the_adjoint_of_large_matrices(backend: str) -> None:
    """Of more components than a derived derivative carries, and of none (init alone)."""
    generator = torch.Generator().manual_seed(4)
    A = 0.4 * torch.randn(6, 5, 5, generator=generator, dtype=F64)
    cotangent = torch.randn(5, 5, generator=generator, dtype=F64)
    A.requires_grad_()
    (got,) = torch.autograd.grad(reduce(ops.matmul, A, backend=backend), A, cotangent)
    (want,) = torch.autograd.grad(torch.linalg.multi_dot([*A.flip(0)]), A, cotangent)
    torch.testing.assert_close(got, want)


def test_matrices_of_the_matrix_engine(engine: Engine) -> None:
    """8×8: whole-matrix kernels on the engines of GPUs, in one walk and in chunks."""
    generator = torch.Generator().manual_seed(5)
    A = 0.3 * torch.randn(1, 70, 8, 8, generator=generator, dtype=F64)
    b = torch.randn(1, 70, 8, generator=generator, dtype=F64)
    if engine.interpreted:
        A, b = A[:, :20], b[:, :20]
    vector = with_lower(ops.matrix_affine, lambda state: state[1])
    if engine.name in ("cpu", "cuda"):  # compiled for its 8×8 products by other tests; too large
        pytest.skip("no kernels of whole matrices")
    for reverse in (False, True):
        h = torch.zeros(8, dtype=F64)
        for t in reversed(range(A.shape[1])) if reverse else range(A.shape[1]):
            h = A[0, t] @ h + b[0, t]
        last = reduce(vector, engine.put((A, b)), 1, reverse, backend=engine.name)
        torch.testing.assert_close(last[0].cpu(), h)


def test_second_derivative_and_init_alone() -> None:
    a = torch.rand(9, dtype=F64)
    h = torch.tensor(0.7, dtype=F64, requires_grad=True)
    one = torch.ones((), dtype=F64)
    _, last = reduce(ops.affine, (a, a), init=(one, h))
    (gradient,) = torch.autograd.grad(last, h)
    torch.testing.assert_close(gradient, a.prod())
    x = torch.rand(7, dtype=F64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: reduce(ops.prod, x), x)


def test_raw_callables() -> None:
    x = torch.tensor([[5.0, 3.0], [1.0, 2.0]])
    assert reduce(lambda left, right: left - 0 * right, x, 1).tolist() == [5, 1]
    assert reduce(lambda left, right: left - 0 * right, x, 1, True).tolist() == [3, 2]
    eager = reduce(lambda left, right: left.sort(1).values + right, x, 1, backend="eager")
    assert eager.tolist() == [8, 3]


class _Spy:
    """The scans that an engine is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operators: list[Operator] = []
        original = executables.prepare

        def prepare(backend: str, spec: Any, tensors: Any) -> Any:
            if spec.operator not in self.operators:
                self.operators.append(spec.operator)
            return original(backend, spec, tensors)

        monkeypatch.setattr(executables, "prepare", prepare)


def test_no_output_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a state, but those that a derivative reads."""
    spy = _Spy(monkeypatch)
    xs = (torch.rand(3, 40, dtype=F64), torch.rand(3, 40, dtype=F64))
    reduce(ops.affine, xs, 1)
    assert [len(op.outputs) for op in spy.operators] == [0]
    spy.operators.clear()
    x = torch.rand(3, 40, dtype=F64).requires_grad_()
    reduce(ops.sum, x, 1).sum().backward()
    assert [len(op.outputs) for op in spy.operators] == [0, 1]  # then its gradient
    assert torch.equal(x.grad, torch.ones_like(x))


def test_results_do_not_alias_inputs() -> None:
    x = torch.randn(3, 1)
    for backend in ("eager", "cpu"):
        result = reduce(ops.sum, x, 1, backend=backend)
        result.add_(1)
        assert not torch.equal(result, x[:, 0])
    double = monoid(lambda left, right: left + right, name="reduce_twice", lower=lambda s: (s, s))
    first, second = tree_leaves(reduce(double, x, 1))
    first.add_(1)
    assert torch.equal(second, x[:, 0])
