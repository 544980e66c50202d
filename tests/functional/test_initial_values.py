"""`include_initial=`: cumulative sums and products with the identity in front."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from table import Engine
from torch import Tensor

import assocscan
from assocscan import AxisError, ScanTypeError, ScanValueError, cumprod, cumsum

F64 = torch.float64
OFFSETS = torch.tensor([0, 3, 3, 4, 9])
SEQUENCES = [*itertools.pairwise(OFFSETS.tolist())]


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def loop(name: str, x: Tensor, axis: int, reverse: bool) -> Tensor:
    """One step after the other, in the dtype of x."""
    combine = operator.add if name == "cumsum" else operator.mul
    state = torch.full_like(x.select(axis, 0), 0 if name == "cumsum" else 1)
    steps = x.unbind(axis)
    states = [*itertools.accumulate(steps[::-1] if reverse else steps, combine, initial=state)]
    return torch.stack(states[::-1] if reverse else states, axis)


each_name = pytest.mark.parametrize("name", ["cumsum", "cumprod"])
each_direction = pytest.mark.parametrize("reverse", [False, True])


def values_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    cotangent = sample(*y.shape, seed=1).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaf, cotangent)]


@pytest.mark.thinned(8)
@each_name
@each_direction
@pytest.mark.parametrize("axis", [0, -1])
def test_beside_a_loop(engine: Engine, name: str, reverse: bool, axis: int) -> None:
    """Twice, so that the call is repeated; then along the other axis."""
    x = engine.put(sample(5, 7).float())
    for along in (axis, axis, -1 - axis):
        found = values_and_gradient(
            lambda t, along=along: getattr(assocscan, name)(
                t, along, reverse, include_initial=True, backend=engine.name
            ),
            x,
        )
        want = values_and_gradient(lambda t, along=along: loop(name, t, along, reverse), x)
        torch.testing.assert_close(found, want)


@pytest.mark.thinned(7)
@each_name
@each_direction
def test_packed(name: str, reverse: bool) -> None:
    """Each sequence, an empty one too, has its own identity, where it would be alone."""
    function = getattr(assocscan, name)

    def alone(x: Tensor) -> Tensor:
        parts = [function(x[:, a:b], 1, reverse, include_initial=True) for a, b in SEQUENCES]
        return torch.cat(parts, 1)

    def packed(x: Tensor) -> Tensor:
        y: Tensor = function(x, 1, reverse, include_initial=True, offsets=OFFSETS)
        assert y.shape == (2, 9 + len(SEQUENCES), 3)
        return y

    x = sample(2, 9, 3)
    for _ in range(2):
        torch.testing.assert_close(values_and_gradient(packed, x), values_and_gradient(alone, x))


def test_no_sequences_and_no_elements() -> None:
    empty = torch.zeros(2, 0, dtype=torch.int32)
    assert cumsum(empty, include_initial=True).tolist() == [[0], [0]]
    assert cumprod(empty, include_initial=True).tolist() == [[1], [1]]
    none, three = torch.tensor([0]), torch.tensor([0, 0, 0, 0])
    assert cumsum(empty, include_initial=True, offsets=none).shape == (2, 0)
    assert cumprod(empty, include_initial=True, offsets=three).tolist() == [[1] * 3] * 2
    assert cumsum(torch.tensor(3), include_initial=True).tolist() == [0, 3]


@pytest.mark.thinned(8)
@each_name
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.complex64])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    """Those of the scan without the identity."""
    x = torch.tensor([2, 0, 1, 3]).to(dtype)
    y = getattr(assocscan, name)(x, include_initial=True)
    plain = getattr(assocscan, name)(x)
    assert y.dtype == plain.dtype and torch.equal(y[1:], plain)
    assert y[0] == (0 if name == "cumsum" else 1)
    assert getattr(assocscan, name)(x, dtype=F64 if dtype is torch.bool else torch.complex128,
                                    include_initial=True).dtype.itemsize >= 8  # fmt: skip


def test_compensated_sums() -> None:
    x = torch.tensor([1.0, 1e8, 1.0, -1e8])
    y = cumsum(x, compensated=True, include_initial=True)
    assert y.tolist()[0] == 0 and y.tolist()[-1] == 2


@pytest.mark.skipif(not hasattr(np, "cumulative_sum"), reason="needs NumPy 2.1")
def test_the_array_api() -> None:
    x = sample(3, 6)
    for axis in (0, 1):
        for mine, theirs in ((cumsum, "cumulative_sum"), (cumprod, "cumulative_prod")):
            want = getattr(np, theirs)(x.numpy(), axis=axis, include_initial=True)
            torch.testing.assert_close(mine(x, axis, include_initial=True), torch.as_tensor(want))


@pytest.mark.thinned(7)
@each_name
def test_second_derivatives(name: str) -> None:
    x = sample(2, 9).requires_grad_()
    for offsets in (None, OFFSETS):
        function = functools.partial(
            getattr(assocscan, name), include_initial=True, offsets=offsets
        )
        torch.autograd.gradcheck(function, x, fast_mode=True)
        torch.autograd.gradgradcheck(function, x, fast_mode=True)


def test_compiled_and_mapped() -> None:
    def call(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return (
            cumprod(x, include_initial=True, reverse=True),
            cumsum(x, include_initial=True, offsets=offsets),
        )

    rows = sample(3, 9)
    want = [call(row, OFFSETS) for row in rows]
    mapped = torch.func.vmap(call, (0, None))(rows, OFFSETS)
    torch.testing.assert_close(mapped, tuple(torch.stack(t) for t in zip(*want, strict=True)))
    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    for row, expected in zip(rows, want, strict=True):
        leaves = [row.clone().requires_grad_() for _ in range(2)]
        found = [f(leaf, OFFSETS) for f, leaf in zip((compiled, call), leaves, strict=True)]
        torch.testing.assert_close(found[0], expected)
        gradients = [
            torch.autograd.grad(y[0].sum() + y[1].square().sum(), leaf)
            for y, leaf in zip(found, leaves, strict=True)
        ]
        torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize(
    "call,error,words",
    [
        (lambda x: cumsum(x, inclusive=False, include_initial=True), ScanValueError,
         r"cumsum\(include_initial=True\) is inclusive.*Leave out inclusive=False"),
        (lambda x: cumprod(x, 0, False, False, include_initial=True), ScanValueError, "cumprod"),
        (lambda x: cumsum(x, include_initial=1.5), ScanTypeError, "include_initial is 1.5"),
        (lambda x: cumsum(x, 2, include_initial=True), AxisError, r"axis 2.*x of shape \[3\]"),
        (lambda x: cumsum(x[0], 1, include_initial=True), AxisError, "counts as one step"),
        (lambda x: cumsum([1.0], include_initial=True), ScanTypeError, "x is a list"),
        (lambda x: cumsum(x, include_initial=True, offsets=torch.tensor([0, 2])), ScanValueError,
         "axis has length 3"),
        (lambda x: cumsum(x, include_initial=True, dtype=float), ScanTypeError, "cannot scan in"),
    ],
)  # fmt: skip
def test_refused(call: Callable[[Tensor], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(torch.ones(3))
