"""Designs of filters and their inputs, for tests beside scipy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

F64 = torch.float64
LONG = np.longdouble
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
DESIGNS: dict[str, tuple[float, ...]] = {
    "butter": (), "cheby1": (1.0,), "cheby2": (40.0,), "ellip": (1.0, 40.0),
}  # fmt: skip
CUTS = (1e-3, 3e-3, 0.02, 0.1, 0.5, 0.9)
every_order_and_cut = pytest.mark.parametrize(
    "order, cut",
    [
        pytest.param(order, cut, marks=[] if (order, cut) == (3, 3e-3) else pytest.mark.exhaustive)
        for order, cut in itertools.product(range(1, 9), CUTS)
    ],
)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def coefficients(order: int, *batch: int, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    """b and a of a stable filter of this order."""
    b, a = rand(*batch, order + 1, dtype=dtype), rand(*batch, order + 1, seed=1, dtype=dtype)
    a = 0.5 * a / a.abs().sum(-1, keepdim=True)  # |a[k]| sum to less than a[0]: stable
    a[..., 0] = 1.5
    return b, a


def inputs(length: int, dtype: type) -> np.ndarray[Any, Any]:
    """An impulse, noise and a step."""
    noise = np.random.default_rng(0).standard_normal(length)
    return np.stack([np.eye(1, length)[0], noise, np.ones(length)]).astype(dtype)


def errors(b: Any, a: Any, x: Any, y: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of y and of scipy's loop in the dtype of x, relative to the largest value of each row."""
    from scipy import signal

    wide = np.clongdouble if np.iscomplexobj(x) else LONG
    exact = signal.lfilter(*(t.astype(wide) for t in (b, a, x)))
    loop = signal.lfilter(b, a, x)
    assert loop.dtype == x.dtype
    size = np.abs(exact).max(-1)
    return np.abs(y - exact).max(-1) / size, np.abs(loop - exact).max(-1) / size
