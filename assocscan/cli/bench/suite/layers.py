"""`norm_linear_gelu` and `rglru`: the fused layers against the same layers unfused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....engines.triton import loader as triton_loader
from ....functional.recurrence import linear_recurrence
from ....nn import norm_linear_gelu, rglru
from ....nn.norm_linear_gelu import unfused
from ..cases import Case, Contender, Settings, contender, forward_backward, short

FEATURES, OUTPUTS = 1024, 4096
ROWS = (512, 8192)
RGLRU_SHAPE = (8, 8192, 1536)


def norm_linear_gelu_cases(settings: Settings) -> list[Callable[[], Case]]:
    """512 and 8192 rows of 1024 → 4096: forward (every candidate tile), with backward, errors."""
    rows = ROWS if settings.is_gpu else (64, 256)
    return [
        *(functools.partial(product_case, settings, n, dtype, backward)
          for dtype in settings.dtypes for backward in (False, True) for n in rows),
        *(functools.partial(error_case, settings, n, dtype)
          for dtype in settings.dtypes for n in rows),
    ]  # fmt: skip


def operands(settings: Settings, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, γ, β, weight, bias; an eighth of the sizes on the CPU."""
    scale = 1 if settings.is_gpu else 8
    features, outputs = FEATURES // scale, OUTPUTS // scale
    x = settings.random((rows, features), dtype)
    weight = (settings.random((outputs, features), dtype) - 0.5) / 8
    gamma, beta = settings.random((features,), dtype), settings.random((features,), dtype)
    return x, gamma, beta, weight, settings.random((outputs,), dtype)


eager = functools.partial(unfused, eps=1e-5, approximate="none")


def ours(*t: Tensor) -> Tensor:
    return norm_linear_gelu(t[0], t[3], t[4], t[1], t[2])


def error_case(settings: Settings, rows: int, dtype: torch.dtype) -> Case:
    """The largest error over the largest value, against the same in float64."""
    tensors = operands(settings, rows, dtype)
    exact = eager(*(t.double() for t in tensors))

    def error(call: Callable[..., Any]) -> float:
        found = call(*tensors)
        return float((found.double() - exact).abs().max() / exact.abs().max())

    contenders = {
        "eager torch": contender(lambda: error(eager)),
        "assocscan": contender(lambda: error(ours)),
    }
    if settings.is_gpu and triton_loader.is_installed():
        for name, call in candidates(dtype).items():
            contenders[name] = contender(functools.partial(error, call))
    group = f"{tensors[0].shape[1]} → {tensors[4].shape[0]} {short(dtype)}, errors"
    shape = (*tensors[0].shape, tensors[4].shape[0])
    return Case(group, "rows", rows, shape, dtype, 0, contenders, errors=True)


def product_case(settings: Settings, rows: int, dtype: torch.dtype, backward: bool) -> Case:
    x, gamma, beta, weight, bias = tensors = operands(settings, rows, dtype)
    outputs, features = weight.shape
    contenders: dict[str, Contender] = {}
    if backward:
        contenders["eager torch"] = Contender(lambda: forward_backward(eager, tensors))
        contenders["assocscan"] = Contender(lambda: forward_backward(ours, tensors))
    else:
        normal = F.layer_norm(x, (features,), gamma, beta)
        contenders["eager torch"] = contender(lambda: eager(*tensors))
        contenders["linear alone"] = contender(lambda: F.linear(normal, weight, bias))
        contenders["assocscan"] = contender(lambda: ours(*tensors))
        if settings.is_gpu and triton_loader.is_installed():
            for name, call in candidates(dtype).items():
                contenders[name] = contender(functools.partial(call, *tensors))
    passes = "forward and backward" if backward else "forward"
    moved = sum(t.nbytes for t in (*tensors, x.new_empty((rows, outputs))))
    group = f"{features} → {outputs} {short(dtype)}, {passes}"
    shape = (rows, features, outputs)
    return Case(group, "rows", rows, shape, dtype, moved, contenders)


def candidates(dtype: torch.dtype) -> dict[str, Callable[..., Any]]:
    """Every tile of the fused kernel that could be chosen for this dtype, as a function."""
    from ....nn.kernels import norm_linear_launch as launch
    from ....nn.kernels.norm_linear_tiles import CANDIDATES

    found: dict[str, Callable[..., Any]] = {}
    for tile in CANDIDATES[dtype.itemsize]:
        name = f"{tile.block_m}x{tile.block_n}x{tile.block_k} {tile.warps}w {tile.stages}s"
        for flag in ("staged", "persistent", "tma_store"):
            name += f" {flag}" if getattr(tile, flag) else ""
        name += " pointers" if tile.staged and not tile.tma_load else ""
        found[name] = functools.partial(launch.norm_linear_gelu, eps=1e-5, tanh=False, tile=tile)
    return found


def rglru_cases(settings: Settings) -> list[Callable[[], Case]]:
    """The recurrence of an RG-LRU, forward and with backward."""
    return [
        functools.partial(rglru_case, settings, dtype, backward)
        for dtype in settings.dtypes
        for backward in (False, True)
    ]


def rglru_case(settings: Settings, dtype: torch.dtype, backward: bool) -> Case:
    shape = RGLRU_SHAPE if settings.is_gpu else (2, 512, 256)
    x, r, i = (settings.random(shape, dtype) for _ in range(3))
    tensors = (x, r, i, 0.1 * settings.random(shape[-1:]))

    def fused(x: Tensor, r: Tensor, i: Tensor, decay: Tensor) -> Tensor:
        return rglru(x, r, i, decay)[0]

    # x, r, i, h; then x, r, i, h, ḡ, dx, dr, di.
    arrays, passes = (12, "forward and backward") if backward else (4, "forward")
    contenders = {}
    for name, layer in (("assocscan", fused), ("unfused", unfused_rglru)):
        call = functools.partial(layer, *tensors)
        contenders[name] = contender(call)
        if backward:
            contenders[name] = Contender(functools.partial(forward_backward, layer, tensors))
    group = f"{short(dtype)}, {passes}"
    return Case(group, "L", shape[1], shape, dtype, arrays * x.nbytes, contenders)


def unfused_rglru(x: Tensor, recurrence: Tensor, gate: Tensor, decay: Tensor) -> Tensor:
    """The same by torch's operations around our recurrence."""
    log_a = -decay * torch.sigmoid(recurrence)
    scale = torch.sqrt(-torch.expm1(2 * log_a))
    b = scale * torch.sigmoid(gate) * x
    return linear_recurrence(torch.exp(log_a).to(x.dtype), b.to(x.dtype))
