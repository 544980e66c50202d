"""`FallbackWarning`: once per operator and reason, with the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import BackendError, FallbackWarning, associative_scan, explain, monoid, ops
from assocscan.engines.base import fallback_warning as fallback
from assocscan.runtime.backends import availability

if availability()["cpu"] is not None:
    pytest.skip("there is no C++ compiler, every scan runs eagerly", allow_module_level=True)

x = torch.randn(6, 3, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_warning_was_given() -> Iterator[None]:
    fallback._WARNED.clear()
    yield
    fallback._WARNED.clear()


def warned(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(w.category is FallbackWarning for w in caught)
    return [str(w.message) for w in caught]


def test_two_lambdas_warn_twice_and_each_once() -> None:
    first, second = lambda left, right: right @ left, lambda left, right: right.mT @ left.mT
    for op in (first, second):
        (text,) = warned(lambda op=op: associative_scan(op, x))
        assert f"test_fallback.py:{op.__code__.co_firstlineno}" in text
        assert warned(lambda op=op: associative_scan(op, x)) == []


def test_a_lambda_made_anew_at_every_call_warns_once() -> None:
    def scan(weights: list[float]) -> Tensor:
        """The closure holds a list, so that every call has an operator of its own."""
        y: Tensor = associative_scan(lambda left, right: weights[0] * (right @ left), x)
        return y

    assert len(warned(lambda: scan([1.0]))) == 1
    assert warned(lambda: scan([2.0])) == []


def test_an_operator_warns_again_for_another_reason() -> None:
    def joined(left: Tensor, right: Tensor) -> Tensor:
        return left + right.sum() if left.dim() == 1 else right @ left

    (matrices,) = warned(lambda: associative_scan(joined, x))
    (numbers,) = warned(lambda: associative_scan(joined, x[:, 0, 0]))
    assert "'mm'" in matrices or "'bmm'" in matrices
    assert "'sum'" in numbers


def test_a_product_of_matrices_names_its_monoids() -> None:
    (text,) = warned(lambda: associative_scan(lambda left, right: right @ left, x))
    assert "monoid(fn, element_ndim=2)" in text and "ops.matmul" in text
    named = monoid(lambda left, right: right @ left, name="fallback_matmul", element_ndim=2)
    for op in (named, ops.matmul):  # what the warning says does not warn
        assert warned(lambda op=op: associative_scan(op, x)) == []


def test_a_monoid_of_dicts_is_named_in_their_structure() -> None:
    def maps(left: Any, right: Any) -> Any:
        moved = (right["A"] @ left["b"][..., None])[..., 0]
        return {"A": right["A"] @ left["A"], "b": moved + right["b"]}

    (text,) = warned(lambda: associative_scan(maps, {"A": x, "b": x[..., 0]}))
    assert "monoid(fn, element_ndim={'A': 2, 'b': 1})" in text and len(text.split()) < 60


def test_tensors_without_data_give_no_warning() -> None:
    assert warned(lambda: associative_scan(torch.add, x.to("meta"))) == []


def test_a_sum_over_slices_says_that_it_saw_slices() -> None:
    """`right.sum()` of a raw callable is a sum over many elements."""
    (text,) = warned(lambda: associative_scan(lambda left, right: left + right.sum(), x[:, 0, 0]))
    assert "'sum' in it is not pointwise" in text
    assert "slices of xs, many elements at once" in text and "one element" in text
    with pytest.raises(BackendError, match="slices of xs, many elements at once"):
        associative_scan(lambda left, right: left + right.sum(), x[:, 0, 0], backend="cpu")


def test_leaves_that_broadcast_are_named() -> None:
    """What the warning says is compiled, and gives the same."""

    def gated_sum(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    gate, b = torch.rand(2, 9, 1), torch.randn(2, 9, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        slow = associative_scan(gated_sum, (gate, b), 1)
    (text,) = warned(lambda: associative_scan(lambda *ab: gated_sum(*ab), (gate, b), 1))
    assert "xs[0] of shape [2, …, 1] beside xs[1] of shape [2, …, 3]" in text
    assert "expand" in text and "pointwise" not in text
    plan = explain(gated_sum, (gate, b), 1)
    assert plan.bytes_moved == 2 * (gate.nbytes + b.nbytes) and plan.normal_form == (2, 9, 3)
    for op, xs in ((gated_sum, (gate.expand_as(b), b)), (monoid(gated_sum), (gate, b))):
        assert warned(lambda op=op, xs=xs: associative_scan(op, xs, 1)) == []
        torch.testing.assert_close(associative_scan(op, xs, 1)[1], slow[1])


def test_asking_for_the_eager_engine_gives_no_warning() -> None:
    (text,) = warned(lambda: associative_scan(torch.matmul, x))
    assert 'backend="eager"' in text
    assert warned(lambda: associative_scan(torch.matmul, x, backend="eager")) == []


def test_what_was_warned_of_is_bounded() -> None:
    class Operator:
        """No two are equal."""

        def __init__(self, k: int) -> None:
            self.combine, self.name = object(), f"bounded_{k}"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(3 * fallback.MOST):
            fallback.warn_once(Operator(k), "a reason")
            assert len(fallback._WARNED) <= fallback.MOST
