"""Calls of `nonlinear_recurrence` that its tests make, each beside a loop of plain torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from steps import CASES, Case, Given, loop
from torch import Tensor
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from assocscan import nonlinear_recurrence

F64 = torch.float64
INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton takes CPU tensors in its interpreter"
)
BACKENDS = ["cpu", "eager"]
each_backend = pytest.mark.parametrize(
    "backend",
    [*BACKENDS, pytest.param("triton", marks=[INTERPRETED, pytest.mark.exhaustive])],
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
GRU, LSTM = CASES[:2]
OFFSETS = torch.tensor([0, 3, 3, 8, 8, 9, 17])


def decayed(h: Any, x: Any, rate: Any) -> Any:
    return torch.tanh(rate * h + x)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def run(case: Case, given: Given, **options: Any) -> Any:
    xs, init, params = given
    return nonlinear_recurrence(case.step, xs, init, params=params, return_final=True, **options)


def beside(case: Case, given: Given, backend: str, own_init: bool = False, **options: Any) -> None:
    """The same call twice, beside the loop."""
    want = loop(case.step, given.xs, given.init, params=given.params, own_init=own_init, **options)
    for _ in range(2):
        got = run(case, given, backend=backend, **options)
        assert pytree.tree_structure(got) == pytree.tree_structure(want)
        assert_close(pytree.tree_leaves(got), pytree.tree_leaves(want), equal_nan=True)


def tracked(given: Given) -> tuple[Given, list[Tensor]]:
    """The arguments, of which those that may have a gradient want one."""
    leaves, spec = pytree.tree_flatten(given)
    leaves = [
        t.clone().requires_grad_()
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())
        else t
        for t in leaves
    ]
    return pytree.tree_unflatten(leaves, spec), [
        t for t in leaves if isinstance(t, Tensor) and t.requires_grad
    ]


def differentiable(results: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(results)
    return [t for t in leaves if t.is_floating_point() or t.is_complex()]


def gradients(results: Any, leaves: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(results, leaves, weights, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)]
