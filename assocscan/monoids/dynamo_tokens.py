"""Operators by name, for graphs: a token is a string that no other operator ever has.

Raw callables are kept as long as the process: a graph that names one may run at any time. There is
one for each part of a compiled graph that is an operator, and Dynamo keeps these graphs too.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

_MONOIDS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_CALLABLES: dict[str, Callable[..., Any]] = {}
_NUMBERS = itertools.count()


def token_of(monoid: Any) -> str:
    """The token of a new monoid."""
    token = f"{monoid.name}#{next(_NUMBERS)}"
    _MONOIDS[token] = monoid
    return token


def token_of_callable(fn: Callable[..., Any]) -> str:
    """A new token for a raw callable, which is kept for the graphs that name it."""
    token = f"{getattr(fn, '__name__', type(fn).__name__)}#{next(_NUMBERS)}"
    _CALLABLES[token] = fn
    return token


def resolve_token(token: str) -> Any:
    """The operator of a token."""
    found = _MONOIDS.get(token)
    return _CALLABLES[token] if found is None else found
