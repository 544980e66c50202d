"""Distributed scans inside torch.compile: collectives are in the graph, values and gradients are
those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Rank, World

import assocscan
from assocscan import Monoid, distributed, ops
from assocscan.nn import Hawk


def check_compiled(world: Rank, backend: str) -> None:
    lengths = {2: (3, 4), 3: (2, 0, 4)}[world.size]
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(2, sum(lengths), 3, dtype=torch.float64, generator=generator)
    b = torch.randn(2, sum(lengths), 3, dtype=torch.float64, generator=generator)
    group = world.group

    def scan(a: Any, b: Any, module: Any, **options: Any) -> Any:
        (p, h), final = module.associative_scan(ops.affine, (a, b), 1, return_final=True, **options)
        return p.cos() + h.sin(), final[1]

    def recurrence(a: Any, b: Any, module: Any, **options: Any) -> Any:
        h = module.linear_recurrence(a.sigmoid(), b, reverse=True, **options)
        return h * 2, module.reduce("logaddexp", b, 1, **options)

    for function in (scan, recurrence):

        def over_ranks(a: Any, b: Any, function: Any = function) -> Any:
            return function(a, b, distributed, group=group)

        whole = [t.clone().requires_grad_() for t in (a, b)]
        part = [world.part(t, lengths, 1).clone().requires_grad_() for t in (a, b)]
        wanted, last = function(*whole, assocscan)
        y, final = torch.compile(over_ranks, fullgraph=True, backend=backend)(*part)
        torch.testing.assert_close(y, world.part(wanted, lengths, 1))
        torch.testing.assert_close(final, last)
        w = torch.randn(wanted.shape, dtype=torch.float64, generator=generator)
        loss = (y * world.part(w, lengths, 1)).sum() + (world.rank + 1) * final.sum()
        times = sum(range(1, world.size + 1))
        expected = (wanted * w).sum() + times * last.sum()
        found = torch.autograd.grad(loss, part)
        for g, e in zip(found, torch.autograd.grad(expected, whole), strict=True):
            torch.testing.assert_close(g, world.part(e, lengths, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend, size", [("aot_eager", 3), ("inductor", 2)])
def test_compiled(world: World, backend: str, size: int) -> None:
    world.run(check_compiled, size, backend)


def check_layer(world: Rank) -> None:
    """A layer with a convolution, whose inputs come from the rank before."""
    torch.manual_seed(0)
    layer = Hawk(4, width=4)
    x = torch.randn(2, 7, 4)
    part = world.part(x, (2, 5), 1).clone().requires_grad_()
    compiled = torch.compile(lambda x: layer(x, group=world.group)[0], backend="aot_eager")
    whole = x.clone().requires_grad_()
    y, wanted = compiled(part), layer(whole)[0]
    torch.testing.assert_close(y, world.part(wanted, (2, 5), 1))
    (found,) = torch.autograd.grad(y.square().sum(), part)
    (expected,) = torch.autograd.grad(wanted.square().sum(), whole)
    torch.testing.assert_close(found, world.part(expected, (2, 5), 1))


@pytest.mark.exhaustive
def test_layers(world: World) -> None:
    world.run(check_layer, 2)


ratio = Monoid(torch.add, identity=0.0, name="distributed_ratio", lower=lambda s, x: x / s)


def check_no_identity(world: Rank) -> None:
    compiled = torch.compile(lambda x: distributed.reduce(torch.add, x, group=world.group),
                             backend="aot_eager")  # fmt: skip
    with pytest.raises(Exception, match="declares no identity"):
        compiled(torch.ones(3))
    compiled = torch.compile(lambda x: distributed.reduce(ratio, x, group=world.group),
                             backend="aot_eager")  # fmt: skip
    with pytest.raises(Exception, match="lower of 'distributed_ratio' takes the inputs"):
        compiled(torch.ones(3))


@pytest.mark.slow
def test_without_identity(world: World) -> None:
    world.run(check_no_identity, 2)
