"""Arguments that other libraries call otherwise, and flags that are no flags.

The public functions end in `**unknown`, which costs 30 ns per call and lets them say what the
argument is called here. `known_keywords` hides it from `help()`; type checkers refuse it by its
type.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from ..errors import ScanTypeError
from ..wording import shown

Function = TypeVar("Function", bound=Callable[..., Any])

ELSEWHERE = {
    "dim": "axis",
    "elems": "xs",
    "fn": "op",
    "combine_fn": "op",
    "initial": "init",
    "cu_seqlens": "offsets",
}
WITHOUT = {
    "combine_mode": "every operator is taken, pointwise or not: leave it out",
    "exclusive": "pass inclusive=False for an exclusive scan",
    "out": "results are new tensors: leave it out",
}


def known_keywords(function: Function) -> Function:
    """The function itself, whose `**unknown` is not shown by `help()` and `inspect.signature`."""
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def refuse_unknown(function: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Raise ScanTypeError for keywords that the function does not have, naming the right ones."""
    known = list(inspect.signature(function).parameters)
    said = "; ".join(advice(name, value, known) for name, value in unknown.items())
    raise ScanTypeError(f"{function.__name__}() has no {said}")


def advice(name: str, value: Any, known: Iterable[str]) -> str:
    """`argument 'dim': pass axis=1`."""
    known = list(known)
    if name in WITHOUT and ("inclusive" in known or name != "exclusive"):
        return f"argument {name!r}: {WITHOUT[name]}"
    right = ELSEWHERE.get(name)
    if right not in known:
        right = next(iter(difflib.get_close_matches(name, known, 1)), None)
    if right is None:
        return f"argument {name!r}; its arguments are {', '.join(known)}"
    shown = value if isinstance(value, (bool, int, float, str)) else "…"
    return f"argument {name!r}: pass {right}={shown!r}".replace("'…'", "…")


def flag(name: str, value: Any, otherwise: str = "") -> bool:
    """A bool, or what is as good as one: 0, 1, and the bools of numpy and torch. `otherwise`: what
    else it may be, for the message."""
    kind = type(value)
    if kind is bool or (kind is int and value in (0, 1)):
        return bool(value)
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):
        return bool(value)
    if isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.dim() == 0:
        return bool(value)
    raise ScanTypeError(f"{name} is {shown(value)}, expected True or False{otherwise}")


def require_choice(deterministic: Any) -> None:
    """Raise ScanTypeError where `deterministic` is neither a bool nor None."""
    if deterministic is not None:
        flag("deterministic", deterministic, ", or None for torch's own setting")
