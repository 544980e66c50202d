"""Error messages for keyword arguments that do not exist, and for flags that are not bools.

The public functions end in `**unknown` (30 ns per call), so that a call with an argument name of
another library (`dim=`, `elems=`) gets an error with the name used here (`axis=`, `xs=`).
`known_keywords` hides `**unknown` from `help()`; its type, NoReturn, makes type checkers refuse it.
`op` and `xs` have the default `...`: without a default, Python's own error would come before ours.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from ..errors import ScanTypeError
from ..runtime import backends
from ..wording import shown

Function = TypeVar("Function", bound=Callable[..., Any])

# Argument names of torch, JAX and other libraries → the name here.
RENAMED = {
    "dim": "axis",
    "elems": "xs",
    "fn": "op",
    "combine_fn": "op",
    "initial": "init",
    "cu_seqlens": "offsets",
}
# Arguments of other libraries that do not exist here → what to do instead.
NOT_NEEDED = {
    "combine_mode": "every operator is taken, pointwise or not: leave it out",
    "exclusive": "pass inclusive=False for an exclusive scan",
    "out": "results are new tensors: leave it out",
}


def known_keywords(function: Function) -> Function:
    """Decorator: remove `**unknown` from the signature that `help()` and `inspect` show, and the
    defaults `...`."""
    signature = inspect.signature(function)
    visible = [
        p.replace(default=p.empty) if p.default is ... else p
        for p in signature.parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]
    function.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
    return function


def refuse_unknown(function: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Raise ScanTypeError for keywords that the function does not have, with the right names. If
    `unknown` is empty, the error says that `xs` was not passed."""
    if not unknown:
        raise ScanTypeError(f"{function.__name__}() needs op and xs, and xs was not passed")
    known = list(inspect.signature(function).parameters)
    said = "; ".join(advice(name, value, known) for name, value in unknown.items())
    raise ScanTypeError(f"{function.__name__}() has no {said}")


def advice(name: str, value: Any, known: Iterable[str]) -> str:
    """The message for one unknown argument, such as `argument 'dim': pass axis=1`."""
    known = list(known)
    if name in NOT_NEEDED and ("inclusive" in known or name != "exclusive"):
        return f"argument {name!r}: {NOT_NEEDED[name]}"
    right = RENAMED.get(name)
    if right not in known:
        right = next(iter(difflib.get_close_matches(name, known, 1)), None)
    if right is None:
        return f"argument {name!r}; its arguments are {', '.join(known)}"
    example = value if isinstance(value, (bool, int, float, str)) else "…"
    return f"argument {name!r}: pass {right}={example!r}".replace("'…'", "…")


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
    if backend not in backends.BACKENDS:
        backends.refuse_backend(backend)
    require_choice(deterministic)
    return str(backend)


def require_choice(deterministic: Any) -> None:
    """Raise ScanTypeError unless `deterministic` is None or a value that `flag` accepts."""
    if deterministic is not None:
        flag("deterministic", deterministic, ", or None for torch's own setting")
