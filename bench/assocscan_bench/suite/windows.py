"""`windows`: moving windows of several widths, beside the scan of the same operator.

The time should not depend on the width. Forward, and forward with backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from assocscan import ops
from assocscan.api.associative_scan import associative_scan
from assocscan.api.explain import explain
from assocscan.functional.series.windowed import windowed
from assocscan.monoids.monoid import Monoid
from assocscan.pytrees import flatten, unflatten

from ..cases import OTHER, OURS, Case, Contender, passes_of
from ..measuring.checks import Lanes, Verdict, against, scan_check
from ..operator_inputs import inputs
from ..settings import BACKWARD, BOTH, FORWARD, PASSES, SEED, Settings, short
from .operators import gradient_bytes

OPERATORS = (ops.sum, ops.max, ops.affine, ops.logaddexp)
Shapes = tuple[tuple[int, int, int], ...]
SHAPES: Shapes = ((8, 2048, 256), (4, 8192, 256), (1, 1 << 20, 1), (4, 1 << 18, 1))
ON_GPUS: Shapes = ((8, 8192, 1536),)
QUICK: Shapes = ((2, 256, 32),)
WIDTHS = (16, 257, 4096)


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """All operators and shapes, with every width that is shorter than the axis."""
    shapes = ON_GPUS if settings.is_gpu else SHAPES
    shapes = QUICK if settings.quick else shapes
    if settings.shapes or settings.lengths:
        usual = [(batch, width) for batch, _, width in shapes]
        shapes = tuple(settings.sizes(usual, []))
    return [
        functools.partial(case, settings, op, shape, width, dtype, which)
        for dtype in settings.chosen_dtypes or (torch.float32,)
        for which in settings.passes_or(FORWARD, BOTH)
        for shape in shapes
        for op in OPERATORS
        for width in WIDTHS
        if width < shape[1]
    ]


def case(
    settings: Settings,
    op: Monoid,
    shape: tuple[int, int, int],
    width: int,
    dtype: torch.dtype,
    which: str,
) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        xs = inputs(op, shape, settings.device, dtype)
    leaves, spec = flatten(xs)
    cotangents = [] if which == FORWARD else [torch.rand_like(t) for t in leaves]

    def windows(*tensors: Tensor) -> Any:
        return windowed(op, unflatten(list(tensors), spec), width, 1, backend=settings.backend)

    def scan(*tensors: Tensor) -> Any:
        return associative_scan(op, unflatten(list(tensors), spec), 1, backend=settings.backend)

    given = tuple(leaves), which, cotangents
    contenders = {
        "assocscan": Contender(lambda: passes_of(windows, *given), OURS),
        "the scan": Contender(
            lambda: passes_of(scan, *given), OTHER,
            check=scan_check(op, xs, 1, which, cotangents),
        ),
    }  # fmt: skip
    forward, backward = explain(op, xs, 1).bytes_moved, gradient_bytes(leaves, cotangents)
    moved = {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[which]
    batch, length, channels = shape
    group = f"{op.name}, ({batch}, {length}, {channels}) {short(dtype)}, {PASSES[which]}"
    return Case(
        group, "width", width, shape, dtype, moved, contenders,
        check_of(op, leaves, spec, width, which, cotangents),
    )  # fmt: skip


def check_of(
    op: Monoid, leaves: list[Tensor], spec: Any, width: int, which: str, cotangents: list[Tensor]
) -> Callable[[Any], Verdict]:
    """Against windows in float64, on lanes spread over all of them."""
    lanes = Lanes(tuple(leaves[0].shape), 1)

    def expected() -> Any:
        few = [lanes.of(t).detach().double().requires_grad_(which != FORWARD) for t in leaves]
        ys = flatten(windows_by_doubling(op, unflatten(list(few), spec), width))[0]
        if which == FORWARD:
            return ys
        return torch.autograd.grad(ys, few, [lanes.of(g).double() for g in cotangents])

    compare = against(expected, leaves[0].dtype, leaves[0].shape[1])
    return lambda result: compare([lanes.of(t) for t in flatten(result)[0]])


def windows_by_doubling(op: Monoid, xs: Any, width: int) -> Any:
    """All windows along axis 1, of an operator without lift and lower.

    A window of 2, 4, 8, … steps combines two of half as many. A window of `width` steps combines
    windows of powers of two: for 13 steps, windows of 8, 4 and 1.
    """
    power, size, windows, done = xs, 1, None, 0
    while True:
        if width & size:
            windows = power if windows is None else joined(op, windows, power, size)
            done += size
        if done == width:
            return windows
        power = joined(op, power, power, size)
        size *= 2


def joined(op: Monoid, older: Any, newer: Any, steps: int) -> Any:
    """Windows of both, `older` that many steps before; at the start `newer` has all there is."""
    late, spec = flatten(newer)
    early = flatten(older)[0]
    if steps >= late[0].shape[1]:
        return newer
    whole = op.combine(
        unflatten([t[:, :-steps] for t in early], spec),
        unflatten([t[:, steps:] for t in late], spec),
    )
    parts = zip(late, flatten(whole)[0], strict=True)
    return unflatten([torch.cat([t[:, :steps], w], 1) for t, w in parts], spec)
