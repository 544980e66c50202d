"""`nonlinear_recurrence` over packed sequences and with resets, beside a loop for each sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step_calls import (
    GRU,
    LSTM,
    OFFSETS,
    beside,
    decayed,
    draw,
    each_backend,
    each_case,
    run,
)
from steps import Case, Given, arguments, gru, loop, lstm
from torch import Tensor
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from assocscan import nonlinear_recurrence


@pytest.mark.thinned(32)
@each_backend
@pytest.mark.parametrize("reverse", [False, True])
@each_case
def test_packed_sequences(case: Case, reverse: bool, backend: str) -> None:
    """Empty ones among them; each starts from its own init, or all from one."""
    given = arguments(case, 17)
    options: dict[str, Any] = {"offsets": OFFSETS, "reverse": reverse}
    beside(case, given, backend, **options)
    leaves, spec = pytree.tree_flatten(given.init)
    if all(isinstance(t, Tensor) for t in leaves):
        own = [torch.stack([t * (0.5 + s / 10) for s in range(6)]) for t in leaves]
        changed = given._replace(init=pytree.tree_unflatten(own, spec))
        beside(case, changed, backend, own_init=True, **options)
        other = torch.tensor([0, 0, 4, 9, 9, 9, 17])
        beside(case, changed, backend, own_init=True, offsets=other, reverse=reverse)
    beside(case, given, backend, offsets=OFFSETS.int())


@each_backend
def test_packed_gradients(backend: str) -> None:
    given = arguments(GRU, 17)
    for own in (False, True):
        init = torch.stack([given.init * k for k in range(6)]) if own else given.init
        leaves = [t.clone().requires_grad_() for t in (*given.xs, init, *given.params)]
        changed = Given(tuple(leaves[:3]), leaves[3], tuple(leaves[4:]))
        y, last = loop(gru, changed.xs, changed.init, params=changed.params, offsets=OFFSETS,
                       own_init=own)  # fmt: skip
        weights = draw(*y.shape, seed=1), draw(*last.shape, seed=2)
        want = torch.autograd.grad((y, last), leaves, weights)
        for _ in range(2):
            got = run(GRU, changed, offsets=OFFSETS, backend=backend)
            assert_close(torch.autograd.grad(got, leaves, weights), want)


@each_backend
def test_no_sequences(backend: str) -> None:
    h, last = nonlinear_recurrence(
        decayed, draw(2, 0, 3), 0.0, params=draw(3), offsets=torch.tensor([0]),
        return_final=True, backend=backend,
    )  # fmt: skip
    assert h.shape == (2, 0, 3) and last.shape == (0, 2, 3)


RESETS = {
    "steps": (9, 1), "rows": (2, 9), "whole": (2, 9, 3), "broadcast": (1, 9, 3),
}  # fmt: skip


@pytest.mark.thinned(12)
@each_backend
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", RESETS)
def test_resets(kind: str, reverse: bool, backend: str) -> None:
    """There h[t] = step(init, x[t]); with gradients, of init too."""
    mask = draw(*RESETS[kind], seed=4) > 0.3
    given = arguments(LSTM, 9)
    beside(LSTM, given, backend, reset=mask, reverse=reverse)
    beside(LSTM, given._replace(init=(0.5, -1.0)), backend, reset=mask, reverse=reverse)
    leaves = [t.clone().requires_grad_() for t in (*given.xs, *given.init, *given.params)]
    changed = Given(tuple(leaves[:4]), tuple(leaves[4:6]), tuple(leaves[6:]))
    options: dict[str, Any] = {"reset": mask, "reverse": reverse}
    want = loop(lstm, changed.xs, changed.init, params=changed.params, **options)
    weights = [draw(*t.shape, seed=k) for k, t in enumerate(pytree.tree_leaves(want))]
    expected = torch.autograd.grad(pytree.tree_leaves(want), leaves, weights)
    for _ in range(3):
        got = pytree.tree_leaves(run(LSTM, changed, backend=backend, **options))
        assert_close(torch.autograd.grad(got, leaves, weights), expected)
        mask.logical_not_().logical_not_()


@pytest.mark.exhaustive
@each_backend
def test_resets_of_one_row(backend: str) -> None:
    x, mask = draw(9, 3), draw(9, seed=4) > 0
    for shape in ((9,), (9, 1), (9, 3)):
        m = mask.view(9, *[1] * (len(shape) - 1)).expand(shape)
        want = loop(decayed, x, 0.5, 0, params=0.7, reset=m)
        for flipped in (m, ~m, m):
            got = nonlinear_recurrence(
                decayed, x, 0.5, 0, params=0.7, reset=flipped, return_final=True, backend=backend
            )
            if flipped is m:
                assert_close(got, want)
            else:
                assert_close(got, loop(decayed, x, 0.5, 0, params=0.7, reset=~m))
