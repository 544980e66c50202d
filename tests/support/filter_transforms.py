"""Filters beside loops over their steps, as losses of one vector, and transforms of such losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from filter_designs import F64, rand
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from assocscan import lfilter, sosfilt

Loss = Callable[[Tensor], Tensor]
Filter = Callable[..., tuple[Tensor, Tensor]]


def loop(b: Tensor, a: Tensor, x: Tensor, zi: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`lfilter` along the last axis, in the transposed direct form II."""
    memory = max(b.shape[-1], a.shape[-1]) - 1
    b, a = (torch.nn.functional.pad(t, (0, memory + 1 - t.shape[-1])) for t in (b, a))
    b, a = b / a[..., :1], a / a[..., :1]
    w = [torch.zeros_like(x[..., 0])] * memory if zi is None else list(zi.unbind(-1))
    ys = []
    for t in range(x.shape[-1]):
        now = x[..., t]
        y = b[..., 0] * now + w[0]
        late = [*w[1:], torch.zeros_like(y)]
        w = [late[m] + b[..., m + 1] * now - a[..., m + 1] * y for m in range(memory)]
        ys.append(y)
    return torch.stack(ys, -1), torch.stack(w, -1)


def sos_loop(sos: Tensor, x: Tensor, zi: Tensor | None = None) -> tuple[Tensor, Tensor]:
    finals = []
    for k, section in enumerate(sos.unbind(-2)):
        state = None if zi is None else zi[k]
        x, final = loop(section[..., :3], section[..., 3:], x, state)
        finals.append(final)
    return x, torch.stack(finals)


def scanned(*leaves: Tensor) -> tuple[Tensor, Tensor]:
    y: tuple[Tensor, Tensor] = lfilter(*leaves[:3], zi=state_of(leaves, 3), return_final=True)
    return y


def in_sections(*leaves: Tensor) -> tuple[Tensor, Tensor]:
    y: tuple[Tensor, Tensor] = sosfilt(*leaves[:2], zi=state_of(leaves, 2), return_final=True)
    return y


def state_of(leaves: Sequence[Tensor], place: int) -> Tensor | None:
    return leaves[place] if len(leaves) > place else None


def of_order(order: int, *batch: int) -> list[Tensor]:
    """b and a."""
    a = torch.tensor([1.5, -0.6, 0.3, 0.1], dtype=F64)[: order + 1]
    return [rand(*batch, order + 1), a + 0.1 * rand(*batch, order + 1, seed=1)]


def sections(count: int) -> list[Tensor]:
    return [torch.cat(of_order(2, count), -1)]


@dataclass(frozen=True)
class Case:
    """A filter, the loop beside it, and the leaves of both for a length. x is leaf `series`."""

    function: Filter
    loop: Filter
    leaves: Callable[[int], list[Tensor]]
    series: int

    def losses(self, length: int, moving: str) -> tuple[Loss, Loss, Tensor]:
        """The losses of the filter and of the loop, as functions of one vector of all leaves, or of
        one of them; and the vector."""
        leaves = self.leaves(length)
        names = ["b", "a", "x", "zi"] if self.series == 2 else ["sos", "x", "zi"]
        moved = range(len(leaves)) if moving == "all" else [names.index(moving)]
        vector = torch.cat([leaves[k].flatten() for k in moved])

        def loss_of(function: Filter) -> Loss:
            def loss(vector: Tensor) -> Tensor:
                parts = vector.split([leaves[k].numel() for k in moved])
                given = dict(enumerate(leaves))
                given |= {k: t.view(leaves[k].shape) for k, t in zip(moved, parts, strict=True)}
                y, final = function(*given.values())
                return y.sin().sum() + final.square().sum()

            return loss

        return loss_of(self.function), loss_of(self.loop), vector


CASES = {
    **{f"order {n}": Case(scanned, loop, lambda L, n=n: [*of_order(n), rand(L, seed=2)], 2)
       for n in (1, 2, 3)},
    "with a state": Case(
        scanned, loop, lambda L: [*of_order(2), rand(L, seed=2), rand(2, seed=3)], 2),
    "of channels": Case(
        scanned, loop,
        lambda L: [*of_order(1, 3), rand(2, 3, L, seed=2), rand(2, 3, 1, seed=3)], 2),
    "long b": Case(
        scanned, loop, lambda L: [rand(4), of_order(1)[1], rand(L, seed=2), rand(3, seed=3)], 2),
    "one section": Case(in_sections, sos_loop, lambda L: [*sections(1), rand(L, seed=2)], 1),
    "sections": Case(in_sections, sos_loop, lambda L: [*sections(2), rand(L, seed=2)], 1),
    "sections with states": Case(
        in_sections, sos_loop, lambda L: [*sections(2), rand(L, seed=2), rand(2, 2, seed=3)], 1),
}  # fmt: skip


def direction(like: Tensor, seed: int) -> Tensor:
    """As good as drawn, by operations that a graph may have."""
    return (torch.arange(like.numel(), dtype=F64) * seed).sin()


def along(function: Callable[[Tensor], Tensor], seed: int) -> Callable[[Tensor], Tensor]:
    return lambda v: jvp(function, (v,), (direction(v, seed),))[1]


def squared(function: Callable[[Tensor], Tensor]) -> Loss:
    return lambda v: function(v).square().sum()


TRANSFORMS: dict[str, Callable[[Loss], Callable[[Tensor], Tensor]]] = {
    "grad of grad": lambda f: grad(squared(grad(f))),
    "jacrev of grad": lambda f: jacrev(grad(f)),
    "jvp of jvp": lambda f: along(along(f, 10), 11),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f)),
    "hessian": hessian,
    "jvp of grad": lambda f: along(grad(f), 10),
    "grad of jvp": lambda f: grad(along(f, 10)),
    "vmap of grad": lambda f: lambda v: vmap(grad(f))(torch.stack([v, v.cos()])),
    "jvp of jvp of jvp": lambda f: along(along(along(f, 10), 11), 12),
    "grad of jvp of grad": lambda f: grad(squared(along(grad(f), 10))),
}


def check(
    case: Case, transform: str, length: int, moving: str = "all",
    compiled: Callable[..., Callable[[Tensor], Tensor]] = lambda function: function,
) -> None:  # fmt: skip
    """The transformed filter is the transformed loop, for an input and for other ones after it."""
    filtered, looped, vector = case.losses(length, moving)
    transformed = compiled(TRANSFORMS[transform](filtered))
    expected = TRANSFORMS[transform](looped)
    for factor in (1.0, 1.0, math.cos(0.5)):
        v = factor * vector
        want = expected(v)
        assert want.abs().sum() > 0
        torch.testing.assert_close(transformed(v), want, rtol=1e-8, atol=1e-8)
