"""`FallbackWarning` for scans that run on a slower engine, once per operator and reason."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

from ...caching.bounded import BoundedCache
from ...wording import warn

MOST = 1024

_WARNED: BoundedCache[Hashable, None] = BoundedCache(MOST)


def warn_once(operator: Any, why: str) -> None:
    """Warn with the text `why`, once per operator. `operator` is None for a reason that does not
    depend on the operator (no compiler, say): then warn once per process."""
    key = (None if operator is None else identity_of(operator), why)
    if key not in _WARNED:
        _WARNED.insert(key, None)
        warn(why if operator is None else f"operator {shown(operator)}: {why}")


def identity_of(operator: Any) -> Hashable:
    """A key that is equal for operators with the same name and the same code. A function that is
    defined again at every call warns once; two different lambdas warn twice."""
    code = getattr(operator.combine, "__code__", operator.combine)
    return operator.name, code if is_hashable(code) else type(code)


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def shown(operator: Any) -> str:
    """The operator's name in quotes; for a lambda also its file and line."""
    code = getattr(operator.combine, "__code__", None)
    if operator.name != "<lambda>" or code is None:
        return repr(operator.name)
    return f"{operator.name!r} ({Path(code.co_filename).name}:{code.co_firstlineno})"
