"""What is passed in place of a tensor, an operator or a flag is named, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import assocscan
from assocscan import (
    AssocScanError,
    Monoid,
    ScanTypeError,
    ScanValueError,
    associative_scan,
    cumsum,
    discounted_returns,
    explain,
    linear_recurrence,
    ops,
    reduce,
    segmented,
)

x, one = torch.ones(5), torch.ones(1, 1)
array: Any = np.ones(5, dtype=np.float32)

Refused = tuple[Callable[[], Any], Any, list[str]]


def adding(left: Any, right: Any) -> Any:
    return left + right


def pairwise(left: Any, right: Any) -> Any:
    a1, b1 = left
    a2, b2 = right
    return a2 * a1, a2 * b1 + b2


def nested(left: Any, right: Any) -> Any:
    (a1,), b1 = left
    (a2,), b2 = right
    return (a1 + a2,), b1 + b2


NESTED = assocscan.monoid(nested, identity=((0.0,), 0.0), name="wrong_values_nested")

INSTEAD_OF_TENSORS: list[Refused] = [
    (lambda: associative_scan(ops.sum, array), ScanTypeError,
     ["xs is a NumPy ndarray, expected a tensor: torch.as_tensor(xs)"]),
    (lambda: reduce(ops.affine, (x, array)), ScanTypeError, ["torch.as_tensor(xs[1])"]),
    (lambda: cumsum([1, 2]), ScanTypeError, ["x is a list, expected a tensor: torch.tensor(x)"]),
    (lambda: cumsum(array), ScanTypeError, ["x is a NumPy ndarray", "torch.as_tensor(x)"]),
    (lambda: linear_recurrence(array, x, axis=0), ScanTypeError,
     ["a is a NumPy ndarray, expected a tensor or a number: torch.as_tensor(a)"]),
    (lambda: discounted_returns(x, array), ScanTypeError, ["torch.as_tensor(discount)"]),
    (lambda: ops.sum(x, array), ScanTypeError, ["right is a NumPy", "torch.as_tensor(right)"]),
    (lambda: associative_scan(ops.affine, (0.9, x)), ScanTypeError,
     ["xs[0] is the float 0.9", "torch.full_like(xs[1], 0.9)", "linear_recurrence(a, b) takes"]),
    (lambda: associative_scan(ops.sum, 3), ScanTypeError, ["the int 3", "torch.tensor(3)"]),
    (lambda: associative_scan(ops.affine, (x, x), init=one), ScanTypeError,
     ["init is a tensor, but a state of 'affine' is a tuple of 2 tensors", "identity (1.0, 0.0)"]),
    (lambda: associative_scan(ops.affine, (x, x), init=4.0), ScanTypeError, ["init is a float"]),
    (lambda: associative_scan(pairwise, (x, x), init=one), ScanTypeError,
     ["init is a tensor", "a state of 'pairwise' is a tuple of 2 tensors, as xs is"]),
    (lambda: associative_scan(ops.affine, (x, x), init=[x[0], x[0]]), ScanTypeError,
     ["init is a list of 2", "pass tuple(init)"]),
    (lambda: associative_scan(nested, ((x,), x), init=(one, one)), ScanTypeError,
     ["a state of 'nested' is a tuple of 2, as xs is: init[0] is a leaf, expected a tuple of 1"]),
    (lambda: associative_scan(NESTED, (x, (x,))), ScanTypeError,
     ["takes a tuple of 2, as its identity is: xs[0] is a leaf, expected a tuple of 1"]),
]  # fmt: skip

OPERATORS: list[Refused] = [
    (lambda: associative_scan(np.add, x), ScanTypeError,
     ["NumPy's add takes arrays", "torch.add or assocscan.ops.sum"]),
    (lambda: reduce(np.hypot, x), ScanTypeError, ["use torch.hypot"]),
    (lambda: associative_scan(np.cross, x), ScanTypeError, ["NumPy's cross", "torch.cross"]),
    (lambda: assocscan.monoid(np.maximum), ScanTypeError, ["assocscan.ops.max"]),
    (lambda: associative_scan(x, ops.sum), ScanTypeError,
     ["op is a tensor and xs a Monoid 'sum': the operator comes first"]),
    (lambda: associative_scan((x, x), pairwise), ScanTypeError,
     ["op is a tuple and xs a function 'pairwise'", "the operator comes first"]),
    (lambda: reduce(x, "sum"), ScanTypeError, ["op is a tensor and xs 'sum'", "comes first"]),
    (lambda: explain(x, ops.sum), ScanTypeError, ["the operator comes first"]),
    (lambda: associative_scan(x, x), ScanTypeError, ["op must be a Monoid", "got a tensor"]),
]  # fmt: skip


def neither(value: Any) -> Any:
    return value


ADDRESSES: list[Refused] = [
    (call, (ScanTypeError, ScanValueError), ["a function 'neither'"])
    for call in (
        lambda: associative_scan(ops.sum, x, neither),
        lambda: associative_scan(ops.sum, x, reverse=neither),
        lambda: associative_scan(ops.sum, x, backend=neither),
        lambda: associative_scan(ops.sum, x, deterministic=neither),
        lambda: cumsum(x, dtype=neither),
        lambda: cumsum(x, backend=neither),
        lambda: linear_recurrence(x, x, axis=0, deterministic=neither),
        lambda: Monoid(adding, adjoint=neither),
        lambda: Monoid(adding, adjoint=[ops.sum, neither]),
        lambda: Monoid(adding, element_ndim=neither),
        lambda: segmented(neither),
    )
]

EVERY = [*INSTEAD_OF_TENSORS, *OPERATORS, *ADDRESSES]


@pytest.mark.parametrize("call,kind,mentions", EVERY, ids=[f"{k}" for k in range(len(EVERY))])
def test_message(call: Callable[[], Any], kind: Any, mentions: list[str]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, AssocScanError)
    for words in mentions:
        assert words in str(caught.value)
    assert " at 0x" not in str(caught.value)
