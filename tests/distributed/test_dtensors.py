"""Scans of DTensors against scans of the whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Rank, World

import assocscan
from assocscan import ScanTypeError, ScanValueError, ops


def meshes() -> Any:
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    return [(line, [Shard(1)]), (line, [Shard(0)]), (line, [Replicate()]),
            (square, [Shard(0), Shard(1)]), (square, [Shard(1), Replicate()])]  # fmt: skip


def check_dtensors(world: Rank) -> None:
    """Values and gradients: of sums over outputs and finals, in xs and init; uneven parts."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    generator = torch.Generator().manual_seed(0)
    a, b, w = (torch.randn(5, 6, 3, dtype=torch.float64, generator=generator) for _ in range(3))
    start, v = (torch.randn(5, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    for mesh, placements in meshes():
        everywhere = [Replicate()] * mesh.ndim
        for reverse in (False, True):
            whole = [t.clone().requires_grad_() for t in (a, b, start)]
            given = [distribute_tensor(t, mesh, placements).requires_grad_() for t in (a, b)]
            init = distribute_tensor(start, mesh, everywhere).requires_grad_()
            (_, h), (_, last) = assocscan.associative_scan(
                ops.affine, (whole[0], whole[1]), 1, reverse,
                init=(torch.ones_like(start), whole[2]), return_final=True,
            )  # fmt: skip
            (_, y), (_, final) = assocscan.associative_scan(
                ops.affine, tuple(given), -2, reverse,
                init=(torch.ones_like(start), init), return_final=True,
            )  # fmt: skip
            assert list(y.placements) == placements and y.shape == h.shape
            torch.testing.assert_close(y.full_tensor(), h)
            torch.testing.assert_close(final.full_tensor(), last)
            total = assocscan.reduce("logaddexp", given[0], 1, reverse)
            expected_total = assocscan.reduce("logaddexp", whole[0], 1, reverse)
            torch.testing.assert_close(total.full_tensor(), expected_total)
            wanted = (h * w).sum() + (last * v).sum() + (expected_total * v).sum()
            expected = torch.autograd.grad(wanted, whole)
            loss = (y * distribute_tensor(w, mesh, placements)).sum()
            for t in (final, total):
                loss = loss + (t * distribute_tensor(v, mesh, t.placements)).sum()
            found = torch.autograd.grad(loss.full_tensor(), [*given, init])
            for g, e in zip(found, expected, strict=True):
                torch.testing.assert_close(g.full_tensor(), e)


def check_starts(world: Rank) -> None:
    """An `init` that broadcasts to the carry. Its gradients are whole on every rank."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, _ = meshes()[0]
    generator = torch.Generator().manual_seed(0)
    a, b, w = (torch.randn(4, 6, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    add = assocscan.with_lift(ops.sum, torch.square)
    for shape in ((), (1,), (4,), (1, 4), (4, 1), (4, 4)):
        start = torch.randn(shape, dtype=torch.float64, generator=generator)
        for dim in range(3):
            for op, tensors in ((ops.affine, [a, b]), (add, [a])):
                found = []
                for places in (None, [Shard(dim)]):
                    own = start.clone().requires_grad_()
                    given = [t.clone() for t in (*tensors, w)]
                    if places is not None:
                        given = [distribute_tensor(t, mesh, places) for t in given]
                    *leaves, weights = (t.requires_grad_() for t in given)
                    if op is add:
                        y = assocscan.associative_scan(op, leaves[0], 1, init=own)
                    else:
                        _, y = assocscan.associative_scan(op, tuple(leaves), 1, init=(1.0, own))
                    (y * weights).sum().backward()
                    found.append([y, *(t.grad for t in (*leaves, own))])
                for got, wanted in zip(found[1], found[0], strict=True):
                    whole = got.full_tensor() if hasattr(got, "full_tensor") else got
                    torch.testing.assert_close(whole, wanted)


def check_refusals(world: Rank) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh, _ = meshes()[0]
    x = torch.ones(4, 4)
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    scan = assocscan.associative_scan
    with pytest.raises(ScanTypeError, match=r"xs\[1\] is a Tensor, but other leaves are DTensors"):
        scan(ops.affine, (sharded, x))
    with pytest.raises(ScanValueError, match=r"xs\[1\] has the placements .*redistribute"):
        scan(ops.affine, (sharded, distribute_tensor(x, mesh, [Replicate()])))
    with pytest.raises(ScanValueError, match="belongs to one element"):
        scan("matmul", distribute_tensor(torch.ones(2, 4, 4), mesh, [Shard(2)]))
    with pytest.raises(ScanTypeError, match="offsets"):
        scan("sum", sharded, offsets=torch.tensor([0, 4]))
    partial = torch.distributed.tensor.DTensor.from_local(x, mesh, [Partial()])
    with pytest.raises(ScanValueError, match="a scan takes Shard and Replicate"):
        scan("sum", partial)


@pytest.mark.slow
def test_dtensors(world: World) -> None:
    world.run(check_dtensors, 4)


def test_refusals(world: World) -> None:
    world.run(check_refusals, 4)


@pytest.mark.slow
def test_starts(world: World) -> None:
    world.run(check_starts, 4)
