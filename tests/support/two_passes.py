"""A pass that hands its segments' totals to the pass that follows, forward and backward, as a
distributed scan over one part does; and one rank of several in one process: values and gradients
against a loop in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from vector_cases import CASES, assert_close, expanded, loop, starts_of
from vector_kernels import cut, leaves_on

from assocscan.api.associative_scan import run_call
from assocscan.api.bind_arguments import bind
from assocscan.distributed import collectives, prepared_part
from assocscan.distributed.carries import part_of
from assocscan.distributed.ranks import Ranks
from assocscan.engines.base.vectors.kernel import CHUNK
from assocscan.runtime.autograd import only_carries
from assocscan.runtime.scan_call import ScanCall
from assocscan.runtime.vectors.handed_totals import HandedTotals

scan_part = importlib.import_module("assocscan.distributed.associative_scan").scan_part

# Operators of which segments have totals in both directions.
HANDED = ("selective", "gated", "two decays", "clamped input", "attention", "turning")


def calls_of(
    name: str, leaves: list[Tensor], init: tuple[Tensor, ...] | None, reverse: bool,
    inclusive: bool, final: bool,
) -> tuple[ScanCall, ScanCall]:  # fmt: skip
    """The reduction of the elements alone, and the scan with init."""
    xs = expanded(leaves)
    call = bind(CASES[name].op, xs, 1, reverse, inclusive, init, final, None)
    handed = HandedTotals(call.traced.vectors, inclusive and init is None)
    call = replace(call, handed=handed)
    total = replace(call, init=None, inclusive=True, return_final=True, final_only=True)
    return total, call


class InBackward(torch.autograd.Function):
    """(x, function) → x. Its backward pass calls the function, as that of a distributed scan
    computes a gradient: on the thread that runs backward passes of x's device, which
    `only_carries` is of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return g, None


def gradients_of_init(ys: list[Tensor], init: tuple[Tensor, ...], g: list[Tensor]) -> Any:
    """The gradient of init alone."""
    found: list[Any] = []

    def compute() -> None:
        with only_carries():
            found.extend(torch.autograd.grad(ys, init, g, retain_graph=True, allow_unused=True))

    start = torch.ones((), device=ys[0].device, requires_grad=True)
    InBackward.apply(start, compute).backward()
    return tuple(found)


def two_passes_back(
    call: ScanCall, leaves: list[Tensor], init: tuple[Tensor, ...], between: Any
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
    """The gradient of init alone, then all gradients, with ones as cotangents of the finals.
    between: called with the cotangents of the outputs between the two."""
    ys, finals, _ = run_call(call, "cuda")
    generator = torch.Generator().manual_seed(1)
    g = [torch.randn(y.shape, generator=generator).to(y) for y in ys]
    alone = gradients_of_init(ys, init, g)
    between(g)
    every = torch.autograd.grad([*ys, *finals], [*leaves, *init],
                                [*g, *map(torch.ones_like, finals)], allow_unused=True)  # fmt: skip
    return alone, every


def check_gradients(
    name: str, device: str, reverse: bool, inclusive: bool, final: bool, steps: int,
    dtype: torch.dtype = torch.float32, between: Any = lambda g: None,
) -> None:  # fmt: skip
    case = CASES[name]
    leaves = [x.requires_grad_() for x in leaves_on(device, name, (2, steps, 5, 3), dtype)]
    init = tuple(x.detach().requires_grad_() for x in starts_of(case, leaves))
    total, call = calls_of(name, leaves, init, reverse, inclusive, final)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    exact_init = tuple(x.detach().double().requires_grad_() for x in init)
    outputs, last = loop(case.op, expanded(exact), reverse, inclusive, exact_init)
    with cut(1):
        with torch.no_grad():
            run_call(total, "cuda")
        alone, every = two_passes_back(call, leaves, init, between)
    generator = torch.Generator().manual_seed(1)
    g = [torch.randn(y.shape, generator=generator).to(y.device, dtype) for y in outputs]
    right = torch.autograd.grad(outputs, exact_init, [t.double() for t in g], retain_graph=True,
                                allow_unused=True)  # fmt: skip
    between(g)
    seeded = last if final else ()
    all_right = torch.autograd.grad(
        [*outputs, *seeded], [*exact, *exact_init],
        [*[t.double() for t in g], *[torch.ones_like(t) for t in seeded]], allow_unused=True,
    )  # fmt: skip
    for a, b in zip((*alone, *every), (*right, *all_right), strict=True):
        if a is None or b is None:
            assert (a is None or not a.any()) and (b is None or not b.any())
        else:
            assert_close(a, b, steps * max(1, outputs[0].numel() // a.numel()))


def check_rank(
    name: str, device: str, rank: int, reverse: bool, dtype: torch.dtype = torch.float32,
    steps: int = 2 * CHUNK + 3,
) -> None:  # fmt: skip
    """One rank of three, whose parts hold the same elements and get the same cotangents. The others
    send what the one in the middle sends: first this is run, then the rank. Each call is made
    twice; the second is a kept one."""
    case, size = CASES[name], 3
    leaves = [x.requires_grad_() for x in leaves_on(device, name, (2, steps, 5, 3), dtype)]
    xs = expanded(leaves)
    exact = [[x.detach().double().requires_grad_() for x in leaves] for _ in range(size)]
    whole = tuple(torch.cat(same, 1) for same in zip(*map(expanded, exact), strict=True))
    outputs, _ = loop(case.op, whole, reverse)
    generator = torch.Generator().manual_seed(1)
    g = [torch.randn((2, steps, *y.shape[2:]), generator=generator).to(device, dtype)
         for y in outputs]  # fmt: skip
    right = torch.autograd.grad(outputs, exact[rank], [torch.cat([t.double()] * 3, 1) for t in g])
    call = bind(case.op, xs, 1, reverse, True, None, False, None)
    sent_by_middle: list[Tensor] = []
    messages = iter(sent_by_middle)

    def received_by(ranks: Ranks, sent: Tensor) -> Tensor:
        if ranks.rank == 1:
            sent_by_middle.append(sent)
        other = sent if ranks.rank == 1 else next(messages)
        return torch.stack([sent if k == ranks.rank else other for k in range(size)])

    def run(rank: int, with_gradient: bool) -> tuple[Any, Any]:
        key, ranks = (rank, with_gradient), Ranks("no group", rank, size)
        part = prepared_part.kept(key, xs)
        if part is None:
            part = prepared_part.keep(key, part_of(call, ranks, "cuda", None), xs)
        assert part.prepared is not None
        with torch.set_grad_enabled(with_gradient):
            ys, _ = scan_part(part)
        return ys, torch.autograd.grad(ys, leaves, g) if with_gradient else ()

    prepared_part.KEPT.clear()
    with (
        cut(1),
        mock.patch.object(collectives, "received_by", received_by),
        mock.patch.object(prepared_part, "received_by", received_by),
    ):
        for with_gradient in (False, False, True, True):
            if rank != 1:
                run(1, with_gradient)
            ys, found = run(rank, with_gradient)
            for y, w in zip(ys, outputs, strict=True):
                assert_close(y.detach(), w.detach().narrow(1, rank * steps, steps), size * steps)
            for a, b in zip(found, right if found else (), strict=True):
                assert_close(a, b, size * steps * max(1, outputs[0].numel() // a.numel()))
    prepared_part.KEPT.clear()
