"""`norm_linear_gelu` and `rglru`: the fused layers against the same layers unfused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from assocscan import ops
from assocscan.engines.triton import loader as triton_loader
from assocscan.functional.recurrence import linear_recurrence
from assocscan.nn import norm_linear_gelu, rglru
from assocscan.nn.norm_linear_gelu.checks import Operands
from assocscan.nn.norm_linear_gelu.layer import unfused

from ..cases import ENGINE, OTHER, OURS, TORCH, Case, Contender, contender, passes_of
from ..measuring.checks import against
from ..measuring.reference import reference
from ..settings import BACKWARD, BOTH, FORWARD, PASSES, Settings, short

FEATURES, OUTPUTS = 1024, 4096
ROWS = (512, 8192)
BLOCK = 64  # features whose products the kernels add at once
RGLRU_SHAPE = (8, 8192, 1536)


def norm_linear_gelu_cases(settings: Settings) -> list[Callable[[], Case]]:
    """512 and 8192 rows of 1024 → 4096: forward (every candidate tile), with backward; errors, also
    of narrower accumulators."""
    rows = ROWS if settings.is_gpu else (64, 256)
    return [
        *(functools.partial(product_case, settings, n, dtype, which)
          for dtype in settings.dtypes for which in settings.passes_or(FORWARD, BOTH)
          for n in rows),
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


def eager(*t: Tensor) -> Tensor:
    return unfused(Operands(*t), 1e-5, "none")


def ours(*t: Tensor) -> Tensor:
    return norm_linear_gelu(t[0], t[3], t[4], t[1], t[2])


def error_case(settings: Settings, rows: int, dtype: torch.dtype) -> Case:
    """The largest error over the largest value, against the same in float64."""
    tensors = operands(settings, rows, dtype)
    exact = eager(*(t.double() for t in tensors))

    def errors(call: Callable[..., Any]) -> list[float]:
        found = call(*tensors)
        return [float((found.double() - exact).abs().max() / exact.abs().max())]

    contenders = {
        "eager torch": contender(lambda: errors(eager), TORCH),
        "assocscan": contender(lambda: errors(ours), OURS),
    }
    for name, call in ablations(settings, dtype).items():
        contenders[name] = contender(functools.partial(errors, call))
    if settings.is_gpu and triton_loader.is_installed():
        for name, call in candidates(dtype).items():
            contenders[name] = contender(functools.partial(errors, call))
    group = f"{tensors[0].shape[1]} → {tensors[4].shape[0]} {short(dtype)}, errors"
    shape = (*tensors[0].shape, tensors[4].shape[0])
    return Case(group, "rows", rows, shape, dtype, 0, contenders, errors=True)


def ablations(settings: Settings, dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """The layer with narrower accumulators: 16-bit ones, and for float32 on GPUs one product of
    TF32 in the place of three."""
    if dtype.itemsize == 2:
        name = f"{short(dtype)} sums of products"
        return {name: narrow_sums, f"{name} and of statistics": narrow_everything}
    return {"one product of TF32": with_tf32} if settings.is_gpu else {}


def narrow_sums(
    x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor, normal: Any = None
) -> Tensor:
    """The sum of the products is rounded after every BLOCK of them."""
    if normal is None:
        normal = F.layer_norm(x, x.shape[1:], gamma, beta)
    total = torch.zeros_like(bias).expand(x.shape[0], -1)
    for part, columns in zip(normal.split(BLOCK, 1), weight.split(BLOCK, 1), strict=True):
        total = total + part @ columns.T
    return F.gelu(total + bias)


def narrow_everything(
    x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Mean and variance too are sums of sums over BLOCK numbers, rounded after each."""

    def mean(t: Tensor) -> Tensor:
        total = torch.zeros_like(t[:, :1])
        for part in t.split(BLOCK, 1):
            total = total + part.sum(1, keepdim=True)
        return total / t.shape[1]

    centred = x - mean(x)
    normal = centred * torch.rsqrt(mean(centred * centred) + 1e-5) * gamma + beta
    return narrow_sums(x, gamma, beta, weight, bias, normal)


def with_tf32(*tensors: Tensor) -> Tensor:
    """Ours where torch is allowed TF32."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        return ours(*tensors)
    finally:
        products.fp32_precision = before


def product_case(settings: Settings, rows: int, dtype: torch.dtype, which: str) -> Case:
    x, gamma, beta, weight, bias = tensors = operands(settings, rows, dtype)
    outputs, features = weight.shape
    cotangent = None if which == FORWARD else torch.rand_like(x[:, :1].expand(rows, outputs))

    def of(layer: Callable[..., Any], kind: str = ENGINE) -> Contender:
        return Contender(lambda: passes_of(layer, tensors, which, cotangent), kind)

    contenders = {"eager torch": of(eager, TORCH), "assocscan": of(ours, OURS)}
    if which == FORWARD:
        normal = F.layer_norm(x, (features,), gamma, beta)
        contenders["linear alone"] = contender(
            lambda: F.linear(normal, weight, bias), OTHER, checked=False
        )
        if settings.is_gpu and triton_loader.is_installed():
            for name, call in candidates(dtype).items():
                contenders[name] = of(call)

    def exact() -> Any:
        wide = tuple(t.double() for t in tensors)
        given = None if cotangent is None else cotangent.double()
        return passes_of(eager, wide, which, given)()

    moved = sum(t.nbytes for t in (*tensors, x.new_empty((rows, outputs))))
    group = f"{features} → {outputs} {short(dtype)}, {PASSES[which]}"
    shape = (rows, features, outputs)
    return Case(
        group, "rows", rows, shape, dtype, moved, contenders, against(exact, dtype, features)
    )


def candidates(dtype: torch.dtype) -> dict[str, Callable[..., Any]]:
    """Every tile of the fused kernel that could be chosen for this dtype, as a function."""
    from assocscan.nn.norm_linear_gelu import launch
    from assocscan.nn.norm_linear_gelu.tiles import CANDIDATES

    found: dict[str, Callable[..., Any]] = {}
    for tile in CANDIDATES[dtype.itemsize]:
        name = f"{tile.block_m}x{tile.block_n}x{tile.block_k} {tile.warps}w {tile.stages}s"
        for flag in ("staged", "persistent", "tma_store"):
            name += f" {flag}" if getattr(tile, flag) else ""
        name += " pointers" if tile.staged and not tile.tma_load else ""
        kernel = functools.partial(launch.norm_linear_gelu, eps=1e-5, tanh=False, tile=tile)
        found[name] = lambda *t, kernel=kernel: kernel(Operands(*t))
    return found


def rglru_cases(settings: Settings) -> list[Callable[[], Case]]:
    """The recurrence of an RG-LRU, forward and with backward."""
    usual = RGLRU_SHAPE if settings.is_gpu else (2, 512, 256)
    return [
        functools.partial(rglru_case, settings, shape, dtype, which)
        for dtype in settings.dtypes
        for which in settings.passes_or(FORWARD, BOTH)
        for shape in settings.sizes([(usual[0], usual[2])], [usual[1]])
    ]


def rglru_case(
    settings: Settings, shape: tuple[int, int, int], dtype: torch.dtype, which: str
) -> Case:
    x, r, i = (settings.random(shape, dtype) for _ in range(3))
    tensors = (x, r, i, 0.1 * settings.random(shape[-1:]))
    cotangent = None if which == FORWARD else torch.rand_like(x)

    def fused(x: Tensor, r: Tensor, i: Tensor, decay: Tensor) -> Tensor:
        return rglru(x, r, i, decay)[0]

    def exact() -> Any:
        wide = tuple(t.double() for t in tensors)
        given = None if cotangent is None else cotangent.double()
        return passes_of(exact_rglru, wide, which, given)()

    # x, r, i, h; then x, r, i, h, ḡ, dx, dr, di.
    arrays = {FORWARD: 4, BACKWARD: 8, BOTH: 12}[which]
    contenders = {}
    for name, layer, kind in (("assocscan", fused, OURS), ("unfused", unfused_rglru, ENGINE)):
        make = functools.partial(passes_of, layer, tensors, which, cotangent)
        contenders[name] = Contender(make, kind)
    batch, length, width = shape
    group = f"({batch}, L, {width}) {short(dtype)}, {PASSES[which]}"
    return Case(
        group, "L", length, shape, dtype, arrays * x.nbytes, contenders,
        against(exact, dtype, length),
    )  # fmt: skip


def gated(x: Tensor, recurrence: Tensor, gate: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """a and b of the recurrence, by torch's operations."""
    log_a = -decay * torch.sigmoid(recurrence)
    scale = torch.sqrt(-torch.expm1(2 * log_a))
    b = scale * torch.sigmoid(gate) * x
    return torch.exp(log_a).to(x.dtype), b.to(x.dtype)


def unfused_rglru(x: Tensor, recurrence: Tensor, gate: Tensor, decay: Tensor) -> Tensor:
    """The same by torch's operations around our recurrence."""
    return linear_recurrence(*gated(x, recurrence, gate, decay))


def exact_rglru(x: Tensor, recurrence: Tensor, gate: Tensor, decay: Tensor) -> Tensor:
    """The same by torch's operations around the reference."""
    h: Tensor = reference(ops.affine, gated(x, recurrence, gate, decay), 1)[1]
    return h
