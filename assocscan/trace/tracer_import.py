"""torch's tracer, imported before the first operator is traced.

What fails here is torch's or the system's, and must not be taken for a fault of the operator: torch
imports most of its compiler and sympy for it, makes a folder for temporary files, and may be
interrupted meanwhile.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..caching.load_once import Once
from ..errors import BackendError
from .decompositions import decompositions

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
