"""Distributed scans in CUDA graphs, on one GPU: a group of one rank over NCCL, and what a rank of a
larger group computes from the totals of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import assocscan
from assocscan import distributed, ops
from assocscan.api.bind_arguments import bind
from assocscan.distributed.carries import carries, part_of
from assocscan.distributed.halo import halo
from assocscan.distributed.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own words on its CUDA graphs.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A group of this process alone."""
    if not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    device = torch.device("cuda", torch.cuda.current_device())
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    yield dist.group.WORLD
    dist.destroy_process_group()


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of a step, and the tensors in which its replays leave their results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # the second takes the executables of the first
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def close(results: list[Tensor], wanted: list[Tensor]) -> None:
    for t, w in zip(results, wanted, strict=True):
        limit = 2e-2 if t.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(t, w, rtol=limit, atol=limit)


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    a = torch.rand(shape, generator=generator, device="cuda").to(dtype)
    return a, torch.randn(shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape,axis", [((2, 5000, 64), 1), ((4, 20_000), 1)], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_recurrences(
    group: Any, shape: tuple[int, ...], axis: int, dtype: torch.dtype, reverse: bool
) -> None:
    """Forward with the final, and backward from both: replays see new inputs."""
    a, b = (t.requires_grad_() for t in draw(shape, dtype, 0))
    g = torch.randn(shape, device="cuda").to(dtype)
    options = {"axis": axis, "reverse": reverse, "return_final": True}

    def step(scan: Callable[..., Any] = distributed.linear_recurrence, **more: Any) -> Any:
        h, final = scan(a, b, **options, **more)
        found = torch.autograd.grad([h, final], [a, b], [g, torch.ones_like(final)])
        return [h.detach(), final.detach(), *found]

    graph, results = captured(lambda: step(group=group))
    for seed in (1, 2):
        new = draw(shape, dtype, seed)
        with torch.no_grad():
            a.copy_(new[0]), b.copy_(new[1])
        for t in results:
            t.fill_(float("nan"))
        graph.replay()
        close(results, step(assocscan.linear_recurrence))


def test_without_gradients(group: Any) -> None:
    """Values alone, of a scan and of a reduction."""
    a, b = draw((2, 5000, 64), torch.float32, 0)
    options = {"axis": 1, "init": (torch.ones(2, 64, device="cuda"), b[:, 0].clone())}

    def step(over: Any = distributed, **more: Any) -> Any:
        ys = over.associative_scan(ops.affine, (a, b), **options, **more)
        return [*ys, *over.reduce(ops.affine, (a, b), **options, **more)]

    graph, results = captured(lambda: step(group=group))
    for t, new in zip((a, b), draw((2, 5000, 64), torch.float32, 1), strict=True):
        t.copy_(new)
    for t in results:
        t.fill_(float("nan"))
    graph.replay()
    close(results, step(assocscan))


def test_halos(group: Any) -> None:
    """The inputs before a part, and their gradient."""
    x = torch.randn(2, 50, 4, device="cuda", requires_grad=True)
    state = torch.randn(2, 3, 4, device="cuda")

    def step() -> list[Tensor]:
        before, last = halo(x, 3, state, group=group)
        return [before.detach(), last.detach(), *torch.autograd.grad((last + before).sum(), x)]

    graph, (before, last, gradient) = captured(step)
    with torch.no_grad():
        x.normal_()
    graph.replay()
    assert torch.equal(before, state) and torch.equal(last, x[:, -3:])
    assert gradient.sum() == 2 * 3 * 4 and (gradient[:, -3:] == 1).all()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_carries_of_a_rank_of_three(rank: int) -> None:
    """What each rank does between the collective and its scan, without the collective."""
    a, b = draw((2, 3, 64), torch.float32, 0)  # one total for each rank
    call = bind(ops.affine, (a, b), 1, False, True, None, False, None)
    part = part_of(replace(call, return_final=True), Ranks("none", rank, 3), "auto", None)

    def step() -> list[Tensor]:
        entering, final = carries(part, True, (a, b))
        return [*entering, *final]

    graph, results = captured(step)
    for t, new in zip((a, b), draw((2, 3, 64), torch.float32, 1), strict=True):
        t.copy_(new)
    graph.replay()
    whole = assocscan.associative_scan(ops.affine, (a, b), 1)
    wanted = [t[:, k] for k in ([rank - 1] if rank else []) + [2] for t in whole]
    close(results, wanted)
