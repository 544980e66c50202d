"""Texts of messages: the user's line that one is about, past torch's and our own, and what was
passed, in few words."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .errors import FallbackWarning

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_NUMBERS = (bool, int, float, complex)
_FOLDERS = [str(Path(module).parent) for module in (torch.__file__, __file__)]
_OTHERS = (*_FOLDERS, "<frozen", "<string>", "<eval")


def is_users(filename: str) -> bool:
    return not filename.startswith(_OTHERS)


def user_line(error: BaseException) -> str:
    """` (file.py:12: code)` for the innermost of the user's frames."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f" ({Path(last.filename).name}:{last.lineno}: {last.line})"


def warn(text: str) -> None:
    """A FallbackWarning at the innermost of the user's lines; at the outermost line of a thread
    that has none, as autograd's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, FallbackWarning, stacklevel=level)


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
    if name in ("SymFloat", "SymInt", "SymBool"):
        return "a number (of item()?)"
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
    if type(value) in (list, tuple) and value and all(isinstance(v, _NUMBERS) for v in value):
        return f": torch.tensor({path})"
    if is_of_numpy(value):
        return f": torch.as_tensor({path})"
    if hasattr(value, "__dlpack__"):
        return f": torch.from_dlpack({path})"
    return ""


def fitting_view(
    name: str, given: Sequence[int], shape: Sequence[int], axis: int | None = None
) -> str:
    """The end of the message for a tensor that does not broadcast to a shape: the view of it that
    does, with dimensions of size 1 behind its own, or without one of its own. Else empty.

    axis: where its last dimension is to lie, if that fits."""

    def fits(view: Sequence[int]) -> bool:
        return len(view) <= len(shape) and all(
            n in (1, size) for n, size in zip(reversed(view), reversed(shape), strict=False)
        )

    numbers = list(range(len(shape) - len(given), 0, -1)) if given else []
    if axis is not None and len(shape) - axis - 1 in numbers:
        numbers.insert(0, len(shape) - axis - 1)
    for missing in numbers:
        view = (*given, *[1] * missing)
        if fits(view):
            call = "unsqueeze(-1)" if missing == 1 else f"view({', '.join(map(str, view))})"
            along = "the last dimension" if missing == 1 else f"the last {missing} dimensions"
            return f"; for the same values along {along} pass {name}.{call}, of shape {list(view)}"
    for d in (d for d, n in enumerate(given) if n == 1):
        if fits((*given[:d], *given[d + 1 :])):
            return f"; pass {name}.squeeze({d})"
    return ""


def no_final_of_empty(
    operator: str, what: str = "final carry", which: str = "", start: str = "init="
) -> str:
    """Why the final carry of an empty sequence is undefined, or what else `what` calls it.

    which: the empty sequences that are known, in words. start: the argument to pass."""
    return (
        f"the {what} of an empty sequence is init or the identity, and {operator!r} declares no "
        f"identity{f'; {which}' if which else ''}; pass {start}"
    )
