"""Operators made from operators: their laws, their values, their gradients, what they cost."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from table import Engine
from torch import Tensor
from torch.utils._pytree import tree_leaves

from assocscan import (
    Monoid,
    MonoidError,
    ScanTypeError,
    associative_scan,
    explain,
    monoid,
    ops,
    product,
    reduce,
    reversed_order,
    segmented,
    with_lift,
    with_lower,
)
from assocscan.testing import assert_scan_close, reference_scan

pytestmark = pytest.mark.thinned(4)

F64 = torch.float64
LENGTH = 9


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


RESET = torch.tensor([False, False, True, False, True, True, False, False, False])
PAIR = (rand(3, LENGTH, seed=1), rand(3, LENGTH, seed=2))
MATRICES = rand(3, LENGTH, 2, 2)
EXTREMES = product(ops.min, ops.max, ops.mean)
CASES: dict[str, tuple[Any, Any]] = {
    "segmented affine": (segmented(ops.affine), (PAIR, RESET.expand(3, -1))),
    "segmented matmul": (segmented(ops.matmul), (MATRICES, RESET[None])),
    "segmented welford": (segmented("welford"), (PAIR[0], RESET[None])),
    "segmented fill": (segmented(ops.last_valid), ((PAIR[0], PAIR[1] > 0), RESET[None])),
    "product": (EXTREMES, PAIR[0]),
    "product of matrices": (product(ops.matmul, reversed_order(ops.matmul)), MATRICES),
    "reversed affine": (reversed_order(ops.affine), PAIR),
    "lift": (with_lift(ops.affine, lambda a, b: (torch.tanh(a), a * b)), PAIR),
    "lower": (with_lower(with_lift(ops.mean, torch.square), torch.sqrt), PAIR[0]),
    "lower of inputs": (with_lower(ops.welford, lambda y, x: (x - y[0]) * y[1]), PAIR[0]),
    "together": (segmented(product("max", with_lower("sum", torch.sin))), (PAIR[0], RESET[None])),
}
every_case = pytest.mark.parametrize("case", CASES)


def test_segments_are_scans_of_their_own() -> None:
    """By hand, both ways, with an init that only the first segment sees."""
    op, (x, reset) = segmented(ops.sum), (PAIR[0], RESET.expand(3, -1))
    starts = [0, *RESET.nonzero()[:, 0].tolist(), LENGTH]
    parts = [x[:, a:b].cumsum(1) for a, b in pairwise(starts)]
    wanted = torch.cat(parts, 1)
    torch.testing.assert_close(associative_scan(op, (x, reset), 1), wanted)
    init = (torch.tensor(5.0, dtype=F64), torch.tensor(False))
    wanted[:, : starts[1]] += 5
    torch.testing.assert_close(associative_scan(op, (x, reset), 1, init=init), wanted)
    backwards = associative_scan(op, (x.flip(1), reset.flip(1)), 1, reverse=True)
    torch.testing.assert_close(backwards.flip(1), associative_scan(op, (x, reset), 1))


@pytest.mark.thinned(9)
@every_case
def test_values(case: str, engine: Engine) -> None:
    if engine.interpreted and case not in ("segmented matmul", "together"):
        pytest.skip("not among those that the interpreter runs")
    op, xs = CASES[case]
    if engine.repeats(LENGTH):
        return
    exclusive = {} if op.identity is None else {"inclusive": False}
    for flags in ({}, {"reverse": True, **exclusive}):
        result = engine.scan(op, engine.put(xs), 1, **flags)
        assert_scan_close(result, reference_scan(op, xs, 1, **flags), LENGTH)


@pytest.mark.thinned(18)
@every_case
def test_gradients(case: str, engine: Engine) -> None:
    if engine.interpreted:
        pytest.skip("gradients are more kernels than the interpreter has time for")
    op, xs = CASES[case]

    def gradients(scan: Callable[..., Any]) -> list[Tensor]:
        inputs = torch.utils._pytree.tree_map(lambda t: t.clone(), xs)
        wanted = [t.requires_grad_() for t in tree_leaves(inputs) if t.is_floating_point()]
        results = [y for y in tree_leaves(scan(op, inputs, 1)) if y.requires_grad]
        cotangents = [rand(*y.shape, seed=k).to(y.device) for k, y in enumerate(results)]
        return list(torch.autograd.grad(results, wanted, cotangents))

    actual = gradients(lambda op, xs, axis: engine.scan(op, engine.put(xs), axis))
    for got, want in zip(actual, gradients(reference_scan), strict=True):
        torch.testing.assert_close(got, want)


def test_laws() -> None:
    flag = torch.rand(60, generator=torch.Generator().manual_seed(0)) > 0.5
    matrix, x = rand(60, 2, 2), rand(60)
    segmented(ops.matmul).check((matrix[0], flag[0]), samples=(matrix, flag))
    product(ops.sum, ops.max).check(x[0], samples=(x, rand(60, seed=1)))
    reversed_order(ops.affine).check((x[0], x[0]))


def test_one_pass_over_the_input() -> None:
    """Three running statistics read x once and write three numbers."""
    x = torch.ones(64, 4096)
    assert explain(EXTREMES, x, 1).bytes_moved == 4 * x.nbytes


def test_they_are_not_made_twice() -> None:
    assert segmented(ops.sum) is segmented("sum")
    assert product(ops.min, ops.max) is product("min", "max")
    assert reversed_order(ops.affine) is reversed_order(ops.affine)
    assert with_lift(ops.sum, torch.square) is with_lift(ops.sum, torch.square)
    assert segmented(ops.sum).name == "segmented(sum)"


@pytest.mark.parametrize(
    "op",
    [
        segmented(product(ops.sum, ops.max)),
        reversed_order("affine"),
        with_lower(with_lift(ops.mean, torch.square), torch.sqrt),
        with_lower(ops.mean, None),
    ],
    ids=repr,
)
def test_pickles_are_recipes(op: Monoid) -> None:
    assert pickle.loads(pickle.dumps(op)) is op


def test_pickles_need_functions_that_can_be_imported() -> None:
    inner = with_lift(ops.sum, lambda x: 2 * x)
    for op in (inner, segmented(inner)):
        with pytest.raises(MonoidError, match=r"'with_lift\(sum, .*its function is a lambda"):
            pickle.dumps(op)


def test_lower_taken_away() -> None:
    total, count = associative_scan(with_lower(ops.mean, None), torch.tensor([2.0, 4.0]))
    assert total.tolist() == [2, 6] and count.tolist() == [1, 2]


def test_a_lower_of_inputs_sees_those_of_its_own_operator() -> None:
    before = with_lower(ops.sum, lambda y, x: y - x)
    x = torch.tensor([1.0, 2.0, 3.0])
    assert associative_scan(with_lift(before, torch.square), x).tolist() == [0, 1, 5]


def test_exclusive_product_needs_every_identity() -> None:
    band = monoid(lambda left, right: left, name="combinators_first")
    assert product(ops.sum, band).identity is None
    assert segmented(band).identity is None


def test_errors() -> None:
    with pytest.raises(MonoidError, match="at least one"):
        product()
    with pytest.raises(MonoidError, match="element_ndim"):
        product(ops.sum, ops.matmul)
    with pytest.raises(ScanTypeError, match="@monoid"):
        segmented(lambda left, right: left)  # type: ignore[arg-type]
    with pytest.raises(ScanTypeError, match="needs a function"):
        with_lift(ops.sum, 3)  # type: ignore[arg-type]
    with pytest.raises(ScanTypeError, match="needs a function"):
        with_lower(ops.sum, 3)  # type: ignore[arg-type]
    x, reset = PAIR[0], RESET.expand(3, -1)
    for xs, seen in ((x, "a tensor"), ((x, x, reset), "a tuple of 3"), ((x, reset.int()), "int32")):
        for op in (ops.sum, ops.mean):  # without a lift and with one
            with pytest.raises(ScanTypeError, match=rf"{op.name}.*torch\.bool, got .*{seen}"):
                associative_scan(segmented(op), xs, 1)


def test_segmented_elements_keep_their_structure() -> None:
    """A list is no tuple, as where the operator is scanned by itself."""
    a = torch.rand(4)
    with pytest.raises(ScanTypeError, match=r"xs\[0\] is a list of 2, but 'affine' takes"):
        associative_scan(segmented(ops.affine), ([a, a], a > 0.5))


def test_callables_that_are_equal_and_differ() -> None:
    """1 == 1.0, and so are these two; their lifts are not."""

    @dataclass(frozen=True)
    class Scale:
        factor: float

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    x = torch.tensor([1, 2, 3])
    found = [associative_scan(with_lift(ops.sum, Scale(k)), x) for k in (1, 1.0, 1)]
    assert [t.dtype for t in found] == [torch.int64, torch.float32, torch.int64]


def test_functions_of_the_same_code_are_the_same() -> None:
    """A lambda in a loop is a new function each time. One with a closure, defaults or attributes
    counts by itself, and so does one whose code was changed."""
    x = torch.tensor([1, 2, 3])

    def doubled() -> Any:
        return lambda t: 2 * t

    def scaled(k: int, default: int = 1) -> Any:
        def fn(t: torch.Tensor, by: int = default) -> torch.Tensor:
            return t * k * by

        return fn

    first, again = (with_lift(ops.sum, doubled()) for _ in range(2))
    assert first is again
    assert with_lift(ops.sum, lambda t: 2 * t) is not first
    for k, default, total in ((2, 1, 12), (3, 1, 18), (2, 2, 24), (2, 1, 12)):
        assert reduce(with_lift(ops.sum, scaled(k, default)), x) == total
    changed = doubled()
    changed.__code__ = (lambda t: 5 * t).__code__
    assert reduce(with_lift(ops.sum, changed), x) == 30
    first_made = first.recipe[2]
    first_made.__code__ = (lambda t: 7 * t).__code__
    assert reduce(with_lift(ops.sum, doubled()), x) == 12
