"""What goes wrong inside `torch.compile` is said in our words: Dynamo's error contains them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import assocscan
from assocscan import AssocScanError, FallbackWarning, associative_scan, ops, reduce

x = torch.ones(4)


def dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(-1)


# Calls, what is said, and whether Python meets our own error where the graph may break.
WRONG: list[tuple[Callable[[Any], Any], str, bool]] = [
    (lambda v: associative_scan(ops.sum, v, dim=0),
     "associative_scan() has no argument 'dim': pass axis=0", True),
    (lambda v: reduce(ops.sum, v, dim=0), "reduce() has no argument 'dim': pass axis=0", True),
    (lambda v: assocscan.cumsum(v, dim=0), "cumsum() has no argument 'dim': pass axis=0", True),
    (lambda v: assocscan.linear_recurrence(v, v, dim=0),
     "linear_recurrence() has no argument 'dim': pass axis=0", True),
    (lambda v: assocscan.gae(v, v, v[0], 0.9, 0.9, dim=0), "gae() has no argument 'dim'", True),
    (lambda v: associative_scan("summ", v),
     "no monoid is registered as 'summ'; did you mean 'sum'?", True),
    (lambda v: associative_scan(v, ops.sum), "the operator comes first, then xs", True),
    (lambda v: associative_scan(3, v), "a function of two elements, got an int", True),
    (lambda v: associative_scan(ops.sum, v, reverse="no"), "reverse is 'no', expected", False),
    (lambda v: associative_scan(ops.sum, v, deterministic="no"), "deterministic is 'no'", False),
    (lambda v: associative_scan(ops.sum, v, backend="no"), "unknown backend 'no'", False),
    (lambda v: assocscan.cumsum(v, backend="no"), "unknown backend 'no'", False),
    (lambda v: assocscan.linear_recurrence(v, v, axis=0, backend="no"), "unknown backend 'no'",
     False),
    (lambda v: assocscan.linear_recurrence(v, v, axis=0, deterministic="no"),
     "deterministic is 'no'", False),
    (lambda v: associative_scan(ops.sum, v, 3), "axis 3 is out of range", False),
    (lambda v: associative_scan(ops.affine, (v, v), init=v[0]), "init is a tensor, but", False),
    (lambda v: associative_scan(dot, v.expand(2, 4)), "is [n, 4], the result [n]", False),
]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.thinned(12)
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("number", range(len(WRONG)))
def test_the_message_is_shown(number: int, fullgraph: bool) -> None:
    call, words, is_own = WRONG[number]
    kind: Any = AssocScanError if is_own and not fullgraph else Exception
    with pytest.raises(kind) as caught:
        torch.compile(call, fullgraph=fullgraph, backend="eager")(x)
    said = str(caught.value).replace("\\'", "'")
    assert words in said


def test_a_captured_tensor_warns_once_and_breaks_the_graph() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])

    def weighted(left: Tensor, right: Tensor) -> Tensor:
        return left + weight * right

    def scan(v: Tensor) -> Tensor:
        return associative_scan(weighted, v * 2)

    v = torch.ones(3, 3)
    want = 2 + 2 * torch.arange(3.0)[:, None] * weight
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.testing.assert_close(scan(v), want)
            torch.testing.assert_close(torch.compile(scan, backend="eager")(v), want)
    said = [str(w.message) for w in seen if w.category is FallbackWarning]
    assert len(said) == 1 and "uses a captured tensor" in said[0] and "leaf of xs" in said[0]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="pass what it captures as a leaf"):
        torch.compile(scan, fullgraph=True, backend="eager")(v)
