"""Every operator: its laws, its values against the definition, its gradients against the loop."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from assocscan import Monoid, associative_scan, monoids, ops
from assocscan.testing import assert_scan_close, reference_scan

ENGINES = ["eager", "cpu"]
LENGTH = 9
INF, NAN = math.inf, math.nan
F64, C128 = torch.float64, torch.complex128

Draw = Callable[[torch.Generator, tuple[int, ...]], Any]


def normal(*element: int, dtype: torch.dtype = F64) -> Draw:
    return lambda generator, batch: torch.randn(*batch, *element, generator=generator, dtype=dtype)


def positive() -> Draw:
    return lambda generator, batch: torch.rand(*batch, generator=generator, dtype=F64)


def integers(low: int, high: int, dtype: torch.dtype = torch.int64) -> Draw:
    return lambda generator, batch: torch.randint(low, high, batch, generator=generator).to(dtype)


def values(*numbers: float) -> Draw:
    """Drawn from a list: for edge values."""

    def draw(generator: torch.Generator, batch: tuple[int, ...]) -> Tensor:
        chosen = torch.randint(len(numbers), batch, generator=generator)
        return torch.tensor(numbers, dtype=F64)[chosen]

    return draw


def together(*draws: Draw) -> Draw:
    return lambda generator, batch: tuple(draw(generator, batch) for draw in draws)


def is_inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


@dataclass(frozen=True)
class Case:
    """One operator on one kind of input.

    `prefix` is the definition: it takes x[0 … t] of every leaf and returns the output at t.
    `states` draws the elements that `check` combines, where those are not the inputs.
    """

    op: Monoid
    draw: Draw
    prefix: Callable[..., Any]
    label: str = ""
    states: Draw | None = None

    def __str__(self) -> str:
        return f"{self.op.name}-{self.label}" if self.label else self.op.name

    def sample(self, *batch: int, states: bool = False, seed: int = 0) -> Any:
        draw = self.states if states and self.states else self.draw
        return draw(torch.Generator().manual_seed(seed), batch)


def met_last(x: Tensor, index: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """`best` and the index of the last x that equals it or is NaN."""
    steps = torch.arange(len(x)).view(-1, *[1] * (x.ndim - 1))
    last = torch.where((x == best) | x.isnan(), steps, -1).amax(0, keepdim=True)
    return best, index.gather(0, last)[0]


def product_of_matrices(a: Tensor) -> Tensor:
    total = a[0]
    for matrix in a[1:]:
        total = matrix @ total
    return total


def affine_loop(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = b[0]
    for s in range(1, len(b)):
        h = a[s] * h + b[s]
    return a.prod(0), h


def matrix_affine_loop(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = b[0]
    for matrix, shift in zip(a[1:], b[1:], strict=True):
        h = (matrix @ h[..., None])[..., 0] + shift
    return product_of_matrices(a), h


def xor_loop(x: Tensor) -> Tensor:
    total = x[0]
    for value in x[1:]:
        total = total ^ value
    return total


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(0), (x - x.mean(0)).abs().square().mean(0)


EDGES = values(INF, -INF, NAN, 0.0, 1.0)
INDEX = integers(0, 99)
BITS = integers(0, 2, torch.bool)
COUNT = integers(1, 9)

CASES = [
    Case(ops.sum, normal(), lambda x: x.sum(0)),
    Case(ops.sum, EDGES, lambda x: x.sum(0), "edges"),
    Case(ops.sum, integers(-128, 128, torch.int8), lambda x: x.sum(0).to(torch.int8), "int8"),
    Case(ops.sum, BITS, lambda x: x.any(0), "bool"),
    Case(ops.prod, normal(), lambda x: x.prod(0)),
    Case(ops.prod, EDGES, lambda x: x.prod(0), "edges"),
    Case(ops.prod, normal(dtype=C128), lambda x: x.prod(0), "complex"),
    Case(ops.max, normal(), lambda x: x.amax(0)),
    Case(ops.max, EDGES, lambda x: x.amax(0), "edges"),
    Case(ops.max, integers(-128, 128, torch.int8), lambda x: x.amax(0), "int8"),
    Case(ops.min, normal(), lambda x: x.amin(0)),
    Case(ops.min, EDGES, lambda x: x.amin(0), "edges"),
    Case(ops.any, BITS, lambda x: x.any(0)),
    Case(ops.any, values(0.0, 0.0, NAN), lambda x: x.bool().any(0), "floats", BITS),
    Case(ops.all, BITS, lambda x: x.all(0)),
    Case(ops.all, integers(0, 4), lambda x: x.bool().all(0), "integers", BITS),
    Case(ops.xor, integers(-99, 99), xor_loop),
    Case(ops.logaddexp, normal(), lambda x: x.logsumexp(0)),
    Case(ops.logaddexp, EDGES, lambda x: x.logsumexp(0), "edges"),
    Case(ops.argmax, together(normal(), INDEX), lambda x, i: met_last(x, i, x.amax(0))),
    Case(ops.argmax, together(EDGES, INDEX), lambda x, i: met_last(x, i, x.amax(0)), "edges"),
    Case(ops.argmin, together(normal(), INDEX), lambda x, i: met_last(x, i, x.amin(0))),
    Case(ops.argmin, together(EDGES, INDEX), lambda x, i: met_last(x, i, x.amin(0)), "edges"),
    Case(ops.affine, together(normal(), normal()), affine_loop),
    Case(ops.affine, together(normal(dtype=C128), normal(dtype=C128)), affine_loop, "complex"),
    Case(ops.matmul, normal(2, 2), product_of_matrices),
    Case(ops.matmul, normal(2, 2, dtype=C128), product_of_matrices, "complex"),
    Case(ops.matrix_affine, together(normal(2, 2), normal(2)), matrix_affine_loop),
    Case(ops.matrix_affine, together(normal(3, 3), normal(3)), matrix_affine_loop, "3x3"),
    Case(
        ops.matrix_affine,
        together(normal(2, 2, dtype=C128), normal(2, dtype=C128)),
        matrix_affine_loop,
        "complex",
    ),
    Case(ops.mean, normal(), lambda x: x.mean(0), states=together(normal(), COUNT)),
    Case(
        ops.mean, integers(-9, 9), lambda x: x.sum(0) / len(x), "integers", together(COUNT, COUNT)
    ),
    Case(ops.welford, normal(), moments, states=together(COUNT, normal(), positive())),
    Case(
        ops.welford,
        normal(dtype=C128),
        moments,
        "complex",
        together(COUNT, normal(dtype=C128), positive()),
    ),
]
# Kernels are compiled in these tests, one for each flag: what is checked on fewer operators below
# is checked for the engines elsewhere.
PLAIN = [
    case
    for case in CASES
    if case.op.name in {"sum", "argmax", "affine", "matmul", "matrix_affine", "mean", "welford"}
    and not case.label
]
SMOOTH = [
    case
    for case in CASES
    if case.op.name not in {"any", "all", "xor", "min", "argmin"}
    and (not case.label or (case.label == "complex" and case.op in (ops.affine, ops.matmul)))
]

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_engine = pytest.mark.parametrize("backend", ENGINES)


def wide(tree: Any) -> Any:
    """In the oracle's dtypes."""
    return tree_map(lambda x: x.to(F64) if x.is_floating_point() else x, tree)


@every_case
def test_monoid_laws(case: Case) -> None:
    case.op.check(case.sample(3), samples=case.sample(60, states=True))


@every_engine
@every_case
def test_values_are_those_of_the_definition(case: Case, backend: str) -> None:
    xs = case.sample(LENGTH, 4)
    leaves = tree_leaves(xs)
    prefixes = [case.prefix(*(x[: t + 1] for x in leaves)) for t in range(LENGTH)]
    expected = tree_map(lambda *y: torch.stack(y), *prefixes)
    ys = associative_scan(case.op, xs, axis=0, backend=backend)
    assert_scan_close(ys, wide(expected), LENGTH)


@every_engine
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_init_and_final(case: Case, reverse: bool, backend: str) -> None:
    xs, init = case.sample(3, LENGTH), case.sample(3, states=True, seed=1)
    flags = {"axis": 1, "reverse": reverse, "init": init, "return_final": True}
    ys, final = associative_scan(case.op, xs, backend=backend, **flags)
    expected, last = reference_scan(case.op, xs, **flags)
    assert_scan_close(ys, expected, LENGTH)
    assert_scan_close(final, last, LENGTH)


@pytest.mark.parametrize("case", [c for c in CASES if c.op.identity is not None], ids=str)
def test_exclusive_scan_starts_at_the_identity(case: Case) -> None:
    xs = case.sample(3, LENGTH)
    ys = associative_scan(case.op, xs, axis=1, inclusive=False, backend="eager")
    expected = reference_scan(case.op, xs, axis=1, inclusive=False)
    assert_scan_close(ys, expected, LENGTH)


def gradients(scan: Callable[..., Any], case: Case, **flags: Any) -> list[Tensor]:
    """Of every input and of `init`, from random cotangents with some rows zero."""
    inputs = (case.sample(3, LENGTH), case.sample(3, states=True, seed=1))
    leaves, spec = tree_flatten(inputs)
    leaves = [x.requires_grad_() if is_inexact(x) else x for x in leaves]
    xs, init = tree_unflatten(leaves, spec)
    results = tree_leaves(scan(case.op, xs, 1, init=init, return_final=True, **flags))
    results = [y for y in results if y.requires_grad]
    generator = torch.Generator().manual_seed(2)
    cotangents = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in results]
    for row, cotangent in enumerate(cotangents):
        cotangent[row % 3] = 0
    wanted = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(results, wanted, cotangents, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]


@every_engine
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", SMOOTH, ids=str)
def test_gradients_are_those_of_the_loop(case: Case, reverse: bool, backend: str) -> None:
    actual = gradients(associative_scan, case, reverse=reverse, backend=backend)
    expected = gradients(reference_scan, case, reverse=reverse)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["matmul", "matrix_affine"])
def test_adjoint_by_hand_equals_the_derived_one(name: str) -> None:
    """λ[t] = g[t] + (∂f/∂left)ᵀ λ[t+1], written by hand and by a loop over torch's vjp."""
    op = getattr(ops, name)
    adjoint, element = op.adjoint
    case = next(c for c in CASES if c.op is op and c.label == "complex")
    x, y, g = (tree_leaves(case.sample(LENGTH, seed=k)) for k in range(3))
    structure = tree_flatten(case.sample(1))[1]

    def at(leaves: list[Tensor], t: int) -> Any:
        return tree_unflatten([leaf[t] for leaf in leaves], structure)

    after = [*range(1, LENGTH), 0]
    elements = [element(at(y, t), at(x, s), at(g, t)) for t, s in enumerate(after)]
    stacked = tree_map(lambda *e: torch.stack(e), *elements)
    actual = associative_scan(adjoint, stacked, axis=0, reverse=True, backend="eager")
    state = at(g, LENGTH - 1)
    expected = [state]
    for t in range(LENGTH - 2, -1, -1):
        _, vjp = torch.func.vjp(lambda left, t=t: op.combine(left, at(x, t + 1)), at(y, t))
        state = tree_map(torch.add, at(g, t), vjp(state)[0])
        expected.insert(0, state)
    torch.testing.assert_close(actual, tree_map(lambda *e: torch.stack(e), *expected))


@every_engine
def test_log_probabilities_of_zero_have_finite_gradients(backend: str) -> None:
    x = torch.tensor([-INF, -INF, 0.0, -INF, 1.0], dtype=F64, requires_grad=True)
    y = associative_scan(ops.logaddexp, x, backend=backend)
    (gradient,) = torch.autograd.grad(y[2:].sum(), x)
    share = math.e / (1 + math.e)
    expected = torch.tensor([0, 0, 3 - share, 0, share], dtype=F64)
    torch.testing.assert_close(gradient, expected)


@every_engine
@pytest.mark.parametrize("op", [ops.mean, ops.welford], ids=["mean", "welford"])
def test_counting_goes_on_beyond_what_float32_can_count(op: Monoid, backend: str) -> None:
    count, one = torch.tensor(2**24), torch.tensor(1.0)
    init = (one, count) if op is ops.mean else (count, one, torch.tensor(0.0))
    _, final = associative_scan(op, torch.ones(7), init=init, return_final=True, backend=backend)
    assert 2**24 + 7 in [int(leaf) for leaf in final]


@every_engine
def test_welford_keeps_a_small_variance_on_a_large_mean(backend: str) -> None:
    x = 1e4 + torch.tensor([0.0, 1.0]).repeat(500)
    _, variance = associative_scan(ops.welford, x, backend=backend)
    torch.testing.assert_close(variance[-1], torch.tensor(0.25), rtol=1e-3, atol=0)


@every_engine
def test_moments_of_integers_and_of_nothing(backend: str) -> None:
    x = torch.tensor([1, 2, 6])
    mean = associative_scan(ops.mean, x, backend=backend)
    torch.testing.assert_close(mean, torch.tensor([1.0, 1.5, 3.0]))
    mean, variance = associative_scan(ops.welford, x, inclusive=False, backend=backend)
    torch.testing.assert_close(mean, torch.tensor([NAN, 1.0, 1.5]), equal_nan=True)
    torch.testing.assert_close(variance, torch.tensor([NAN, 0.0, 0.25]), equal_nan=True)


@every_engine
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool], ids=str)
def test_infinite_identity_saturates(dtype: torch.dtype, backend: str) -> None:
    x = torch.zeros(2, dtype=dtype)
    first = associative_scan(ops.min, x, inclusive=False, backend=backend)[0]
    assert first == (True if dtype == torch.bool else torch.iinfo(dtype).max)


def test_every_operator_is_tested_and_registered() -> None:
    tested = {case.op.name for case in CASES}
    assert tested == set(ops.__all__)
    assert {name: getattr(ops, name) for name in tested}.items() <= monoids().items()


def test_plain_ops_is_refused() -> None:
    path = Path(ops.__file__)
    spec = importlib.util.spec_from_file_location("ops", path)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"assocscan\.ops"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize(
    "file",
    [f for f in Path(ops.__file__).parent.glob("*.py") if f.stem != "__init__"],
    ids=lambda f: f.stem,
)
def test_docstring_examples(file: Path) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(f"assocscan.ops.{file.stem}"))
    assert attempted and not failed
