"""torch's tracer, imported before the first operator is traced.

What fails here is torch's or the system's, and must not be taken for a fault of the operator: torch
imports most of its compiler and sympy for it, makes a folder for temporary files, and may be
interrupted meanwhile.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..caching.load_once import Once
from ..errors import BackendError
from ..torch_private import core_aten_decompositions

MakeFx = Callable[..., Any]
_LOADED: dict[str, MakeFx] = {}
_ONCE = Once(_LOADED)


def tracer() -> MakeFx:
    """`make_fx`. Raises BackendError where torch cannot trace anything; tried again later."""
    return _ONCE.get("make_fx", _load)


def _load() -> MakeFx:
    try:
        for name in ("mpmath", "sympy"):
            import_whole(name)
        from torch.fx.experimental.proxy_tensor import make_fx

        example = make_fx(
            lambda t: t + 1, decomposition_table=decompositions(), tracing_mode="fake"
        )
        example(torch.zeros(()))
    except Exception as error:
        raise BackendError(
            f"torch cannot trace operators in this process ({type(error).__name__}: {error})"
        ) from error
    return make_fx


def why_unavailable() -> str | None:
    """Why operators could not be traced at the last attempt; None where they could."""
    failure = _ONCE.failed.get("make_fx")
    return None if failure is None else failure.message


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    table = dict(core_aten_decompositions())
    del table[torch.ops.aten.detach.default]  # into alias, which passes gradients
    table[torch.ops.aten.softplus.default] = softplus
    table[torch.ops.aten.elu.default] = elu
    table[torch.ops.aten.celu.default] = celu
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


def import_whole(name: str) -> None:
    """Import a package from the beginning, or not at all.

    Python keeps the submodules of a package whose import was interrupted, and does not make them
    attributes of the package when that is imported again.
    """
    if name in sys.modules:
        return
    forget(name)
    try:
        importlib.import_module(name)
    except BaseException:
        forget(name)
        raise


def forget(name: str) -> None:
    """Remove a package and its submodules from those that are imported."""
    for known in list(sys.modules):
        if known == name or known.startswith(f"{name}."):
            del sys.modules[known]
