"""Values of flags and names that many public functions take: bools, backends, `deterministic`."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ScanTypeError
from ..runtime import backends
from ..wording import shown


def flag(name: str, value: Any, otherwise: str = "") -> bool:
    """`value` as a bool; 0, 1, numpy's bools and 0-d bool tensors are accepted.

    otherwise: what else the caller accepts, for the message.
    """
    cls = type(value)
    if cls is bool or (cls is int and value in (0, 1)):
        return bool(value)
    if cls.__module__ == "numpy" and cls.__name__ in ("bool", "bool_"):
        return bool(value)
    if isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.dim() == 0:
        return bool(value)
    raise ScanTypeError(f"{name} is {shown(value)}, expected True or False{otherwise}")


def checked_backend(backend: Any, deterministic: Any) -> str:
    """The backend that is meant: None is "auto". Raises ScanValueError for an unknown one, and
    ScanTypeError for a value that `deterministic` cannot have."""
    if backend is None:
        backend = "auto"
    if not isinstance(backend, str) or backend not in backends.BACKENDS:
        backends.refuse_backend(backend)
    require_choice(deterministic)
    return backend


def require_choice(deterministic: Any) -> None:
    """Raise ScanTypeError unless `deterministic` is None or a value that `flag` accepts."""
    if deterministic is not None:
        flag("deterministic", deterministic, ", or None for torch's own setting")
