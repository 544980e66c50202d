"""One `FallbackWarning` per operator and reason where a scan runs on a slower engine."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

from ...caching.bounded import BoundedCache
from ...wording import warn

MOST = 1024

_WARNED: BoundedCache[Hashable, None] = BoundedCache(MOST)


def warn_once(operator: Any, why: str) -> None:
    """Warn of `why`, once per operator; None: the reason has nothing to do with the operator."""
    key = (None if operator is None else identity_of(operator), why)
    if key not in _WARNED:
        _WARNED.keep(key, None)
        warn(why if operator is None else f"operator {shown(operator)}: {why}")


def identity_of(operator: Any) -> Hashable:
    """Equal for operators of one name and one code: a function that is made anew at every call
    warns once, two lambdas warn twice."""
    code = getattr(operator.combine, "__code__", operator.combine)
    return operator.name, code if is_hashable(code) else type(code)


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def shown(operator: Any) -> str:
    """`'name'`; of a lambda also where it stands."""
    code = getattr(operator.combine, "__code__", None)
    if operator.name != "<lambda>" or code is None:
        return repr(operator.name)
    return f"{operator.name!r} ({Path(code.co_filename).name}:{code.co_firstlineno})"
