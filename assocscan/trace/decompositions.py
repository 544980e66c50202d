"""Operations of torch in terms of others: the core ones of ATen, and what is written here."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ..torch_private import core_aten_decompositions


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table for the tracer."""
    table = dict(core_aten_decompositions())
    del table[torch.ops.aten.detach.default]  # into alias, which passes gradients
    aten = torch.ops.aten
    table.update({
        aten.softplus.default: softplus, aten.elu.default: elu, aten.celu.default: celu,
        aten.gelu.default: gelu, aten.leaky_relu.default: leaky_relu,
        aten.hardtanh.default: hardtanh, aten.xlogy.Tensor: xlogy,
        aten.xlogy.Scalar_Self: xlogy, aten.xlogy.Scalar_Other: xlogy,
    })  # fmt: skip
    return table


# torch writes these as a choice of two formulas, of which the one that does not hold overflows for
# large x: its slope, infinity, times a cotangent of 0 is NaN. Here that formula gets another x.


def softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    scaled = x * beta if beta != 1 else x
    is_large = scaled > threshold
    small = torch.log1p(torch.exp(torch.where(is_large, 0.0, scaled)))
    return torch.where(is_large, x, small / beta if beta != 1 else small)


def elu(
    x: torch.Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> torch.Tensor:
    is_large = x > 0
    small = torch.expm1(torch.where(is_large, 0.0, x) * input_scale)
    return torch.where(is_large, x * scale, small * (alpha * scale))


def celu(x: torch.Tensor, alpha: float = 1) -> torch.Tensor:
    return elu(x, alpha, 1, 1 / alpha)


def xlogy(x: torch.Tensor | float, y: torch.Tensor | float) -> torch.Tensor:
    """x · log y, 0 where x is 0. torch writes this as a choice of a constant, which hides that the
    derivative by x is log y there too."""
    some = x if isinstance(x, torch.Tensor) else y
    assert isinstance(some, torch.Tensor)
    x, y = (torch.as_tensor(v, device=some.device) for v in (x, y))
    vanishes = (x == 0) & ((y <= 0) | (y == math.inf))
    return x * torch.log(torch.where(vanishes, 1, y))


# torch counts these among the core operations, and so leaves them as they are.


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    if approximate == "none":
        return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(inner))


def leaky_relu(x: torch.Tensor, negative_slope: float = 0.01) -> torch.Tensor:
    return torch.where(x > 0, x, x * negative_slope)


def hardtanh(x: torch.Tensor, min_val: float = -1, max_val: float = 1) -> torch.Tensor:
    """Also relu6. Unlike that of `clamp`, its slope is zero at both bounds."""
    return torch.where(x <= min_val, min_val, torch.where(x >= max_val, max_val, x))
