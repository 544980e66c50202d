"""`selective`: the recurrence of Mamba with all its options, at the widths of published models.

`selective_scan` with D, z, delta_bias and softplus. (B, L, D, N) = (2, ·, 1536, 16) and
(8, ·, 1536, 16), L from 512 to 8192 by factors of 4; smaller on CPUs. Forward, and forward with
backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from assocscan.functional.selective_scan import selective_scan

from ..cases import OURS, Case, Contender, passes_of
from ..measuring.checks import Check, Verdict, against
from ..measuring.selective_reference import exact
from ..selective_inputs import Inputs, draw
from ..selective_peers import selective_contenders
from ..settings import BACKWARD, BOTH, FORWARD, PASSES, Settings, powers, short

WIDTHS = [(2, 1536), (8, 1536)]
STATES = 16


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """All shapes, dtypes and passes."""
    if settings.is_gpu:
        widths, lengths = WIDTHS[:1] if settings.quick else WIDTHS, powers(9, 13, 2)
    else:
        widths, lengths = [(1, 32 if settings.quick else 256)], powers(7, 11, 2)
    if settings.quick:
        lengths = lengths[:2]
    return [
        functools.partial(case, settings, shape, dtype, which)
        for dtype in settings.dtypes
        for which in settings.passes_or(FORWARD, BOTH)
        for shape in shapes(settings, widths, lengths)
    ]


def shapes(
    settings: Settings, widths: list[tuple[int, int]], lengths: list[int]
) -> list[tuple[int, int, int, int]]:
    """(B, L, D, N): `settings.sizes`, with the states that a shape has as its fourth size."""
    if not settings.shapes:
        return [(*size, STATES) for size in settings.sizes(widths, lengths)]
    return [
        (batch, length, width, states[0] if states else STATES)
        for batch, own, width, *states in settings.shapes
        for length in settings.lengths_or([own])
    ]


def case(
    settings: Settings, shape: tuple[int, int, int, int], dtype: torch.dtype, which: str
) -> Case:
    batch, length, width, states = shape
    inputs, drawn = draw(settings, shape, dtype)
    cotangent = None if which == FORWARD else drawn
    others, missing = selective_contenders(settings, inputs, which, cotangent)

    def scan(*tensors: Tensor) -> Tensor:
        u, delta, A, B, C, D, z, bias = tensors
        return selective_scan(u, delta, A, B, C, D, z, bias, True, backend=settings.backend)

    ours = Contender(lambda: passes_of(scan, inputs, which, cotangent), OURS)
    # All inputs and y; then all inputs, its cotangent, and all gradients.
    read = sum(t.nbytes for t in inputs)
    moved = {FORWARD: read + drawn.nbytes, BACKWARD: 2 * read + drawn.nbytes}
    moved[BOTH] = moved[FORWARD] + moved[BACKWARD]
    # A backward pass takes those of the states once more, and keeps them for the way back.
    exponentials = batch * length * width * states * (2 if which == BOTH else 1)
    group = f"({batch}, L, {width}, {states}) {short(dtype)}, {PASSES[which]}"
    return Case(
        group, "L", length, shape, dtype, moved[which], {"assocscan": ours, **others},
        check_of(inputs, cotangent, dtype), missing=missing, memory=True,
        exponentials=exponentials,
    )  # fmt: skip


def check_of(inputs: Inputs, cotangent: Tensor | None, dtype: torch.dtype) -> Check:
    """Compares y, or all gradients, with the reference. Of a single step no state is multiplied:
    then the gradient of A is zero, and None where autograd finds out."""
    compare = against(lambda: exact(inputs, cotangent), dtype, inputs.u.shape[1])

    def check(result: Any) -> Verdict:
        if cotangent is None:
            return compare(result)
        pairs = zip(result, inputs, strict=True)
        return compare([torch.zeros_like(t) if g is None else g for g, t in pairs])

    return check
