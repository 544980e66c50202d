"""`rnn`: a linear RNN layer of width 5120 on batches of 4, from short to very long sequences.

Contenders: the loop of torch operations, each engine by its name in `backend=`, and a scan of which
only the last state is wanted, which writes nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from assocscan import ops
from assocscan.api.associative_scan import associative_scan
from assocscan.functional.recurrence import linear_recurrence
from assocscan.monoids.monoid import Monoid

from ..cases import OURS, TORCH, Case, Contender, contender
from ..engine_names import engine_names
from ..measuring.checks import final_check, scan_check
from ..settings import Settings, powers, short

BATCH, WIDTH = 4, 5120
LONGEST_LOOP = 1 << 13

RECURRENCE = Monoid(
    ops.affine.combine, identity=(1.0, 0.0), name="bench_recurrence", lower=lambda state: state[1]
)


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """L from 2^5 to 2^17; on the CPU to 2^11, one batch of a tenth of the width where quick."""
    if settings.is_gpu:
        lengths = powers(5, 17, 4 if settings.quick else 1)
    else:
        lengths = powers(5, 9, 2) if settings.quick else powers(5, 11)
    width = WIDTH // 10 if settings.quick and not settings.is_gpu else WIDTH
    return [
        functools.partial(case, settings, shape, dtype)
        for dtype in settings.dtypes
        for shape in settings.sizes([(BATCH, width)], lengths)
    ]


def case(settings: Settings, shape: tuple[int, int, int], dtype: torch.dtype) -> Case:
    batch, length, width = shape
    a, b = settings.random(shape, dtype), settings.random(shape, dtype)
    contenders: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    if length <= LONGEST_LOOP:
        contenders["loop of torch operations"] = contender(lambda: loop(a, b), TORCH)
    else:
        missing["loop of torch operations"] = f"not run beyond {LONGEST_LOOP} steps"
    contenders["assocscan"] = contender(
        lambda: linear_recurrence(a, b, backend=settings.backend), OURS
    )
    found, lacking = engine_names(settings)
    for backend in found:
        contenders[backend] = contender(functools.partial(by_name, a, b, backend))
    contenders["final state only"] = contender(
        lambda: final_state(a, b), bytes=2 * a.nbytes,
        check=final_check(RECURRENCE, (a, b), 1),
    )  # fmt: skip
    group = f"({batch}, L, {width}) {short(dtype)}"
    return Case(
        group, "L", length, shape, dtype, 3 * a.nbytes, contenders,
        scan_check(RECURRENCE, (a, b), 1), missing={**missing, **lacking},
    )  # fmt: skip


def by_name(a: Tensor, b: Tensor, backend: str) -> Any:
    return associative_scan(RECURRENCE, (a, b), 1, backend=backend)


def final_state(a: Tensor, b: Tensor) -> Any:
    """The last h, and none of the others."""
    return linear_recurrence(a, b, return_final="only")


def differentiable_loop(a: Tensor, b: Tensor) -> Tensor:
    """The same, recorded by autograd.

    Steps are cut out by `unbind`: its gradient is one array, where that of an index is one for each
    step.
    """
    multipliers, inputs = a.unbind(1), b.unbind(1)
    h = inputs[0]
    steps = [h]
    for multiplier, x in zip(multipliers[1:], inputs[1:], strict=True):
        h = torch.addcmul(x, multiplier, h)
        steps.append(h)
    return torch.stack(steps, 1)


def loop(a: Tensor, b: Tensor) -> Tensor:
    """One torch operation per step."""
    out = torch.empty_like(b)
    out[:, 0] = b[:, 0]
    for t in range(1, b.shape[1]):
        torch.addcmul(b[:, t], a[:, t], out[:, t - 1], out=out[:, t])
    return out
