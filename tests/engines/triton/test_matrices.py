"""Elements that are matrices of 8 to 64: the engine that holds each leaf as a tile."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from gpu_targets import run_compiling
from repository import SUPPORT
from table import FLAGS, GPU, TWO_FLAGS, Engine, Flags, sampled
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from assocscan import BackendError, FallbackWarning, Monoid, associative_scan, ops
from assocscan.api import associative_scan as api
from assocscan.api.bind_arguments import bind
from assocscan.engines.base import fallback_warning as fallback
from assocscan.engines.triton.matrix import prepare as matrix_scan
from assocscan.program.matrix_operator import MatrixOperator
from assocscan.runtime import backends as engines
from assocscan.runtime import executable_cache as executables
from assocscan.runtime.backends import availability
from assocscan.testing import assert_scan_close, reference_scan

pytestmark = pytest.mark.thinned(7)

BACKENDS = ("triton", "multipass")
MATMUL_ADJOINT, AFFINE_ADJOINT = ops.matmul.adjoint[0], ops.matrix_affine.adjoint[0]
put = Engine("triton", GPU).put


@pytest.fixture(autouse=True)
def only_by_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MatrixOperator]]:
    """Fails a test that never reached the engine; yields the operators that did."""
    reason = availability()["triton"]
    if reason is not None:
        pytest.skip(reason)
    seen: list[MatrixOperator] = []
    prepare = matrix_scan.prepare

    def noted(spec: Any, *tensors: Any) -> Any:
        seen.append(spec.operator)
        return prepare(spec, *tensors)

    executables._PREPARED.clear()
    monkeypatch.setattr(matrix_scan, "prepare", noted)
    monkeypatch.setitem(engines.MATRICES, "triton", noted)
    yield seen
    executables._PREPARED.clear()


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Matrices whose products neither grow nor vanish, and vectors of a like size."""
    return (torch.randn(shape, dtype=torch.float64, device="cpu") / shape[-1] ** 0.5).to(dtype)


def inputs(op: Any, batch: tuple[int, ...], d: int, dtype: torch.dtype = torch.float32) -> Any:
    leaves = {
        id(ops.matmul): [(d, d)],
        id(MATMUL_ADJOINT): [(d, d), (d, d)],
        id(ops.matrix_affine): [(d, d), (d,)],
        id(AFFINE_ADJOINT): [(d, d), (d, d), (d,)],
    }.get(id(op), [(d, d)])
    drawn = tuple(draw((*batch, *shape), dtype) for shape in leaves)
    return drawn if len(drawn) > 1 else drawn[0]


def check(op: Any, xs: Any, axis: int = 0, *, backend: str, **options: Any) -> None:
    init = put(options.get("init"))
    got = associative_scan(op, put(xs), axis, backend=backend, **{**options, "init": init})
    assert_scan_close(got, reference_scan(op, xs, axis, **options), length=100)


def options_of(flags: Flags, init: Any, bounds: tuple[int, ...] | None = None) -> dict[str, Any]:
    return {
        "reverse": flags.reverse,
        "inclusive": flags.inclusive,
        "init": init if flags.init else None,
        "return_final": flags.final,
        "offsets": None if bounds is None else torch.tensor(bounds),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", [ops.matmul, ops.matrix_affine], ids=lambda op: op.name)
def test_flags(only_by_tiles: list[MatrixOperator], op: Any, backend: str) -> None:
    xs, init = inputs(op, (2, 7), 8), inputs(op, (2,), 8)
    for flags in FLAGS if op is ops.matrix_affine else TWO_FLAGS:
        check(op, xs, 1, backend=backend, **options_of(flags, init))
    assert only_by_tiles


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 14])
def test_lengths(length: int, backend: str) -> None:
    for flags in TWO_FLAGS:
        xs, init = inputs(ops.matrix_affine, (length, 2), 8), inputs(ops.matrix_affine, (2,), 8)
        check(ops.matrix_affine, xs, 0, backend=backend, **options_of(flags, init))
    check(ops.matmul, inputs(ops.matmul, (length,), 8), backend=backend, return_final=True)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d", [16, 32, 64])
def test_sizes(only_by_tiles: list[MatrixOperator], d: int, backend: str) -> None:
    """64 sums its products in slices, with the carry in scratch."""
    for op in (ops.matmul, ops.matrix_affine, AFFINE_ADJOINT):
        options: dict[str, Any] = {"return_final": True} if op.lower is None else {}
        check(op, inputs(op, (2, 5), d), 1, backend=backend, **options)
    flags = Flags(reverse=True, inclusive=False, init=True, final=True)
    init = inputs(ops.matrix_affine, (2,), d)
    xs = inputs(ops.matrix_affine, (2, 5), d)
    check(ops.matrix_affine, xs, 1, backend=backend, **options_of(flags, init))
    assert only_by_tiles


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(only_by_tiles: list[MatrixOperator], dtype: torch.dtype, backend: str) -> None:
    for d, flags in product((8, 16), TWO_FLAGS):
        xs = inputs(ops.matrix_affine, (6,), d, dtype)
        init = inputs(ops.matrix_affine, (), d, dtype)
        check(ops.matrix_affine, xs, backend=backend, **options_of(flags, init))
    _, final = associative_scan(
        ops.matmul, inputs(ops.matmul, (3,), 8, dtype).to(GPU), backend=backend, return_final=True
    )
    assert final.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert only_by_tiles


@pytest.mark.thinned(7)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bounds", [(0,), (0, 0, 0), (0, 0, 3, 3, 11, 12, 12), (0, 20)], ids=str)
def test_packed_sequences(bounds: tuple[int, ...], backend: str) -> None:
    for flags in FLAGS[::5]:
        xs = inputs(ops.matrix_affine, (2, bounds[-1]), 8)
        init = inputs(ops.matrix_affine, (len(bounds) - 1, 2), 8)
        check(ops.matrix_affine, xs, 1, backend=backend, **options_of(flags, init, bounds))


@pytest.mark.parametrize("bounds", [None, (0, 17, 17, 60), (*range(8), 60)], ids=str)
def test_totals_in_chunks(
    monkeypatch: pytest.MonkeyPatch, only_by_tiles: list[MatrixOperator], bounds: Any
) -> None:
    """60 steps are 10 chunks, their totals 4 chunks again; and it ends, where many sequences are
    about as many chunks."""
    monkeypatch.setattr(matrix_scan, "LONG_AXIS", 4)
    xs = inputs(ops.matrix_affine, (60,), 8)
    for flags in TWO_FLAGS:
        init = inputs(ops.matrix_affine, () if bounds is None else (len(bounds) - 1,), 8)
        check(ops.matrix_affine, xs, backend="multipass", **options_of(flags, init, bounds))
    assert len(only_by_tiles) >= 2 * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_identity(backend: str) -> None:
    """Inclusive scans never need one, and no chunk is combined with one either."""
    op = Monoid(lambda left, right: right @ left, element_ndim=2, name="matrices_no_identity")
    xs = draw((9, 8, 8))
    xs[0, 0, 0] = torch.inf  # I @ x is NaN off the diagonal of an infinite x
    xs[1:] = torch.eye(8)
    xs[1:, 1:, 0] = xs[1:, 0, 1:] = 0
    check(op, draw((9, 8, 8)), backend=backend, return_final=True)
    check(op, draw((9, 8, 8)), backend=backend, inclusive=False, init=draw((8, 8)))
    first = associative_scan(op, put(xs), backend=backend)[0]
    assert torch.equal(first.cpu(), xs[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend: str) -> None:
    """Transposed elements, an axis that is not the first, leaves that broadcast, odd distances."""
    A, b = draw((2, 2, 7, 8, 8)), draw((2, 2, 7, 8))
    check(ops.matrix_affine, (A.mT, b), 2, backend=backend)
    check(ops.matrix_affine, (A.permute(2, 4, 0, 1, 3).contiguous().permute(2, 3, 0, 4, 1), b), 2,
          backend=backend)  # fmt: skip
    check(ops.matrix_affine, (A, b), 0, backend=backend, reverse=True)
    check(ops.matrix_affine, (A[:1, :, :], b), 2, backend=backend, return_final=True)
    check(
        ops.matrix_affine, (A[:, :, :1].expand_as(A), b[..., :1].expand_as(b)), 2, backend=backend
    )
    wide = draw((9, 8, 40)) * 2
    check(ops.matmul, wide[..., ::5], backend=backend)
    check(ops.matmul, wide[..., 3:11], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_64_bit_indices(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(matrix_scan, "is_wide", lambda layout, problem: True)
    for d in (8, 64):
        xs = inputs(ops.matrix_affine, (5, 2), d)
        check(ops.matrix_affine, xs, backend=backend, reverse=True, return_final=True)


def star(left: Tensor, right: Tensor) -> Tensor:
    """(I + left) (I + right) − I, with a detour through constants."""
    return (2 * left + right * 2.0 - -(left @ right) * 2) * 0.5


OPERATORS = {
    "star": star,
    "transposed": lambda left, right: (left.mT @ right.mT).mT,
    "halved": lambda left, right: right.addmm(right, left) - right - 0.5 * (right @ left),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(only_by_tiles: list[MatrixOperator], name: str) -> None:
    op = Monoid(OPERATORS[name], element_ndim=2, name=f"matrices_{name}")
    for d in (8, 64):
        check(op, draw((5, d, d)) / 4, backend="triton")
        check(op, draw((5, d, d)) / 4, backend="multipass")
    assert only_by_tiles


def rank_one(left: Any, right: Any) -> Any:
    """Rectangular: X ← A X + u vᵀ as (A [m, m], X [m, n]), and the sum of X's columns."""
    A1, X1, s1 = left
    A2, X2, s2 = right
    return A2 @ A1, A2 @ X1 + X2, A2 @ s1 + s2


@pytest.mark.parametrize("m, n", [(8, 16), (16, 8), (32, 64), (64, 8)])
def test_rectangular(only_by_tiles: list[MatrixOperator], m: int, n: int) -> None:
    op = Monoid(
        rank_one,
        element_ndim=(2, 2, 1),
        name="matrices_rank_one",
        lower=lambda state: state[2:0:-1],
    )
    xs = (draw((5, m, m)), draw((5, m, n)), draw((5, m)))
    for backend in BACKENDS:
        check(op, xs, backend=backend)
    assert {seen.shown for seen in only_by_tiles} >= {(2, 1)}


@pytest.mark.parametrize(
    "fn, shape, dtype",
    [
        (lambda left, right: right @ left, (4, 4), torch.float32),
        (lambda left, right: right @ left, (12, 12), torch.float32),
        (lambda left, right: right @ left, (8, 8), torch.complex64),
        (lambda left, right: right + left, (8, 8), torch.int64),
        (lambda left, right: torch.maximum(right, left), (8, 8), torch.float32),
        (lambda left, right: torch.add(right, left, alpha=2) - left, (8,), torch.float32),
    ],
)
def test_others_have_no_matrix_operator(fn: Any, shape: tuple[int, ...], dtype: Any) -> None:
    op = Monoid(fn, element_ndim=len(shape), name="matrices_others")
    assert op.of(torch.ones(shape).to(dtype))[0].matrices is None


def test_cpu_tensors_run_as_before(only_by_tiles: list[MatrixOperator]) -> None:
    """`auto` and `cpu` on CPU tensors: unrolled while that is short, then eagerly."""
    for backend in ("auto", "cpu"):
        call = bind(ops.matmul, torch.ones(4, 8, 8), 0, False, True, None, False, None)
        assert call.traced.operator is not None
        spec, _ = call.scan(call.traced.operator)
        assert engines.preparer(backend, spec) is engines.cpu.prepare
    with pytest.raises(BackendError, match="unrolls to more than"):
        associative_scan(ops.matmul, draw((4, 32, 32)), backend="cpu")
    assert not only_by_tiles


def test_a_carry_holds_only_what_outputs_need() -> None:
    """The adjoint shows λ alone: its products of A are not formed, but for totals of chunks."""
    op = AFFINE_ADJOINT.of(inputs(AFFINE_ADJOINT, (), 8))[0].matrices
    assert (op.carry_leaves(()), op.aggregate_leaves(())) == ((1, 2), (0, 1, 2))
    assert op.carry_leaves((0,)) == (0, 1, 2)


def gradients(backend: str, op: Any, xs: Any, axis: int, options: dict[str, Any]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (xs if isinstance(xs, tuple) else (xs,))]
    init = options.get("init")
    carry = None if init is None else tree_map(lambda t: t.detach().clone().requires_grad_(), init)
    tree = tuple(leaves) if len(leaves) > 1 else leaves[0]
    ys = associative_scan(op, tree, axis, backend=backend, **{**options, "init": carry})
    results = tree_leaves(ys)
    torch.manual_seed(1)
    seeds = [torch.randn(y.shape, dtype=torch.float64).to(y) for y in results]
    wanted = [*leaves, *tree_leaves(carry)]
    return list(torch.autograd.grad(results, [t for t in wanted if t is not None], seeds))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", [ops.matmul, ops.matrix_affine], ids=lambda op: op.name)
def test_gradients_by_the_adjoint(
    monkeypatch: pytest.MonkeyPatch, only_by_tiles: list[MatrixOperator], op: Any, backend: str
) -> None:
    """No warning, and the adjoint's scan runs on tiles too, as it does on a GPU."""
    monkeypatch.setattr(api, "associative_scan", partial(associative_scan, backend=backend))
    xs, init = inputs(op, (2, 6), 16, torch.float64), inputs(op, (2,), 16, torch.float64)
    for reverse, given in product((False, True), (False, True)):
        entering = put(init) if given else None
        options = {"reverse": reverse, "init": entering, "return_final": given}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = gradients(backend, op, put(xs), 1, options)
        for a, b in zip(got, gradients("eager", op, put(xs), 1, options), strict=True):
            torch.testing.assert_close(a, b)
    adjoint, _ = op.adjoint
    assert adjoint.name in {seen.name for seen in only_by_tiles}


def test_gradients_without_an_adjoint() -> None:
    """An exclusive scan has none: it is differentiated eagerly, with a warning."""
    fallback._WARNED.clear()
    xs = inputs(ops.matmul, (6,), 8, torch.float64).to(GPU)
    with pytest.warns(FallbackWarning, match="too large to unroll"):
        got = gradients("triton", ops.matmul, xs, 0, {"inclusive": False})
    for a, b in zip(got, gradients("eager", ops.matmul, xs, 0, {"inclusive": False}), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", sampled(["sm_80", "sm_90", "gfx942"], ["sm_90"]))
def test_compiles_without_spills(target: str) -> None:
    """For real targets, in a process of its own: where Triton interprets, it cannot compile."""
    said = run_compiling(SUPPORT / "compile_matrices.py", target)
    kernels = [json.loads(line) for line in said.splitlines()]
    assert len(kernels) >= 8
    for kernel in kernels:
        assert kernel["spilled"] <= 16, kernel  # bytes per thread on NVIDIA, registers on AMD
        assert not kernel["tf32"], kernel
