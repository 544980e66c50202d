"""`operators`: every built-in operator along the middle axis, beside torch's where it has one.

Of each as many lanes of [4, L, lanes] as move some 60 MB: each input read once, each output written
once. Numbers are float32. With --op one operator, registered or the caller's own, in every pass
that was asked for, beside the same scan by torch operations (`eager`).

On GPUs each forward scan is shown as a fraction of its nearest limit: of memory (a copy), of FP32
or of special functions, from the operator's instructions (`measuring/operation_counts`).
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
from assocscan.monoids.monoid import Monoid
from assocscan.pytrees import flatten, unflatten

from ..cases import OURS, TORCH, Case, Contender, contender, is_float, passes_of
from ..measuring.checks import scan_check
from ..measuring.operation_counts import arithmetic_of
from ..operator_inputs import OPERATORS, SIZES, VIEWS, inputs
from ..settings import BACKWARD, BOTH, FORWARD, PASSES, SEED, Settings, short

BATCH, LENGTH, BYTES = 4, 8192, 60 << 20
SMALL_LENGTH, SMALL_BYTES = 512, 1 << 20  # where quick
QUICK = ("sum", "max", "argmax", "logaddexp", "affine", "welford")
# torch's way, and the operator that gives as much of the result (None: the same one).
TORCH_SCANS: dict[str, tuple[Callable[[Tensor], Any], Monoid | None]] = {
    "sum": (lambda x: torch.cumsum(x, 1), None),
    "prod": (lambda x: torch.cumprod(x, 1), None),
    "argmax": (lambda x: torch.cummax(x, 1).values, ops.max),
    "argmin": (lambda x: torch.cummin(x, 1).values, ops.min),
    "logaddexp": (lambda x: torch.logcumsumexp(x, 1), None),
}


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """One case for each operator, dtype, pass and shape."""
    chosen = [settings.op] if settings.op else list(OPERATORS)
    found = [op for op in chosen if settings.op or not settings.quick or op.name in QUICK]
    usual = SMALL_LENGTH if settings.quick else LENGTH
    shapes: list[tuple[int, int, int | None]] = [*settings.sizes([], [])]
    if not settings.shapes:
        shapes = [(BATCH, n, None) for n in settings.lengths_or([usual])]
    return [
        functools.partial(case, settings, op, shape, dtype, which)
        for op in found
        for dtype in settings.chosen_dtypes or (torch.float32,)
        for which in settings.passes_or(FORWARD)
        for shape in shapes
    ]


def case(
    settings: Settings,
    op: Monoid,
    size: tuple[int, int, int | None],
    dtype: torch.dtype,
    which: str,
) -> Case:
    batch, length, width = size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        lanes = lanes_of(settings, op, dtype) if width is None else width
        shape = (batch, length, lanes)
        xs = inputs(op, shape, settings.device, dtype)
    leaves, spec = flatten(xs)
    ys = flatten(scan(op, spec, "auto", *leaves))[0] if which != FORWARD else []
    cotangents = [torch.rand_like(y) if is_float(y) else y for y in ys]
    call = functools.partial(scan, op, spec)
    contenders = {
        "assocscan": Contender(
            lambda: passes_of(
                functools.partial(call, settings.backend), tuple(leaves), which, cotangents
            ),
            OURS,
        )
    }
    if settings.op:
        contenders["eager"] = Contender(
            lambda: passes_of(functools.partial(call, "eager"), tuple(leaves), which, cotangents)
        )
    if op.name in TORCH_SCANS and which == FORWARD:
        theirs, part = TORCH_SCANS[op.name]
        own = None if part is None else scan_check(part, leaves[0], 1)
        contenders["torch"] = contender(lambda: theirs(leaves[0]), TORCH, check=own)
    forward, backward = explain(op, xs, 1).bytes_moved, gradient_bytes(leaves, cotangents)
    moved = {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[which]
    name = op.name + (f" ({SIZES[op]})" if op in SIZES else "")
    group, x_name, x = "all", name, 0
    if len(settings.lengths) > 1 or len(settings.shapes) > 1:
        group, x_name, x = f"{name}, ({batch}, L, {lanes})", "L", length
    if group != "all" or len(settings.chosen_dtypes) > 1 or len(settings.passes) > 1:
        group += f", {short(dtype)}, {PASSES[which]}"
    check = scan_check(op, xs, 1, which, cotangents, VIEWS.get(op))
    each = arithmetic_of(op, xs, 1) if which == FORWARD else None
    arithmetic = None if each is None else each.times(batch * length * lanes)
    return Case(group, x_name, x, shape, dtype, moved, contenders, check, arithmetic=arithmetic)


def scan(op: Monoid, spec: Any, backend: str, *leaves: Tensor) -> Any:
    return associative_scan(op, unflatten(list(leaves), spec), 1, backend=backend)


def lanes_of(settings: Settings, op: Monoid, dtype: torch.dtype) -> int:
    """As many as move the suite's number of bytes at its length."""
    length, moved = (SMALL_LENGTH, SMALL_BYTES) if settings.quick else (LENGTH, BYTES)
    few = inputs(op, (1, 2, 16), "cpu", dtype)
    per_element = explain(op, few, 1, backend="eager").bytes_moved / 32
    return max(16, int(moved / per_element / (BATCH * length)) // 16 * 16)


def gradient_bytes(leaves: list[Tensor], cotangents: list[Tensor]) -> int:
    """Inputs and cotangents read once, gradients written once."""
    floats = [t for t in leaves if is_float(t)]
    given = [t for t in cotangents if is_float(t)]
    return sum(t.nbytes for t in (*leaves, *given, *floats))
