"""Values in error messages: what was passed, in few words, and how a tensor is made of it."""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_NUMBERS = (bool, int, float, complex)


def is_of_numpy(value: object) -> bool:
    """Whether a value, or the function that it is, comes from NumPy, which need not be imported."""
    of = getattr(value, "__module__", None) if callable(value) else None
    return "numpy" in (type(value).__module__.partition(".")[0], str(of).partition(".")[0])


def kind_of(value: object) -> str:
    """`a list`, `an int`, `None`, `a NumPy ndarray`."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return "a tensor"
    name = type(value).__name__
    if name == "ndarray" and is_of_numpy(value):
        return "a NumPy ndarray"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def shown(value: object) -> str:
    """A number, a string or a flat tuple as it is written; of all else its kind, and a function's
    name: its `repr` is an address."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if type(value) in (tuple, list) and len(value) <= 8:  # type: ignore[arg-type]
        parts: Any = value
        inner = ", ".join(map(shown, parts))
        if type(value) is list:
            return f"[{inner}]"
        return f"({inner}{',' * (len(parts) == 1)})"
    name = getattr(value, "__name__", None) or getattr(value, "name", None)
    if callable(value) and isinstance(name, str):
        return f"{kind_of(value)} {name!r}"
    return kind_of(value)


def conversion(path: str, value: Any) -> str:
    """How a tensor is made of a value that is none; empty where that is not plain."""
    if isinstance(value, _NUMBERS):
        return f": torch.tensor({value!r})"
    if is_of_numpy(value):
        return f": torch.as_tensor({path})"
    if hasattr(value, "__dlpack__"):
        return f": torch.from_dlpack({path})"
    return ""
