"""`engines`: the same scans by every engine, forward and backward, on the shapes that choose.

One long row, few rows, many rows, few and many channels: where the axis must be shared by several
blocks, and where it need not be. `auto` should be among the first on every one.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from assocscan import ops
from assocscan.api.associative_scan import associative_scan
from assocscan.api.explain import explain
from assocscan.monoids.monoid import Monoid, monoid
from assocscan.pytrees import flatten, unflatten

from ..cases import ENGINE, OURS, PEER, Case, Contender, is_float, passes_of
from ..engine_names import engine_names
from ..measuring.checks import scan_check
from ..operator_inputs import inputs
from ..peers import cub_cumsum
from ..settings import BACKWARD, BOTH, FORWARD, PASSES, SEED, Settings, short
from .operators import gradient_bytes

ROWS = ((64, 1 << 20), (12288, 8192), (12288, 1024))
LANES = ((8, 8192, 1536), (8, 1024, 1536), (4, 131072, 512), (1, 65536, 1024), (1, 1 << 20, 64))
BACKWARDS = ((8, 8192, 1536), (1, 65536, 1024), (12288, 8192))

# h[t] = a h[t−1] + b, of which h alone is written.
RECURRENCE = monoid(
    lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1]),
    identity=(1.0, 0.0),
    name="bench_recurrence",
    lower=lambda state: state[1],
)


def _second_order(left: Any, right: Any) -> Any:
    """Matrices of 2×2 with vectors, written out: 24 bytes in float32."""
    a, b, c, d, e, f = left
    p, q, r, s, u, v = right
    return (p * a + q * c, p * b + q * d, r * a + s * c, r * b + s * d,
            p * e + q * f + u, r * e + s * f + v)  # fmt: skip


# h[t] = a h[t−1] − h[t−2] / 2 + b.
SECOND_ORDER = monoid(
    _second_order, identity=(1.0, 0.0, 0.0, 1.0, 0.0, 0.0), name="bench_second_order",
    lift=lambda a, b: (a, torch.full_like(a, -0.5), torch.ones_like(a), torch.zeros_like(a), b,
                       torch.zeros_like(a)),
    lower=lambda state: state[4],
)  # fmt: skip


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """Sums, recurrences, their backward, a wide element and a complex one; or with --op that one,
    and with --shape those shapes."""
    if settings.op or settings.shapes or settings.lengths:
        return chosen_cases(settings)
    rows: tuple[tuple[int, ...], ...] = ((64, 4096),)
    lanes: tuple[tuple[int, ...], ...] = ((2, 512, 64),)
    backward, long = lanes, [1 << 20]
    if settings.is_gpu and not settings.quick:
        rows, lanes, backward, long = ROWS, LANES, BACKWARDS, [1 << 22, 1 << 24, 1 << 27]
    found: list[tuple[str, Monoid, tuple[int, ...], torch.dtype, str]] = []
    for dtype in settings.dtypes:
        found += [("sum", ops.sum, (2 * n,), dtype, FORWARD) for n in long]
        found += [("sum", ops.sum, (4, *lanes[0][1:2], 512), dtype, FORWARD)]
        shapes = [*((n,) for n in long), *rows, *lanes]
        found += [("recurrence", RECURRENCE, shape, dtype, FORWARD) for shape in shapes]
        found += [("backward", RECURRENCE, shape, dtype, BACKWARD) for shape in backward]
        wide = [(long[-1] // 2,), lanes[0]]
        found += [("second order", SECOND_ORDER, shape, dtype, FORWARD) for shape in wide]
    complexes = (*lanes[0][:2], lanes[0][2] // 2)
    found.append(("recurrence", RECURRENCE, complexes, torch.complex64, FORWARD))
    wanted = settings.passes or (FORWARD, BACKWARD)
    return [functools.partial(case, settings, *each) for each in found if each[-1] in wanted]


def chosen_cases(settings: Settings) -> list[Callable[[], Case]]:
    """Every shape, dtype and pass that was asked for, of one operator."""
    op = settings.op or RECURRENCE
    name = op.name if settings.op else "recurrence"
    return [
        functools.partial(case, settings, f"{name}, {PASSES[which]}", op, shape, dtype, which)
        for dtype in settings.dtypes
        for which in settings.passes_or(FORWARD)
        for shape in settings.sizes([(2, 64)], [])
    ]


def case(
    settings: Settings,
    group: str,
    op: Monoid,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    which: str,
) -> Case:
    axis = 0 if len(shape) == 1 else 1
    if op in (RECURRENCE, SECOND_ORDER):
        xs: Any = tuple(settings.random(shape).to(dtype) for _ in range(2))
    elif op is ops.sum:
        xs = settings.random(shape, dtype)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            xs = inputs(op, shape, settings.device, dtype)
    leaves, spec = flatten(xs)
    cotangents = []
    if which != FORWARD:
        ys = flatten(scan(op, spec, axis, "auto", *leaves))[0]
        cotangents = [torch.rand_like(y) if is_float(y) else y for y in ys]

    def by_name(backend: str) -> Contender:
        call = functools.partial(scan, op, spec, axis, backend)
        make = functools.partial(passes_of, call, tuple(leaves), which, cotangents)
        return Contender(make, OURS if backend == settings.backend else ENGINE)

    engines, missing = engine_names(settings)
    contenders = {name: by_name(name) for name in ("auto", *engines)}
    if op is ops.sum and len(shape) == 1 and settings.is_gpu and dtype == torch.float32:
        if importlib.util.find_spec("cupy") is None:
            missing["CUB"] = "CuPy is not installed"
        else:
            contenders["CUB"] = Contender(lambda: cub_cumsum(leaves[0]), PEER)
    forward = explain(op, xs, axis, backend="eager").bytes_moved
    backward = gradient_bytes(leaves, cotangents)
    moved = {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[which]
    return Case(
        f"{group}, {short(dtype)}", " × ".join(map(str, shape)), 0, shape, dtype, moved, contenders,
        scan_check(op, xs, axis, which, cotangents), missing=missing,
    )  # fmt: skip


def scan(op: Monoid, spec: Any, axis: int, backend: str, *leaves: Tensor) -> Any:
    return associative_scan(op, unflatten(list(leaves), spec), axis, backend=backend)
