"""Layers with the sequence over ranks against one process: outputs, states and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, World
from torch import nn

from assocscan import ScanValueError
from assocscan.distributed.pipeline import pipeline
from assocscan.nn import (
    LRU,
    RGLRU,
    S5,
    Bidirectional,
    CausalConv,
    DiagonalGRU,
    DiagonalLSTM,
    DiagonalSLSTM,
    Hawk,
    Mamba,
    MatrixLRU,
)

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "RGLRU": lambda: RGLRU(4, heads=2),
    "Hawk": lambda: Hawk(4, width=6, heads=2),
    "LRU": lambda: LRU(4, states=3),
    "S5": lambda: S5(4, states=4),
    "MatrixLRU": lambda: MatrixLRU(4, heads=2, size=2),
    "CausalConv": lambda: CausalConv(4, width=4),
    "one filter": lambda: CausalConv(4, width=1),
    "Mamba": lambda: Mamba(4, states=3, conv_width=3),
    "DiagonalGRU": lambda: DiagonalGRU(4, width=3),
    "DiagonalLSTM": lambda: DiagonalLSTM(4, width=3),
    "DiagonalSLSTM": lambda: DiagonalSLSTM(4, width=3),
    "Bidirectional": lambda: Bidirectional(LRU(4), RGLRU(4)),
}
LENGTHS = {2: [(5, 6), (0, 3)], 3: [(1, 1, 6), (4, 0, 2), (2, 1, 1), (0, 0, 3)], 4: [(1, 1, 1, 2)]}


def check_layer(world: Rank, name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    parameters = list(layer.parameters())
    for lengths in LENGTHS[world.size]:
        x = torch.randn(2, sum(lengths), 4, dtype=torch.float64)
        earlier = None
        if name != "Bidirectional":
            earlier = layer(torch.randn(2, 5, 4, dtype=torch.float64))[1]
        for reverse in ((lengths[0] + world.size) % 2 == 0,):
            whole = x.clone().requires_grad_()
            part = world.part(x, lengths, 1).clone().requires_grad_()
            if earlier is None:
                y, state = layer(part, group=world.group), ()
                wanted, last = layer(whole), ()
            else:
                states = [tree_detached(earlier) for _ in range(2)]
                y, state = layer(part, states[0], reverse, group=world.group)
                wanted, last = layer(whole, states[1], reverse)
            close(y, world.part(wanted, lengths, 1))
            for s, e in zip(tensors(state), tensors(last), strict=True):
                close(s, e)
            w = torch.randn_like(wanted) * (torch.rand_like(wanted) < 0.5)
            w_state = [torch.randn_like(s) for s in tensors(last)]
            # Each rank has a share of the loss of the state.
            shares = [v / world.size for v in w_state]
            loss = inner([y], [world.part(w, lengths, 1)]) + inner(tensors(state), shares)
            expected = inner([wanted], [w]) + inner(tensors(last), w_state)
            g, *found = torch.autograd.grad(loss, [part, *parameters], materialize_grads=True)
            e, *sums = torch.autograd.grad(expected, [whole, *parameters])
            close(g, world.part(e, lengths, 1))
            for share, total in zip(found, sums, strict=True):
                share = share.contiguous()
                dist.all_reduce(share, group=world.group)
                close(share, total)


def tensors(state: Any) -> list[torch.Tensor]:
    return [state] if isinstance(state, torch.Tensor) else list(state)


def tree_detached(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach()
    return type(state)(*[s.detach() for s in state])


def inner(ys: list[torch.Tensor], ws: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    return sum(((y * w.conj()).real.sum() for y, w in zip(ys, ws, strict=True)), total)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.thinned(36)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "name",
    # Those that take turns compile kernels on every rank; the test below runs one of them.
    [pytest.param(n, marks=pytest.mark.exhaustive) if n.startswith("Diagonal") else n
     for n in LAYERS],
)  # fmt: skip
def test_layers(world: World, name: str, size: int) -> None:
    world.run(check_layer, size, name)


def check_second_derivatives(world: Rank) -> None:
    """Of a walk by turns. What a rank receives in others' turns it does not use, but it takes part
    in their derivatives."""
    torch.manual_seed(0)
    w = torch.rand(3, dtype=torch.float64, requires_grad=True)

    def walk(x: torch.Tensor, reverse: bool, state: list[torch.Tensor]) -> Any:
        ys, h = [x[:, :0]], state[0]
        for t in range(x.shape[1])[:: -1 if reverse else 1]:
            h = torch.tanh(w * h + x[:, t])
            ys.append(h[:, None])
        return torch.cat(ys[::-1] if reverse else ys, 1), [h]

    for lengths in ((1, 2, 5), (0, 3, 1), (2, 0, 0)):
        for reverse in (False, True):
            x = torch.randn(2, sum(lengths), 3, dtype=torch.float64)
            start = torch.randn(2, 3, dtype=torch.float64)
            found = []
            for group in (None, world.group):
                own = (x if group is None else world.part(x, lengths, 1)).clone().requires_grad_()
                if group is None:
                    y, (last,) = walk(own, reverse, [start])
                else:
                    y, (last,) = pipeline(
                        "a walk", functools.partial(walk, own, reverse), [start],
                        [own, w], reverse, group,
                    )  # fmt: skip
                share = 1 if group is None else world.size
                loss = y.square().sum() + last.sum() / share
                (first,) = torch.autograd.grad(loss, own, create_graph=True)
                found.append([first, *torch.autograd.grad(first.square().sum(), [own, w])])
            whole, part = found
            for a, b in zip(whole[:2], part[:2], strict=True):
                close(b, world.part(a, lengths, 1))
            total = part[2].contiguous()
            dist.all_reduce(total, group=world.group)
            close(total, whole[2])


def test_second_derivatives_of_turns(world: World) -> None:
    world.run(check_second_derivatives, 3)


def check_turns(world: Rank) -> None:
    torch.manual_seed(0)
    layer, x = DiagonalGRU(4, 3), torch.randn(2, 5, 4)
    for _ in range(2):
        y, state = layer(world.part(x, (2, 3), 1), group=world.group)
        wanted, last = layer(x)
        torch.testing.assert_close(y, world.part(wanted, (2, 3), 1))
        torch.testing.assert_close(state, last)
    given = x if world.rank == 0 else x[:1]
    with pytest.raises(ScanValueError, match=r"the ranks disagree on the shape of input 0"):
        layer(given, group=world.group)
    with pytest.raises(ScanValueError, match="the ranks disagree on reverse"):
        layer(x, None, world.rank == 0, group=world.group)
    with pytest.raises(Exception, match="with group= inside"):
        torch.compile(layer, backend="eager", fullgraph=True)(x, group=world.group)
    layer(x, group=world.group)[0].sum().backward()  # the group still works


@pytest.mark.exhaustive
def test_layers_whose_ranks_take_turns(world: World) -> None:
    world.run(check_turns, 2)
