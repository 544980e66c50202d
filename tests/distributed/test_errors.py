"""One rank makes a mistake: every rank raises, and the group works on.

A rank that waited for another would be ended by the time limit of `World`, which is a failure.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, World
from torch import nn
from torch.autograd import forward_ad

import assocscan
from assocscan import AssocScanError, Monoid, distributed, ops
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
    rglru,
)

scan, reduce = distributed.associative_scan, distributed.reduce
recur = distributed.linear_recurrence
Calls = dict[str, Callable[[], Any]]


def branches(left: Any, right: Any) -> Any:
    return left if left.sum() > 0 else right


def fails(left: Any, right: Any) -> Any:
    raise ZeroDivisionError("on purpose")


def dual(f: Callable[[torch.Tensor], Any], x: torch.Tensor, is_dual: bool = True) -> Any:
    """f(x), x with a tangent of forward mode."""
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, torch.ones_like(x)) if is_dual else x)


class OnlyWhenRun:
    """An operator that is run as it is, and fails then."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __call__(self, left: Any, right: Any) -> Any:
        if self.fails and type(left) is torch.Tensor:
            raise ZeroDivisionError("on purpose")
        return left.sort(-1)[0] + right.sort(-1)[0]


def mistakes(g: Any, odd: bool) -> Calls:
    """Calls of which one rank makes its own, by a part of the error that all get."""
    x = torch.ones(3, 2)
    of_bools = x.bool() if odd else x
    other_length = torch.ones(4, 2) if odd else x
    op: Any = OnlyWhenRun(odd)
    name, chosen = "dim" if odd else "axis", "cuda" if odd else "auto"
    group_there = ((0, False, True, g), {}) if odd else ((), {"group": g})
    left_out: tuple[Any, ...] = () if odd else (x,)
    own: Any = Monoid(branches if odd else torch.add, name="mistaken_branch")

    def summed(t: torch.Tensor) -> torch.Tensor:
        return scan("sum", t, group=g).sum()  # type: ignore[no-any-return]

    return {
        "has no argument 'dim'": lambda: scan("sum", x, group=g, **{name: 0}),
        "has no argument 'dim': pass axis": lambda: reduce("sum", x, group=g, **{name: 0}),
        "linear_recurrence() has no": lambda: recur(0.5, x, group=g, **{name: 0}),
        "xs was not passed": lambda: scan("sum", *left_out, group=g),
        "by position": lambda: scan("sum", x, *group_there[0], **group_there[1]),
        "axis 7 is out of range": lambda: scan("sum", x, 7 if odd else 0, group=g),
        "axis 7 is out of range for": lambda: reduce("sum", x, 7 if odd else 0, group=g),
        "unknown backend 'foo'": lambda: scan("sum", x, backend="foo" if odd else None, group=g),
        "the cuda backend cannot": lambda: reduce("sum", x, backend=chosen, group=g),
        # The part of the others is empty: nothing runs there before the collective.
        "the cuda backend cannot run": lambda: scan(
            "sum", x if odd else x[:0], init=0.0, backend="cuda", group=g
        ),
        "check is 'yes'": lambda: scan("sum", x, check="yes" if odd else None, group=g),
        "the tensors are on meta": lambda: scan("sum", x.to("meta") if odd else x, group=g),
        "the tensors are on meta, but": lambda: reduce("sum", x.to("meta") if odd else x, group=g),
        "changes the dtype of element[1]": lambda: scan(ops.affine, (x, of_bools), group=g),
        "has length 4 along axis 0": lambda: scan(ops.affine, (x, other_length), group=g),
        "init has shape [5]": lambda: scan("sum", x, init=torch.ones(5 if odd else 2), group=g),
        "xs is None": lambda: scan("sum", None if odd else x, group=g),
        "no monoid is registered": lambda: scan("sumx" if odd else "sum", x, group=g),
        "branches on the value": lambda: scan(own, x, group=g),
        "branches on the value of": lambda: scan(branches if odd else torch.add, x, group=g),
        "torch.func transforms": lambda: torch.func.grad(summed)(x) if odd else summed(x),
        "torch.func transforms of": lambda: torch.vmap(summed, 1)(x) if odd else summed(x),
        "forward mode through": lambda: dual(summed, x) if odd else summed(x),
        "forward mode": lambda: dual(lambda t: scan("sum", x, init=t, group=g), x[0], odd),
        "ZeroDivisionError": lambda: reduce(fails if odd else torch.add, x, group=g),
        "on purpose": lambda: scan(op, x, backend="eager", group=g),
    }  # fmt: skip


def all_raise(world: Rank, calls: Calls) -> None:
    """Call after call; the others' messages name the rank whose mistake it is."""
    for expected, call in calls.items():
        with pytest.raises(Exception, match="") as caught:
            call()
        message = str(caught.value)
        told: list[Any] = [None] * world.size
        dist.all_gather_object(told, (message, type(caught.value).__name__), world.group)
        assert all(expected in said for said, _ in told), (expected, told)
        if world.rank != 1:
            assert isinstance(caught.value, AssocScanError)
            # Two ranks may make the same one.
            assert message.startswith("rank 1: ") or message == told[1][0], message
        # The group works on.
        assert scan("sum", torch.ones(1), group=world.group).item() == world.rank + 1


def check_scans(world: Rank) -> None:
    all_raise(world, mistakes(world.group, world.rank == 1))
    nowhere = torch.ones(2, device="meta")
    for function in (scan, reduce):
        with pytest.raises(AssocScanError, match="the tensors are on meta"):
            function("sum", nowhere, group=world.group)


@pytest.mark.parametrize("size", [2, 3])
def test_scans(world: World, size: int) -> None:
    world.run(check_scans, size)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "RGLRU": lambda: RGLRU(4),
    "Hawk": lambda: Hawk(4),
    "LRU": lambda: LRU(4),
    "S5": lambda: S5(4, states=4),
    "MatrixLRU": lambda: MatrixLRU(4, heads=2, size=2),
    "CausalConv": lambda: CausalConv(4, width=4),
    "Mamba": lambda: Mamba(4, states=3),
    "DiagonalGRU": lambda: DiagonalGRU(4),
    "DiagonalLSTM": lambda: DiagonalLSTM(4),
    "DiagonalSLSTM": lambda: DiagonalSLSTM(4),
    "Bidirectional": lambda: Bidirectional(LRU(4), RGLRU(4)),
}


def mistakes_of(layer: nn.Module, group: Any, odd: bool) -> Calls:
    x = torch.randn(2, 3, 4)
    unknown: Any = {"dim": 0} if odd else {}
    offsets: Any = {"offsets": torch.tensor([0, 3])} if odd else {}
    calls: Calls = {
        "has no argument 'dim'": lambda: layer(x, group=group, **unknown),
        "x has shape [2, 3, 5]": lambda: layer(torch.randn(2, 3, 5) if odd else x, group=group),
        "x is None": lambda: layer(None if odd else x, group=group),
        "offsets and group were passed": lambda: layer(x, group=group, **offsets),
    }
    if not isinstance(layer, Bidirectional):
        calls["state"] = lambda: layer(x, torch.ones(7, 7) if odd else None, group=group)
    return calls


def check_layers(world: Rank) -> None:
    odd, options = world.rank == 1, {"group": world.group}
    x = torch.randn(2, 3, 4)
    for make in LAYERS.values():
        all_raise(world, mistakes_of(make(), world.group, odd))
    given = [x, x, x, torch.ones(4)]
    short = [x, x, x, torch.ones(4)[:3]] if odd else given
    all_raise(world, {
        "decay has shape [3]": lambda: rglru(*short, **options),
        "has no argument 'dim'": lambda: rglru(*given, **options, **({"dim": 0} if odd else {})),
    })  # fmt: skip


def check_between_collectives(world: Rank) -> None:
    """A layer fails after its convolution has met the other ranks, or while ranks take turns."""
    odd = world.rank == 1
    hawk = Hawk(4)
    torch.manual_seed(0)
    if odd:
        hawk.recurrence = copy.deepcopy(hawk.recurrence).double()
    x = torch.randn(2, 3, 4)

    def walk(state: Any) -> Any:
        if odd:
            raise ZeroDivisionError("on purpose")
        return x, state

    all_raise(world, {
        "the layer's parameters are torch.float64": lambda: hawk(x, group=world.group),
        "on purpose": lambda: pipeline("a walk", walk, [x[:, 0]], [x], group=world.group),
    })  # fmt: skip


def check_backward(world: Rank) -> None:
    """One rank differentiates another call first, or will differentiate again: what it sends would
    be taken for the gradient of the others' call."""
    odd = world.rank == 1
    first, second = (torch.rand(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def out_of_order(function: Callable[..., torch.Tensor]) -> None:
        losses = [function(t).square().sum() for t in (first, second)]
        for k in (1, 0) if odd else (0, 1):
            torch.autograd.grad(losses[k], (first, second)[k])

    def again() -> None:
        y = recur(0.5, first, group=world.group)
        torch.autograd.grad(y.square().sum(), first, create_graph=odd)

    for expected, call in {
        "the gradient (create_graph=True)": again,
        "the gradient (create_graph=False)": lambda: out_of_order(
            lambda t: recur(0.5, t, group=world.group)
        ),
        "the derivative of a gather": lambda: out_of_order(
            lambda t: reduce("logaddexp", t, group=world.group)
        ),
        "the derivative of a gather of": lambda: out_of_order(
            lambda t: CausalConv(3).double()(t[None], group=world.group)[0]
        ),
    }.items():
        with pytest.raises(AssocScanError, match="the ranks disagree on the step of") as caught:
            call()
        assert expected in str(caught.value)
        assert scan("sum", torch.ones(1), group=world.group).item() == world.rank + 1


def check_dtensors(world: Rank) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    odd = world.rank == 1
    mesh = init_device_mesh("cpu", (4,))
    x, other = (distribute_tensor(torch.ones(4, 6, 2), mesh, [p]) for p in (Shard(1), Replicate()))
    over_ranks: Any = assocscan.associative_scan
    total: Any = assocscan.reduce
    name = "dim" if odd else "axis"
    all_raise(world, {
        "has no argument 'dim'": lambda: over_ranks("sum", x, **{name: 1}),
        "reduce() has no argument 'dim'": lambda: total("sum", x, **{name: 1}),
        "unknown backend 'foo'": lambda: over_ranks("sum", x, 1, backend="foo" if odd else None),
        "unknown backend 'foo';": lambda: total("sum", x, -2, backend="foo" if odd else None),
        "reverse is 'x'": lambda: over_ranks("sum", x, 1, "x" if odd else True),
        "offsets are given": lambda: over_ranks(
            "sum", x, 1, offsets=torch.tensor([0, 6]) if odd else None
        ),
        "has the placements": lambda: over_ranks(ops.affine, (x, other if odd else x), 1),
        "no monoid is registered": lambda: over_ranks("sumx" if odd else "sum", x, 1),
        "init has shape [17]": lambda: total("sum", x, 1, init=torch.ones(17 if odd else 2)),
    })  # fmt: skip


@pytest.mark.parametrize(
    "check, size",
    [(check_layers, 3), (check_between_collectives, 3), (check_backward, 3), (check_dtensors, 4)],
)
@pytest.mark.slow(2)
def test_layers_gradients_and_dtensors(world: World, check: Callable[..., None], size: int) -> None:
    world.run(check, size)
