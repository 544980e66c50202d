"""Raw callables as operators, kept in a bounded cache by what their code can see.

Two callables are the same operator when their code, defaults, closure values and the globals they
name are equal. Whoever sees anything mutable (an object, a list) is traced anew at every call.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from .locks import ForkSafeLock
from .monoid import Monoid
from .specialize import Specialized

MAX_RAW = 256
IMMUTABLE = (
    type(None), bool, int, float, complex, str, bytes, type, torch.dtype, types.ModuleType,
    types.BuiltinFunctionType, Monoid,
)  # fmt: skip


class RawOperator:
    """A raw callable f(left, right) on pytrees of slices: no identity, no lift, no lower."""

    identity = lift = lower = adjoint = None

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        self.combine = fn
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        self.specialized: dict[Hashable, Specialized | None] = {}
        self.why_not: dict[Hashable, str] = {}


_LOCK = ForkSafeLock()
_RAW: collections.OrderedDict[Hashable, RawOperator] = collections.OrderedDict()


def raw_operator(fn: Callable[[Any, Any], Any]) -> RawOperator:
    """The operator of a raw callable: a known one where it is the same, else a new one."""
    try:
        key = stable_key(fn, ())
    except _MutableError:
        return RawOperator(fn)
    with _LOCK:
        known = _RAW.get(key)
        if known is None:
            known = _RAW[key] = RawOperator(fn)
            if len(_RAW) > MAX_RAW:
                _RAW.popitem(last=False)
        else:
            _RAW.move_to_end(key)
    return known


class _MutableError(Exception):
    pass


def stable_key(value: Any, seen: tuple[int, ...]) -> Hashable:
    """A key that is equal only for values that behave equally, now and later."""
    if isinstance(value, types.FunctionType):
        return function_key(value, seen)
    if isinstance(value, functools.partial):
        keywords = tuple(sorted(value.keywords.items()))
        parts = (value.func, value.args, keywords)
        return ("partial", *(stable_key(part, seen) for part in parts))
    if type(value) is tuple:
        return ("tuple", *(stable_key(v, seen) for v in value))
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))
    if isinstance(value, IMMUTABLE) or type(value).__module__ == "torch._ops":
        return (type(value), repr(value) if isinstance(value, (float, complex)) else value)
    raise _MutableError


def function_key(fn: types.FunctionType, seen: tuple[int, ...]) -> Hashable:
    """What a function's result can depend on besides its arguments."""
    if id(fn) in seen:
        return ("recursion", seen.index(id(fn)))
    if (fn.__module__ or "").partition(".")[0] == "torch":
        return ("torch", id(fn))
    seen = (*seen, id(fn))
    names = sorted(set(names_in(fn.__code__)) & fn.__globals__.keys())
    return (
        fn.__code__,
        stable_key(fn.__defaults__, seen),
        stable_key(tuple(sorted((fn.__kwdefaults__ or {}).items())), seen),
        tuple(stable_key(v, seen) for v in cell_values(fn)),
        tuple((name, stable_key(fn.__globals__[name], seen)) for name in names),
    )


def cell_values(fn: types.FunctionType) -> Iterator[Any]:
    """The closure's values; None for a cell that is still empty."""
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield None


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names that a function's code, inner functions included, looks up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
