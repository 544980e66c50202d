"""Backward passes that compute the gradient of the entering carry alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from assocscan import associative_scan, ops
from assocscan.runtime import executable_cache as executables
from assocscan.runtime.autograd import only_carries

NAMES = ["affine", "logaddexp", "matrix_affine", "raw"]


def operands(name: str) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        t = torch.randn(shape, generator=g, dtype=torch.float64) * 0.5
        return t.requires_grad_()

    if name == "matrix_affine":
        return ops.matrix_affine, [draw(2, 9, 2, 2), draw(2, 9, 2)], [draw(2, 2, 2), draw(2, 2)]
    if name == "affine":
        return ops.affine, [draw(2, 9), draw(2, 9)], [draw(2), draw(2)]
    op: Any = ops.logaddexp if name == "logaddexp" else (lambda a, b: a * b + 0 * a)
    return op, [draw(2, 9)], [draw(2)]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reverse", [False, True])
def test_nothing_else_is_written(name: str, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    op, xs, init = operands(name)
    is_one = len(xs) == 1
    found = associative_scan(
        op, xs[0] if is_one else tuple(xs), 1, reverse, init=init[0] if is_one else tuple(init)
    )
    ys = [found] if is_one else list(found)
    weights = [torch.randn_like(y) * (torch.rand_like(y) < 0.5) for y in ys]
    written = []
    prepare = executables.prepare

    def recorded(backend: str, spec: Any, tensors: Any) -> Any:
        written.append(len(spec.operator.outputs))
        return prepare(backend, spec, tensors)

    monkeypatch.setattr(executables, "prepare", recorded)
    with only_carries():
        carries = torch.autograd.grad(ys, init, weights, retain_graph=True)
    assert written == [0]
    everything = torch.autograd.grad(ys, [*xs, *init], weights)
    assert written[1] > 0
    for g, expected in zip(carries, everything[len(xs) :], strict=True):
        torch.testing.assert_close(g, expected)
