"""`torch.utils.checkpoint` compares what a call and its repetition save for the gradient: the first
call of a kind and later ones must save the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from assocscan import (
    associative_scan,
    linear_recurrence,
    matrix_recurrence,
    nn,
    nonlinear_recurrence,
    ops,
    reduce,
)

OFFSETS = torch.tensor([0, 4, 9])


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)))


def nonlinear(x: Tensor, init: Any = 0.0, params: Any = (), **options: Any) -> Tensor:
    def step(h: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
        return torch.tanh(h * weights[0] if weights else h) + x

    y: Tensor = nonlinear_recurrence(step, x, init, params=params, **options)
    return y


X = (2, 9, 3)
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "number as init": (nonlinear, (rand(*X),)),
    "init that broadcasts": (nonlinear, (rand(*X), rand(3))),
    "init of the whole shape": (nonlinear, (rand(*X), rand(2, 3))),
    "parameters": (lambda x, p: nonlinear(x, 0.0, p), (rand(*X), rand(3))),
    "newton": (lambda x, i: nonlinear(x, i, method="newton"), (rand(*X), rand(3))),
    "packed steps": (lambda x: nonlinear(x, offsets=OFFSETS), (rand(*X),)),
    "16 bits": (nonlinear, (rand(*X).bfloat16(), rand(2, 3).bfloat16())),
    "recurrence": (linear_recurrence, (rand(*X), rand(*X), rand(3))),
    "packed recurrence": (
        lambda a, b, i: linear_recurrence(a, b, i, offsets=OFFSETS.int()),
        (rand(*X), rand(*X), rand(2, 3)),
    ),
    "scan": (lambda x, i: associative_scan(ops.logaddexp, x, 1, init=i), (rand(*X), rand(3))),
    "final": (
        lambda x, i: associative_scan(ops.logaddexp, x, 1, init=i, return_final=True)[1],
        (rand(*X), rand(3)),
    ),
    "reduction": (lambda x, i: reduce(ops.logaddexp, x, 1, init=i), (rand(*X), rand(3))),
    "matrices": (matrix_recurrence, (rand(2, 9, 2, 2), rand(2, 9, 2), rand(2))),
    "layer": (lambda x: nn.DiagonalGRU(3)(x)[0], (rand(*X),)),
    "layer with a state": (lambda x, i: nn.RGLRU(3)(x, i)[0], (rand(*X), rand(1, 3))),
}


@pytest.mark.parametrize("name", CALLS)
def test_first_and_later_calls(name: str) -> None:
    function, given = CALLS[name]

    def seeded(*tensors: Tensor) -> Tensor:  # a layer draws its weights
        torch.manual_seed(0)
        return function(*tensors)

    for _ in range(3):
        leaves = [t.clone().requires_grad_() for t in given]
        y = checkpoint(seeded, *leaves, use_reentrant=False)
        got = torch.autograd.grad(y.sum(), leaves)
        expected = torch.autograd.grad(seeded(*leaves).sum(), leaves)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
