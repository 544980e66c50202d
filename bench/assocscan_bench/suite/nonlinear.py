"""`nonlinear`: a GRU whose recurrent weights are one number per channel, forward and backward.

Contenders: `nonlinear_recurrence` as it chooses, by Newton's method, and the loop of torch
operations that it replaces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from assocscan.functional.nonlinear.nonlinear_recurrence import nonlinear_recurrence

from ..cases import OURS, TORCH, Case, Contender, passes_of
from ..measuring.checks import Lanes, Verdict, against
from ..settings import BACKWARD, BOTH, FORWARD, PASSES, Settings, short

Sizes = tuple[tuple[int, int, int], ...]
# Many chains of a long axis and of a short one; few chains of a long one.
SIZES: Sizes = ((8, 8192, 1536), (8, 2048, 1536), (1, 65536, 512), (1, 65536, 64))
ON_CPU: Sizes = ((4, 4096, 256), (1, 65536, 1))
QUICK: Sizes = ((2, 128, 64),)
LONGEST_LOOP = 4096
# Arrays read or written: three gates and h; then three gates, h, ḡ and three gradients.
ARRAYS = {FORWARD: 4, BACKWARD: 8, BOTH: 12}


def gru(h: Tensor, x: Any, weights: Any) -> Tensor:
    (z, r, n), (uz, ur, un) = x, weights
    z, r = torch.sigmoid(z + uz * h), torch.sigmoid(r + ur * h)
    return (1 - z) * torch.tanh(n + r * (un * h)) + z * h


def loop(z: Tensor, r: Tensor, n: Tensor, *weights: Tensor) -> Tensor:
    """One step after the other, by torch operations, in a form that autograd records well."""
    h = torch.zeros_like(z[:, 0])
    steps = []
    for x in zip(z.unbind(1), r.unbind(1), n.unbind(1), strict=True):
        h = gru(h, x, weights)
        steps.append(h)
    return torch.stack(steps, 1)


def cases(settings: Settings) -> list[Callable[[], Case]]:
    usual = SIZES if settings.is_gpu else ON_CPU
    shapes = QUICK if settings.quick else usual
    if settings.shapes or settings.lengths:
        shapes = tuple(settings.sizes([(b, d) for b, _, d in shapes], [shapes[0][1]]))
    return [
        functools.partial(case, settings, shape, dtype, which)
        for dtype in settings.dtypes
        for which in settings.passes_or(FORWARD, BOTH)
        for shape in shapes
    ]


def case(settings: Settings, shape: tuple[int, int, int], dtype: torch.dtype, which: str) -> Case:
    batch, length, width = shape
    gates = tuple(2 * settings.random(shape, dtype).roll(k, 1) - 1 for k in range(3))
    weights = tuple(2 * settings.random((width,), dtype).roll(k, 0) - 1 for k in range(3))
    cotangent = None if which == FORWARD else torch.rand_like(gates[0])
    inputs = (*gates, *weights)

    def recurrence(method: str) -> Callable[[], Any]:
        def scan(z: Tensor, r: Tensor, n: Tensor, *params: Tensor) -> Tensor:
            h: Tensor = nonlinear_recurrence(
                gru, (z, r, n), 0.0, params=params, method=method, backend=settings.backend
            )
            return h

        return passes_of(scan, inputs, which, cotangent)

    contenders = {
        "assocscan": Contender(lambda: recurrence("auto"), OURS),
        "assocscan, Newton": Contender(lambda: recurrence("newton")),
    }
    missing = {}
    if length <= LONGEST_LOOP:
        contenders["loop of torch operations"] = Contender(
            lambda: passes_of(loop, inputs, which, cotangent), TORCH
        )
    else:
        missing["loop of torch operations"] = f"not run beyond {LONGEST_LOOP} steps"
    group = f"({batch}, L, {width}) {short(dtype)}, {PASSES[which]}"
    return Case(
        group, "L", length, shape, dtype, ARRAYS[which] * gates[0].nbytes, contenders,
        check_of(gates, weights, which, cotangent), missing=missing,
    )  # fmt: skip


def check_of(
    gates: tuple[Tensor, ...], weights: tuple[Tensor, ...], which: str, cotangent: Tensor | None
) -> Callable[[Any], Verdict]:
    """Against a loop in float64, on lanes spread over all of them. Gradients of the weights, which
    all rows have a part in, are not compared."""
    lanes = Lanes(tuple(gates[0].shape), 1)
    channels = Lanes((1, *gates[0].shape[1:]), 1)

    def few(t: Tensor) -> Tensor:
        return lanes.of(t).detach().double()

    def expected() -> Any:
        given = [few(t).requires_grad_() for t in gates]
        params = [channels.of(w[None, None, :].expand(1, gates[0].shape[1], -1))[0, 0].double()
                  for w in weights]  # fmt: skip
        h = loop(given[0], given[1], given[2], *params)
        if which == FORWARD or cotangent is None:
            return h.detach()
        return torch.autograd.grad(h, given, few(cotangent))

    compare = against(expected, gates[0].dtype, gates[0].shape[1])

    def check(result: Any) -> Verdict:
        found = [result] if isinstance(result, Tensor) else list(result)[:3]
        return compare([lanes.of(t) for t in found])

    return check
