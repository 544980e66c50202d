"""Repeated calls with offsets are kept: values, gradients and errors are those of a first call,
whatever the offsets say now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import assocscan
from assocscan import (
    ScanValueError,
    associative_scan,
    linear_recurrence,
    monoid,
    monoids,
    ops,
    reduce,
)
from assocscan.runtime.native import runner

FIRST, SECOND = (0, 3, 3, 10), (0, 0, 9, 10)
LAST = monoid(lambda left, right: right, name="test_packed_last")  # without an identity


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_by_one(function: Callable[..., Any], offsets: Tensor, *xs: Tensor) -> Tensor:
    """The results of each sequence on its own."""
    pairs = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    return torch.cat([function(*(x[a:b] for x in xs)) for a, b in pairs if b > a])


CALLS: dict[str, tuple[Callable[..., Any], int]] = {
    "associative_scan": (lambda x, **o: associative_scan(ops.prod, x, 0, True, **o), 1),
    "cumsum": (lambda x, **o: assocscan.cumsum(x, 0, inclusive=False, **o), 1),
    "cumprod": (lambda x, **o: assocscan.cumprod(x, 0, **o), 1),
    "logcumsumexp": (lambda x, **o: assocscan.logcumsumexp(x, 0, **o), 1),
    "linear_recurrence": (lambda a, b, **o: linear_recurrence(a, b, axis=0, **o), 2),
    "reduce": (lambda x, **o: reduce(ops.sum, x, 0, **o), 1),
}


@pytest.fixture(params=["python", "wait"])
def each_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The runner in C++ is there, or not."""
    if request.param == "wait":
        runner.load()
        assert runner.module is not None, runner.why_not
    else:
        monkeypatch.setattr(runner, "call", runner.never)
        monkeypatch.setattr(runner, "module", None)
        monkeypatch.setattr(runner, "start", lambda is_first: None)
    return str(request.param)


@pytest.mark.parametrize("name", CALLS)
def test_offsets_may_change(each_runner: str, name: str) -> None:
    """Each call three times, then with other values, at another address, with int32, with
    gradients and without."""
    function, count = CALLS[name]
    xs = [sample(10, 4, seed=k) for k in range(count)]
    other = torch.tensor((9, *SECOND))[1:]
    given = [torch.tensor(FIRST)] * 3 + [torch.tensor(SECOND)] * 2 + [other]
    for offsets in (*given, torch.tensor(FIRST).int(), torch.tensor(SECOND)):
        for with_gradient in (False, True, True):
            leaves = [x.clone().requires_grad_(with_gradient) for x in xs]
            y = function(*leaves, offsets=offsets)
            if name == "reduce":
                y = y[offsets.diff() > 0]
                expected = one_by_one(lambda x: x.sum(0)[None], offsets, *leaves)
            else:
                expected = one_by_one(function, offsets, *leaves)
            torch.testing.assert_close(y, expected)
            if with_gradient:
                weight = sample(*y.shape, seed=5)
                found = torch.autograd.grad((y * weight).sum(), leaves)
                wanted = torch.autograd.grad((expected * weight).sum(), leaves)
                torch.testing.assert_close(found, wanted)


def test_wrong_offsets_of_a_repeated_call(each_runner: str) -> None:
    x, good = sample(10), torch.tensor(FIRST)
    for _ in range(3):
        assocscan.cumsum(x, 0, offsets=good)
    rules = {
        r"offsets\[0\] is 1": (1, 3, 3, 10),
        r"offsets\[-1\] is 11": (0, 3, 3, 11),
        "must not decrease": (0, 7, 3, 10),
    }
    for rule, wrong in rules.items():
        for backend in ("auto", "cpu"):
            with pytest.raises(ScanValueError, match=rule):
                assocscan.cumsum(x, 0, offsets=torch.tensor(wrong), backend=backend)
    torch.testing.assert_close(
        assocscan.cumsum(x, 0, offsets=good), one_by_one(lambda t: t.cumsum(0), good, x)
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_offsets_changed_before_the_backward_pass(dtype: torch.dtype) -> None:
    """In place, torch says so. In memory that it shares with numpy it cannot know it: the values
    are checked once more, and nothing is read out of bounds."""
    a, b = (sample(10, seed=k).requires_grad_() for k in range(2))
    for _ in range(4):
        offsets = torch.tensor(FIRST, dtype=dtype)
        y = linear_recurrence(a, b, axis=0, offsets=offsets)
        torch.autograd.grad(y.sum(), (a, b))
    y = linear_recurrence(a, b, axis=0, offsets=offsets)
    offsets.numpy()[2] = 10**9
    with pytest.raises(ScanValueError, match="must not decrease"):
        torch.autograd.grad(y.sum(), (a, b))
    offsets = torch.tensor(FIRST, dtype=dtype)
    y = linear_recurrence(a, b, axis=0, offsets=offsets)
    offsets[1] = 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), (a, b))


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("name", [*CALLS, "matrices"])
def test_int32_offsets_are_converted_by_the_runner(
    name: str, with_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets as flash-attention has them: the third call is in C++, and the fifth backward
    pass, whatever the offsets say then."""
    runner.load()
    assert runner.module is not None, runner.why_not
    for known in monoids().values():
        known.calls.clear()
        known.reductions.clear()
    matrices: Any = (lambda x, **o: associative_scan(ops.matmul, x, 0, **o), 1)
    function, count = (CALLS | {"matrices": matrices})[name]
    shape = (10, 2, 2) if name == "matrices" else (10, 4)
    xs = [sample(*shape, seed=k).requires_grad_(with_gradient) for k in range(count)]

    def results(offsets: Tensor) -> list[Tensor]:
        y = function(*xs, offsets=offsets)
        if not with_gradient:
            return [y]
        return [y, *torch.autograd.grad(y, xs, sample(*y.shape, seed=5))]

    def refused(*arguments: Any) -> Any:
        raise AssertionError("a call in Python")

    given = [FIRST, SECOND] * 3
    expected = [results(torch.tensor(bounds)) for bounds in given]
    for k, bounds in enumerate(given):
        if k == 2:
            monkeypatch.setattr("assocscan.api.associative_scan.entry_of", refused)
            monkeypatch.setattr("assocscan.api.reduce.entry_of", refused)
        if k == 4:
            monkeypatch.setattr("assocscan.runtime.autograd.Scan.backward", refused)
        for found, wanted in zip(results(torch.tensor(bounds).int()), expected[k], strict=True):
            torch.testing.assert_close(found, wanted)
    with pytest.raises(AssertionError, match="in Python"):  # it says what is wrong
        results(torch.tensor((0, 7, 3, 10)).int())


def test_int32_offsets_beside_an_init_that_is_converted(each_runner: str) -> None:
    a, b = (sample(10, 4, seed=k).requires_grad_() for k in range(2))
    init = sample(4, seed=2).float().requires_grad_()
    wanted = [a, b, init]
    for bounds in (FIRST, FIRST, FIRST, SECOND):
        found, expected = (
            linear_recurrence(a, b, init.expand(3, 4), axis=0, offsets=offsets, backend=backend)
            for offsets, backend in (
                (torch.tensor(bounds).int(), "cpu"), (torch.tensor(bounds), "eager")
            )
        )  # fmt: skip
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found.square().sum(), wanted, create_graph=True),
            torch.autograd.grad(expected.square().sum(), wanted, create_graph=True),
        )
        torch.testing.assert_close(
            torch.autograd.grad(found.sum(), wanted), torch.autograd.grad(expected.sum(), wanted)
        )


def test_an_empty_sequence_without_identity() -> None:
    x = sample(10)
    for _ in range(3):
        reduce(LAST, x, 0, offsets=torch.tensor((0, 3, 4, 10)))
    with pytest.raises(ScanValueError, match="identity"):
        reduce(LAST, x, 0, offsets=torch.tensor(FIRST))
