"""`engines`: the same scans by every GPU engine, forward and backward, on the shapes that choose.

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

from .... import ops
from ....api.associative_scan import associative_scan
from ....monoids.monoid import Monoid, monoid
from ....runtime.backends import availability
from ..cases import Case, Contender, Settings, short
from ..peers import cub_cumsum

ENGINES = ("auto", "triton", "multipass", "cuda")
ROWS = ((64, 1 << 20), (12288, 8192), (12288, 1024))
LANES = ((8, 8192, 1536), (8, 1024, 1536), (4, 131072, 512), (1, 65536, 1024), (1, 1 << 20, 64))
BACKWARD = ((8, 8192, 1536), (1, 65536, 1024), (12288, 8192))

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
    """Sums, recurrences, their backward, a wide element and a complex one."""
    rows: tuple[tuple[int, ...], ...] = ((64, 4096),)
    lanes: tuple[tuple[int, ...], ...] = ((2, 512, 64),)
    backward, long = lanes, [1 << 20]
    if settings.is_gpu and not settings.quick:
        rows, lanes, backward, long = ROWS, LANES, BACKWARD, [1 << 22, 1 << 24, 1 << 27]
    every = [short(d) for d in settings.dtypes]
    found: list[tuple[str, Monoid, tuple[int, ...], str, bool]] = []
    for dtype in every:
        found += [("sum", ops.sum, (2 * n,), dtype, False) for n in long]
        found += [("sum", ops.sum, (4, *lanes[0][1:2], 512), dtype, False)]
        shapes = [*((n,) for n in long), *rows, *lanes]
        found += [("recurrence", RECURRENCE, shape, dtype, False) for shape in shapes]
        found += [("backward", RECURRENCE, shape, dtype, True) for shape in backward]
        wide = [(long[-1] // 2,), lanes[0]]
        found += [("second order", SECOND_ORDER, shape, dtype, False) for shape in wide]
    found.append(("recurrence", RECURRENCE, (*lanes[0][:2], lanes[0][2] // 2), "complex64", False))
    return [functools.partial(case, settings, *each) for each in found]


def case(
    settings: Settings, group: str, op: Monoid, shape: tuple[int, ...], kind: str, backward: bool
) -> Case:
    dtype: torch.dtype = getattr(torch, kind)
    axis = 0 if len(shape) == 1 else 1
    count = 1 if op is ops.sum else 2
    xs = tuple(settings.random(shape, torch.float32).to(dtype) for _ in range(count))
    contenders: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    for name in ENGINES:
        reason = None
        if name != "auto":
            reason = availability()[name] if settings.is_gpu else "runs on GPUs only"
        if reason is not None:
            missing[name] = reason
        else:
            make = _backward if backward else _forward
            contenders[name] = Contender(functools.partial(make, op, xs, axis, name))
    if op is ops.sum and len(shape) == 1 and settings.is_gpu and dtype == torch.float32:
        if importlib.util.find_spec("cupy") is None:
            missing["CUB"] = "CuPy is not installed"
        else:
            contenders["CUB"] = Contender(lambda: cub_cumsum(xs[0]))
    moved = (2 * count + 1 if backward else count + 1) * xs[0].nbytes
    return Case(
        f"{group}, {kind}", " × ".join(map(str, shape)), 0, shape, dtype, moved, contenders,
        missing=missing,
    )  # fmt: skip


def _scan(op: Monoid, xs: tuple[Tensor, ...], axis: int, backend: str) -> Any:
    return associative_scan(op, xs if len(xs) > 1 else xs[0], axis, backend=backend)


def _forward(op: Monoid, xs: tuple[Tensor, ...], axis: int, backend: str) -> Callable[[], Any]:
    return lambda: _scan(op, xs, axis, backend)


def _backward(op: Monoid, xs: tuple[Tensor, ...], axis: int, backend: str) -> Callable[[], Any]:
    """The backward pass alone: the graph is kept."""
    leaves = tuple(x.detach().requires_grad_() for x in xs)
    y = _scan(op, leaves, axis, backend)
    cotangent = torch.rand_like(y)
    return lambda: torch.autograd.grad(y, leaves, cotangent, retain_graph=True)
