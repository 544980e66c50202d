"""`calls`: what a repeated call on 64 numbers takes, which is the host's time and no work.

Forward, and forward with backward; timed by the clock, on GPUs without waiting for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from assocscan import ops
from assocscan.api.associative_scan import associative_scan
from assocscan.functional.cumulative import cumsum
from assocscan.functional.recurrence import linear_recurrence
from assocscan.monoids.monoid import monoid
from assocscan.pytrees import flatten

from ..cases import ENGINE, OURS, TORCH, Case, Contender, passes_of
from ..measuring.checks import Check, scan_check
from ..settings import BOTH, FORWARD, PASSES, Settings, short
from .rnn import RECURRENCE

SHAPE = (1, 64)


@monoid(identity=(1.0, 0.0, 0.0), name="bench_three_leaves")
def three_leaves(left: Any, right: Any) -> Any:
    (a, b, c), (p, q, r) = left, right
    return p * a, p * b + q, c + r


def cases(settings: Settings) -> list[Callable[[], Case]]:
    return [
        functools.partial(case, settings, dtype, which)
        for dtype in settings.chosen_dtypes or (torch.float32,)
        for which in settings.passes_or(FORWARD, BOTH)
    ]


def case(settings: Settings, dtype: torch.dtype, which: str) -> Case:
    x, a, b = (settings.decays(SHAPE, dtype).roll(k, 1) for k in range(3))
    backend = settings.backend

    def call(
        kind: str, scan: Callable[..., Any], *inputs: Tensor, check: Callable[[Any], Check] | None
    ) -> Contender:
        cotangents = [] if which == FORWARD else [
            torch.ones_like(y) for y in flatten(scan(*inputs))[0]
        ]  # fmt: skip
        return Contender(
            functools.partial(passes_of, scan, inputs, which, cotangents), kind, wall=True,
            check=None if check is None else check(cotangents), checked=check is not None,
        )  # fmt: skip

    def of_sum(cotangents: Any) -> Check:
        return scan_check(ops.sum, x, 1, which, cotangents)

    def of_recurrence(cotangents: Any) -> Check:
        return scan_check(RECURRENCE, (a, b), 1, which, cotangents)

    def of_three(cotangents: Any) -> Check:
        return scan_check(three_leaves, (a, b, x), 1, which, cotangents)

    def recurrence(a: Tensor, b: Tensor) -> Any:
        return linear_recurrence(a, b, backend=backend)

    def with_init(a: Tensor, b: Tensor, init: Tensor) -> Any:
        return linear_recurrence(a, b, init=init, return_final=True, backend=backend)

    contenders = {
        "torch.cumsum": call(TORCH, lambda x: torch.cumsum(x, 1), x, check=of_sum),
        "cumsum": call(OURS, lambda x: cumsum(x, 1, backend=backend), x, check=of_sum),
        "linear_recurrence": call(ENGINE, recurrence, a, b, check=of_recurrence),
        "linear_recurrence, init and final": call(ENGINE, with_init, a, b, x[:, 0], check=None),
        "an operator of three leaves": call(
            ENGINE, lambda *t: associative_scan(three_leaves, t, 1, backend=backend), a, b, x,
            check=of_three,
        ),
    }  # fmt: skip
    group = f"{SHAPE[1]} numbers, {short(dtype)}"
    return Case(group, PASSES[which], 0, SHAPE, dtype, 2 * x.nbytes, contenders)
