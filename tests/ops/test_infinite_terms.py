"""NaN and infinities in the operators that add logarithms or take maxima, beside a loop.

All of float64, as the loop is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import inf, log, nan
from typing import Any

import pytest
import torch
from operators import CASES, Case
from table import Engine
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from assocscan import Monoid, associative_scan, ops, reduce, segmented
from assocscan.testing import assert_scan_close, reference_scan

ROWS, LENGTH = 3, 9
NAMES = (
    "logaddexp log_affine max_affine log_matmul max_matmul signed_log_sum online_softmax "
    "online_attention max_subarray min max minmax"
).split()
OPERATORS = [case for case in CASES if case.op.name in NAMES and not case.label]
RESETS = torch.tensor([0, 0, 0, 0, 1, 0, 1, 1, 0], dtype=torch.bool).expand(ROWS, LENGTH)


def spoilt(case: Case, value: float, place: int, leaf: int) -> Any:
    """Inputs with `value` in one element: in row 0 in the last entry, in row 1 in all entries."""
    xs = case.sample(ROWS, LENGTH)
    x = tree_leaves(xs)[leaf]
    x[0, place].view(-1)[-1] = value
    x[1, place] = value
    return xs


def inexact(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if x.is_floating_point()]


def cases(case: Case) -> list[tuple[float, int, int]]:
    leaves = range(len(inexact(case.sample(1))))
    return list(itertools.product((nan, inf, -inf), (0, 4, LENGTH - 1), leaves))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("case", OPERATORS, ids=str)
def test_values(case: Case, engine: Engine) -> None:
    if engine.repeats(LENGTH):
        return
    given = cases(case)
    for value, place, leaf in given[:: 5 if engine.interpreted else 1]:
        xs = spoilt(case, value, place, leaf)
        want = reference_scan(case.op, xs, 1)
        assert_scan_close(engine.scan_from_cpu(case.op, xs, 1), want, LENGTH)


@pytest.mark.thinned(11)
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("case", OPERATORS, ids=str)
def test_values_of_segments(case: Case, inclusive: bool, engine: Engine) -> None:
    """What follows a reset knows nothing of what was before, in values and gradients."""
    if engine.interpreted:
        pytest.skip("more kernels than the interpreter has time for")
    op = segmented(case.op)
    for value, place, leaf in cases(case):
        if place == 0 and not inclusive:
            continue  # the identity is combined with the first element (docs/limits.md)
        xs = spoilt(case, value, place, leaf), RESETS
        want = reference_scan(op, xs, 1, inclusive=inclusive)
        assert_scan_close(engine.scan_from_cpu(op, xs, 1, inclusive=inclusive), want, LENGTH)


def gradients(scan: Callable[[Any], Any], xs: Any) -> list[Tensor]:
    xs = tree_map(lambda x: x.clone().requires_grad_(x.is_floating_point()), xs)
    ys = [y for y in tree_leaves(scan(xs)) if y.requires_grad]
    cotangents = [torch.linspace(1, 2, y.numel(), dtype=y.dtype).view_as(y) for y in ys]
    return list(torch.autograd.grad(ys, inexact(xs), cotangents))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", ["max", "min", "minmax", "max_affine", "max_subarray"])
def test_gradients_of_maxima_with_nan(name: str, engine: Engine) -> None:
    """torch gives the cotangent of a maximum with a NaN to both sides. The eager engine does so in
    the order of its tree."""
    if engine.name == "eager" or engine.repeats(LENGTH):
        return
    case = next(case for case in OPERATORS if case.op.name == name)
    for place in (0, 4, LENGTH - 1)[:: 2 if engine.interpreted else 1]:
        xs = spoilt(case, nan, place, 0)
        got = gradients(lambda xs: engine.scan_from_cpu(case.op, xs, 1), xs)
        want = gradients(lambda xs: reference_scan(case.op, xs, 1), xs)
        torch.testing.assert_close(got, want)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("op", [ops.logaddexp, ops.log_matmul], ids=["logaddexp", "log_matmul"])
@pytest.mark.parametrize("value", [-inf, inf, nan])
def test_gradients_of_logarithms(op: Monoid, value: float, engine: Engine) -> None:
    """Of probabilities of zero they are finite; NaN is not lost."""
    if engine.repeats(LENGTH):
        return
    case = next(case for case in OPERATORS if case.op is op)
    xs = spoilt(case, value, 4, 0)
    got = gradients(lambda xs: engine.scan_from_cpu(op, xs, 1), xs)
    torch.testing.assert_close(
        got, gradients(lambda xs: reference_scan(op, xs, 1), xs), equal_nan=True
    )
    if value != inf:
        assert got[0].isfinite().all() == (value == -inf)


def total(engine: Engine, op: Monoid, *xs: Tensor) -> Any:
    return tree_map(Tensor.cpu, reduce(op, engine.put(xs), backend=engine.name))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("sign", [torch.int8, torch.float64])
def test_the_sum_of_opposite_infinities(sign: torch.dtype, engine: Engine) -> None:
    size = torch.tensor([inf, 0.0, inf], dtype=torch.float64)
    for signs, want in (([1, 1, -1], nan), ([-1, 1, -1], inf)):
        got, found = total(engine, ops.signed_log_sum, size, torch.tensor(signs, dtype=sign))
        torch.testing.assert_close(float(got), want, equal_nan=True)
        assert want != inf or found == -1
    size, found = total(
        engine, ops.signed_log_sum, torch.tensor([0.0, nan, 0.0]), torch.tensor([-1, -1, -1])
    )
    assert size.isnan()
    assert found == 1


def test_attention_with_an_infinite_score(engine: Engine) -> None:
    """As softmax: 0 · ∞ and ∞ / ∞ are no numbers."""
    values = torch.eye(3, dtype=torch.float64)
    for scores in ([0.0, inf, 1.0], [inf, 0.0, -inf], [-inf, inf, -inf]):
        score = torch.tensor(scores, dtype=torch.float64)
        assert score.softmax(0).isnan().all()
        assert total(engine, ops.online_attention, score, values).isnan().all()
    m, s = reduce(
        ops.online_softmax, engine.put(torch.tensor([0.0, inf, 1.0, inf])), backend=engine.name
    )
    assert float(m + s.log()) == inf


@pytest.mark.parametrize("op", [ops.log_matmul, ops.max_matmul], ids=str)
def test_exclusive_segments_of_paths(op: Monoid, engine: Engine) -> None:
    weights = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64).log().expand(4, 2, 2)
    reset = torch.tensor([False, False, True, False])
    xs = engine.put((weights, reset))
    got = associative_scan(segmented(op), xs, inclusive=False, backend=engine.name).cpu()
    nothing = torch.tensor([[0.0, -inf], [-inf, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(got[2], nothing)
    torch.testing.assert_close(got[3], weights[2])
    assert got[1, 0, 1] == pytest.approx(log(0.5))


@pytest.mark.parametrize("largest", [torch.amax, torch.amin], ids=["amax", "amin"])
def test_gradients_of_the_largest_state(largest: Callable[..., Tensor]) -> None:
    """NaN reaches all states, as in torch."""
    op = Monoid(
        lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1]),
        name=f"{largest.__name__}_of_states", identity=(1.0, 0.0), element_ndim=1,
        lower=lambda state: largest(state[1], -1),
    )  # fmt: skip
    a, b = torch.rand((2, 2, LENGTH, 32), dtype=torch.float64).unbind()
    b[0, 4, 3] = nan
    got = gradients(lambda xs: associative_scan(op, xs, 1, backend="cpu"), (a, b))
    want = gradients(lambda xs: reference_scan(op, xs, 1), (a, b))
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got[1][0].isnan().all()
    assert got[1][1].isfinite().all()
