"""Raw callables as operators, kept in a bounded cache by what their code can see.

Two callables are the same operator when their code, defaults, closure values and the globals they
name are equal, attributes of modules, classes and functions included. Whoever sees anything mutable
(an object, a list) is traced anew at every call.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..caching.bounded import BoundedCache
from ..caching.fork_safe_locks import ForkSafeLock
from ..program.operator_names import checked
from ..torch_private import OPERATIONS
from ..trace.closure_captures import attributes, cell_values, frozen, is_of_library, names_in
from ..trace.traced_monoid import TracedMonoid
from .monoid import Monoid

MAX_RAW, MAX_TRACED = 256, 256
IMMUTABLE = (
    type(None), bool, int, float, complex, str, bytes, type, torch.dtype, types.ModuleType,
    types.BuiltinFunctionType, Monoid,
)  # fmt: skip


class SliceFunction:
    """A raw callable f(left, right) on pytrees of slices: no identity, no lift, no lower."""

    identity = lift = lower = adjoint = None
    lower_takes_inputs = False

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        self.combine = fn
        own_name = getattr(fn, "__name__", type(fn).__name__)
        self.name = checked(own_name, "the __name__ of the operator")
        self.traced: BoundedCache[Hashable, TracedMonoid] = BoundedCache(MAX_TRACED)


_LOCK = ForkSafeLock()
_RAW: collections.OrderedDict[Hashable, SliceFunction] = collections.OrderedDict()


def slice_function(fn: Callable[[Any, Any], Any]) -> SliceFunction:
    """The operator of a raw callable: a known one where it is the same, else a new one."""
    try:
        key = stable_key(fn, ())
    except MutableError:
        return SliceFunction(fn)
    with _LOCK:
        known = _RAW.get(key)
        if known is None:
            known = _RAW[key] = SliceFunction(frozen(fn))
            if len(_RAW) > MAX_RAW:
                _RAW.popitem(last=False)
        else:
            _RAW.move_to_end(key)
    return known


class MutableError(Exception):
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
    if isinstance(value, IMMUTABLE) or type(value).__module__ == OPERATIONS:
        return (type(value), repr(value) if isinstance(value, (float, complex)) else value)
    raise MutableError


def function_key(fn: types.FunctionType, seen: tuple[int, ...]) -> Hashable:
    """What a function's result can depend on besides its arguments."""
    if id(fn) in seen:
        return ("recursion", seen.index(id(fn)))
    if is_of_library(fn.__module__):
        return ("library", id(fn))
    seen = (*seen, id(fn))
    names = sorted(set(names_in(fn.__code__)))
    outer = [(name, fn.__globals__[name]) for name in names if name in fn.__globals__]
    return (
        fn.__code__,
        stable_key(fn.__defaults__, seen),
        stable_key(tuple(sorted((fn.__kwdefaults__ or {}).items())), seen),
        tuple((stable_key(v, seen), attribute_keys(v, names, seen)) for v in cell_values(fn)),
        tuple((n, stable_key(v, seen), attribute_keys(v, names, seen)) for n, v in outer),
    )


def attribute_keys(value: Any, names: list[str], seen: tuple[int, ...]) -> Hashable:
    """Of what a function's names mean in a module, class or function that it sees."""
    if ~id(value) in seen:  # other numbers than those of `function_key`
        return ()
    seen = (*seen, ~id(value))
    return tuple(
        (name, stable_key(v, seen), attribute_keys(v, names, seen))
        for name, v in attributes(value, names)
    )
