"""Every operator: its laws, its values against the definition, its gradients against the loop."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from operators import CASES, F64, INF, LENGTH, NAN, Case
from table import Engine, sampled
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from assocscan import Monoid, associative_scan, monoids, ops
from assocscan.testing import assert_scan_close, reference_scan

ENGINES = ["eager", "cpu"]

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
    if case.smooth
    and case.op.name not in {"any", "all", "xor", "min", "argmin"}
    and (not case.label or (case.label == "complex" and case.op in (ops.affine, ops.matmul)))
]
# In the interpreter, which takes some 0.2 s for each, those whose code has something of its own.
INTERPRETED = (
    "gcd signed_log_sum log_matmul autoregression online_attention kalman finite_state last_valid "
    "compensated_sum ema_variance".split()
)


def skip_most_interpreted(engine: Engine, case: Case) -> None:
    if engine.interpreted and (case.op.name not in INTERPRETED or case.label):
        pytest.skip("not among those that the interpreter runs")


def is_inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_engine = pytest.mark.parametrize("backend", ENGINES)


def wide(tree: Any) -> Any:
    """In the oracle's dtypes."""
    return tree_map(lambda x: x.to(F64) if x.is_floating_point() else x, tree)


@pytest.mark.thinned(5)
@every_case
def test_monoid_laws(case: Case) -> None:
    case.op.check(case.sample(3), samples=case.sample(60, states=True))


@pytest.mark.thinned(12)
@every_case
def test_values_are_those_of_the_definition(case: Case, engine: Engine) -> None:
    skip_most_interpreted(engine, case)
    if engine.repeats(LENGTH):
        return
    xs = case.sample(LENGTH, 4)
    leaves = tree_leaves(xs)
    prefixes = [case.prefix(*(x[: t + 1] for x in leaves)) for t in range(LENGTH)]
    expected = tree_map(lambda *y: torch.stack(y), *prefixes)
    ys = engine.scan(case.op, engine.put(xs))
    assert_scan_close(ys, wide(expected), LENGTH)


@pytest.mark.thinned(5)
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
    cotangents = [
        torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y.device) for y in results
    ]
    for row, cotangent in enumerate(cotangents):
        cotangent[row % 3] = 0
    wanted = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(results, wanted, cotangents, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]


@pytest.mark.thinned(28)
@pytest.mark.parametrize("reverse", sampled([False, True], [False]))
@pytest.mark.parametrize("case", SMOOTH, ids=str)
def test_gradients_are_those_of_the_loop(case: Case, reverse: bool, engine: Engine) -> None:
    if engine.interpreted:
        pytest.skip("gradients are more kernels than the interpreter has time for")

    def scan(op: Monoid, xs: Any, axis: int, *, init: Any, **flags: Any) -> Any:
        return engine.scan(op, engine.put(xs), axis, init=engine.put(init), **flags)

    actual = gradients(scan, case, reverse=reverse)
    expected = gradients(reference_scan, case, reverse=reverse)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


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
@pytest.mark.parametrize("op,sign", [(ops.max, 1), (ops.min, -1)], ids=["max", "min"])
def test_ties_share_the_gradient(op: Monoid, sign: int, backend: str) -> None:
    """Generated engines do as the loop does: at each step half to the state, half to the element.
    Autograd through the eager engine's tree gives other parts of the same whole."""
    x = sign * torch.tensor([3, 3, 3, 1, 3], dtype=F64)
    x.requires_grad_()
    (got,) = torch.autograd.grad(associative_scan(op, x, backend=backend)[-1], x)
    (want,) = torch.autograd.grad(reference_scan(op, x)[-1], x)
    assert want.tolist() == [0.125, 0.125, 0.25, 0.0, 0.5]
    if backend == "eager":
        assert got.sum() == 1
        assert torch.equal(got > 0, want > 0)
    else:
        assert torch.equal(got, want)


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


@pytest.mark.thinned(4)
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


@pytest.mark.parametrize("backend", ENGINES)
def test_gcd_beside_the_least_number(backend: str) -> None:
    """|−128| does not fit into int8, but every divisor that it has with another number does."""
    x = torch.tensor([-128, 6, 0], dtype=torch.int8)
    assert associative_scan(ops.gcd, x, backend=backend).tolist() == [-128, 2, 2]
