"""Repeated scans over vectors: by the runner in C++ the same bits as by the one in Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from vector_cases import CASES, Case, expanded, leaves_of

from assocscan import associative_scan
from assocscan.api import associative_scan as api
from assocscan.runtime.native import build, runner

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason="the runner cannot be built")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """The runner is there, and knows no call."""
    runner.load()
    assert runner.module is not None
    for case in CASES.values():
        case.op.reductions.clear()
        case.op.calls.clear()
    yield


def tensors_of(tree: Any) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [t for part in tree for t in tensors_of(part)]


def drawn(case: Case, full: bool) -> tuple[Tensor, ...]:
    """Leaves that require gradients. full: none is repeated by `expand`."""
    xs = expanded([t.requires_grad_() for t in leaves_of(case, 2, 9, 5, 3)])
    return tuple(t.detach().clone().requires_grad_() for t in xs) if full else xs


def outcome(case: Case, xs: tuple[Tensor, ...], reverse: bool) -> tuple[list[Tensor], Any]:
    found = tensors_of(associative_scan(case.op, xs, 1, reverse, return_final=True))
    found = [t for t in found if t.requires_grad]
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(t.shape, generator=generator) for t in found]
    return found, torch.autograd.grad(found, xs, seeds, allow_unused=True)


def same_bits(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.stride() == b.stride() and torch.equal(a, b))


@pytest.mark.thinned(12)
@pytest.mark.parametrize("full", [True, False], ids=["full", "expanded"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(
    name: str, reverse: bool, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    xs = drawn(case, full)
    given = any(x.stride(d) == 0 and x.shape[d] > 1 for x in xs for d in range(x.dim()))
    first, expected = outcome(case, xs, reverse)
    for _ in range(3):
        found, gradients = outcome(case, xs, reverse)
        same_bits(found, first)
        same_bits(gradients, expected)
    asked: list[Any] = []
    entry_of = api.entry_of
    monkeypatch.setattr(api, "entry_of", lambda *a: asked.append(a) or entry_of(*a))
    found, gradients = outcome(case, xs, reverse)
    same_bits(found, first)
    same_bits(gradients, expected)
    assert bool(asked) == given  # the runner answers where no leaf is repeated


def test_repeated_leaves_and_others_in_turn() -> None:
    """The same shapes and strides, once by `expand` and once not: the gradient has its entries."""
    case = CASES["attention"]
    a, k, v, q = drawn(case, True)
    one = torch.rand(2, 1, 1, 3, requires_grad=True)
    for _ in range(4):
        y = associative_scan(case.op, (one.expand(-1, 9, -1, -1), k, v, q), 1)
        (summed,) = torch.autograd.grad(y.sum(), one)
        strided = one.detach().as_strided((2, 9, 1, 3), (3, 0, 3, 1)).requires_grad_()
        y = associative_scan(case.op, (strided, k, v, q), 1)
        (entries,) = torch.autograd.grad(y.sum(), strided)
        torch.testing.assert_close(entries.sum(1, keepdim=True), summed)
        assert len(entries[0, :, 0, 0].unique()) > 1
        associative_scan(case.op, (a, k, v, q), 1)
