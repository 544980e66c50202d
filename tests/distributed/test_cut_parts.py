"""Parts whose axis the CUDA kernels over vectors cut into segments: the reduction of a part hands
its totals to the part's scan, in both directions. Emulated kernels, gloo."""

from __future__ import annotations

from typing import Any

import cuda_emulator
import pytest
import torch
from ranks import Rank, World
from vector_cases import CASES, as_tuple, assert_close, expanded, leaves_of, loop, starts_of
from vector_kernels import cut, kernels_of, noted, taken_for_all

from assocscan import distributed
from assocscan.cuda.vectors.totals_source import TotalsKernel
from assocscan.distributed.prepared_part import KEPT
from assocscan.engines.base.vectors.kernel import CHUNK, BackwardKernel, ForwardKernel

pytestmark = pytest.mark.skipif(
    cuda_emulator.why_unavailable() is not None, reason=str(cuda_emulator.why_unavailable())
)

LENGTHS = {2: (3 * CHUNK - 5, 2 * CHUNK + 1), 3: (2 * CHUNK + 3, 0, 2 * CHUNK + 2)}
TOTALS_FIRST = [TotalsKernel, ForwardKernel], [ForwardKernel]
BACK = [TotalsKernel, BackwardKernel], [BackwardKernel]


def check_part(
    world: Rank, name: str, reverse: bool, inclusive: bool, starts: bool, finals: bool
) -> None:  # fmt: skip
    """Values and gradients against a loop in float64, and what this rank launched."""
    case, lengths = CASES[name], LENGTHS[world.size]
    check = None if reverse == starts else False  # False: calls are kept, as on NCCL
    leaves = leaves_of(case, 2, sum(lengths), 5, 3)
    whole = expanded([x.double().requires_grad_() for x in leaves])
    init = starts_of(case, leaves) if starts else None
    exact = None if init is None else tuple(x.detach().double().requires_grad_() for x in init)
    outputs, last = loop(case.op, whole, reverse, inclusive, exact)
    cotangents = [torch.cos(torch.arange(y.numel()).reshape(y.shape)).to(y) for y in outputs]
    right = torch.autograd.grad(outputs, whole, cotangents, retain_graph=True)
    if finals:
        ends = [t.sum() for t in last]
        right_with_finals = torch.autograd.grad([*outputs, *ends], whole,
                                     [*cotangents, *map(torch.ones_like, ends)])  # fmt: skip

    def part(tensors: Any) -> tuple[torch.Tensor, ...]:
        return tuple(t.detach() for t in world.part(tuple(tensors), lengths, 1))

    own = tuple(t.float().requires_grad_() for t in part(whole))
    mine = None if init is None else tuple(x.detach().requires_grad_() for x in init)
    KEPT.clear()  # of other cases
    with taken_for_all("cpu"), noted() as prepared, cut(1):
        found = distributed.associative_scan(
            case.op, own, 1, reverse, inclusive, group=world.group, init=mine,
            return_final=finals, backend="cuda", check=check,
        )  # fmt: skip
        ys, final = found if finals else (found, ())
        ys = as_tuple(ys)
        given = [g.float() for g in part(cotangents)]
        # Each rank gives 1 / size: in sum the cotangent of the whole's final.
        ends = [t.sum() / world.size for t in final]
        got = torch.autograd.grad([*ys, *ends], own, [*given, *map(torch.ones_like, ends)])
        with torch.no_grad():
            again, same = [
                distributed.associative_scan(
                    case.op, own, 1, reverse, inclusive, group=world.group, init=mine,
                    backend="cuda", check=check,
                )
                for _ in range(2)
            ]  # fmt: skip
    steps = sum(lengths)
    for y, z, wanted in zip(ys, as_tuple(again), part(outputs), strict=True):
        assert_close(y.detach(), wanted, steps)
        assert_close(z, wanted, steps)
    assert all(map(torch.equal, as_tuple(again), as_tuple(same)))
    for a, b in zip(final, last, strict=False):
        assert_close(a.detach(), b.detach(), steps)
    for a, b in zip(got, part(right_with_finals if finals else right), strict=True):
        assert_close(a, b, 60 * steps)
    launched = [kernels_of(p.executable) for p in prepared]
    length = lengths[world.rank]
    if length == 0:
        assert launched == []
        return
    order = range(world.size - 1, -1, -1) if reverse else range(world.size)
    is_first = order[0] == world.rank
    has_carry = starts or not is_first
    early = [TotalsKernel]  # of a backward pass of which nothing but the totals is wanted
    back = [kernels for kernels in launched if BackwardKernel in kernels or kernels == early]
    forward = [kernels for kernels in launched if kernels not in back]
    # The scan that saves carries and the one that does not take the totals of a reduction, whose
    # executable is the same, so that it was prepared once.
    assert forward == [*TOTALS_FIRST, *TOTALS_FIRST[1:]], launched
    if not has_carry and finals:  # it has no gradient of a carry to give
        assert back == [[TotalsKernel, BackwardKernel]]
    elif not has_carry:  # nor here, but it computes its totals while other ranks do
        assert back == [early, BACK[1]]
    elif finals and name != "two decays":
        # The second pass carries the cotangents of leaves that no output depends on, too.
        assert back == [BACK[0], BACK[0]]
    else:
        assert back == [*BACK]


@pytest.mark.slow
@pytest.mark.thinned(97)
@pytest.mark.parametrize("finals", [False, True])
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["selective", "two decays", "turning"])
@pytest.mark.parametrize("size", [2, 3])
def test_parts(
    world: World, size: int, name: str, reverse: bool, inclusive: bool, starts: bool, finals: bool
) -> None:  # fmt: skip
    world.run(check_part, size, name, reverse, inclusive, starts, finals)


class Noted(torch.autograd.Function):
    """(x, seen) → x / 2; notes the sums of the cotangents that its backward pass gets."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[float]) -> torch.Tensor:
        ctx.seen = seen
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.append(float(g.sum()))
        return g * 0.5, None


def check_leaves_of_leaves(world: Rank) -> None:
    """A leaf that is computed from another one, by a collective too, and a hook: all of it runs
    once in a backward pass, also on the rank that computes its totals early."""
    case, lengths = CASES["selective"], LENGTHS[2]
    leaves = leaves_of(case, 2, sum(lengths), 5, 3)
    own = [t.detach().requires_grad_() for t in world.part(tuple(expanded(leaves)), lengths, 1)]
    upstream: list[float] = []
    hooked: list[float] = []
    own[0].register_hook(lambda g: hooked.append(float(g.sum())))
    xs = list(own)
    xs[1] = Noted.apply(own[1] + 0.0 * distributed.associative_scan(
        "sum", own[0].expand_as(own[1]), 1, group=world.group), upstream)  # fmt: skip
    with taken_for_all("cpu"), noted() as prepared, cut(1):
        y = distributed.associative_scan(case.op, tuple(xs), 1, group=world.group, backend="cuda")
        as_tuple(y)[0].sin().sum().backward()
    launched = [kernels_of(p.executable) for p in prepared]
    assert ([TotalsKernel] in launched) == (world.rank == 0)
    assert len(upstream) == len(hooked) == 1


@pytest.mark.slow
def test_leaves_of_leaves(world: World) -> None:
    world.run(check_leaves_of_leaves, 2)
