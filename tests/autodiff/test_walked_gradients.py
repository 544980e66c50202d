"""Backward passes that walk along the axis on a CPU, where the Jacobian of a step is too large to
be scanned: beside autograd through a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from assocscan import Monoid, associative_scan
from assocscan.runtime import backward_pass
from assocscan.testing import reference_scan

SIZE = 9
MIXING = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).double()
MIXING = torch.linalg.qr(MIXING)[0]  # orthogonal: its inverse is its transpose


ROWS, COLUMNS = MIXING.tolist(), MIXING.T.tolist()


def mixed(by: list[list[float]], numbers: Sequence[Tensor]) -> list[Tensor]:
    """A matrix times a vector of numbers."""
    return [sum(w * x for w, x in zip(row, numbers, strict=True)) for row in by]  # type: ignore


def products(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Products of numbers in other coordinates: each result depends on all of a and b."""
    scaled = [x * y for x, y in zip(mixed(ROWS, a), mixed(ROWS, b), strict=True)]
    return tuple(mixed(COLUMNS, scaled))


def both(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return products(a[:SIZE], b[:SIZE]) + products(a[SIZE:], b[SIZE:])


ONES = tuple(MIXING.sum(0).tolist())
# A Jacobian of 81 numbers; and one of 18 rows, more than a scan's derivative carries.
DENSE = Monoid(products, name="dense", identity=ONES)
LARGE = Monoid(both, name="large", identity=ONES + ONES)
EPISODES = torch.tensor([0, 2, 2, 9, 10])


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operators whose backward passes walked."""
    found: list[str] = []
    derive = backward_pass.adjoint_of

    def noted(*arguments: Any) -> Any:
        made = derive(*arguments)
        if made.operator.sequential:
            found.append(arguments[0].name)
        return made

    monkeypatch.setattr(backward_pass, "adjoint_of", noted)
    return found


def drawn(op: Monoid, batch: tuple[int, ...], seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    count = SIZE if op is DENSE else 2 * SIZE
    factors = 1 + 0.3 * torch.randn(count, *batch, generator=generator).double()
    parts = [torch.tensordot(MIXING.T, part, 1) for part in factors.split(SIZE)]
    return tuple(t.clone().requires_grad_() for t in torch.cat(parts))


def gradients(scan: Callable[..., Any], xs: Any, init: Any, **options: Any) -> list[Tensor]:
    """First and second derivatives of a sum of squares of all results."""
    given = [t for t in tree_leaves((xs, init)) if t is not None]
    results = scan(xs, init=init, **options)
    total = sum(t.square().sum() for t in tree_leaves(results))
    first = torch.autograd.grad(total, given, create_graph=True)
    return [*first, *torch.autograd.grad(sum(g.sin().sum() for g in first), given)]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "op", [DENSE, pytest.param(LARGE, marks=pytest.mark.slow)], ids=lambda op: op.name
)
@pytest.mark.parametrize("start, packed", [("alone", False), ("init", False), ("init", True)])
@pytest.mark.parametrize("inclusive, reverse", [(True, False), (True, True), (False, True)])
def test_derivatives_of_every_kind_of_scan(
    op: Monoid, start: str, inclusive: bool, reverse: bool, packed: bool, walked: list[str]
) -> None:
    """Twice, the second time with tensors at other addresses."""
    shape, starts, axis = ((10, 2), (4, 2), 0) if packed else ((2, 10), (2,), 1)
    options: dict[str, Any] = {"reverse": reverse, "inclusive": inclusive}
    if packed:
        options["offsets"] = EPISODES
    for seed in range(2):
        xs = drawn(op, shape, seed)
        init = None if start == "alone" else drawn(op, starts, 50 + seed)
        options["return_final"] = init is not None
        got, want = (
            gradients(partial(run, op, axis=axis), xs, init, **options)
            for run in (associative_scan, reference_scan)
        )
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert op.name in walked
