"""`operators`: every built-in operator along the middle axis, beside torch's where it has one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .. import ops
from ..api import associative_scan
from .cases import Case, Settings, contender

SHAPE, SMALL = (8, 4096, 512), (2, 512, 128)
QUICK = ("sum", "max", "argmax", "logaddexp", "affine", "welford")
TORCH: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: torch.cumsum(x, 1),
    "prod": lambda x: torch.cumprod(x, 1),
    "argmax": lambda x: torch.cummax(x, 1),
    "argmin": lambda x: torch.cummin(x, 1),
    "logaddexp": lambda x: torch.logcumsumexp(x, 1),
}


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """One case for each operator."""
    names = QUICK if settings.quick else ops.__all__
    return [functools.partial(case, settings, name) for name in names]


def case(settings: Settings, name: str) -> Case:
    shape = SHAPE if settings.is_gpu else SMALL
    xs = inputs(settings, name, shape)
    op = getattr(ops, name)
    outputs = associative_scan(op, xs, 1)
    moved = sum(t.nbytes for t in tree_leaves((xs, outputs)))
    contenders = {"assocscan": contender(lambda: associative_scan(op, xs, 1))}
    if name in TORCH:
        first = tree_leaves(xs)[0]
        contenders["torch"] = contender(lambda: TORCH[name](first))
    return Case("all", name, 0, shape, tree_leaves(xs)[0].dtype, moved, contenders)


def inputs(settings: Settings, name: str, shape: tuple[int, ...]) -> Any:
    """What the operator scans: numbers, pairs, or 2 × 2 matrices on fewer lanes."""
    x = settings.random(shape)
    if name in ("argmax", "argmin"):
        return x, torch.arange(shape[1], device=x.device)[None, :, None].expand(shape)
    if name == "affine":
        return x, settings.random(shape)
    if name == "xor":
        return (x * 1000).to(torch.int32)
    if name in ("any", "all"):
        return x > 0.5
    if name in ("matmul", "matrix_affine"):
        narrow = (shape[0], shape[1], shape[2] // 4)
        A = 0.5 * settings.random((*narrow, 2, 2))
        return A if name == "matmul" else (A, settings.random((*narrow, 2)))
    return x
