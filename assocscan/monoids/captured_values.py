"""The numbers that a monoid's functions see, and the monoid at their present values.

A function may read a number from a closure, a global, an attribute, a list or a dictionary. A trace
holds the value that it had. So a monoid with such functions has one version for each set of values:
a monoid of copies of its functions, in which closures and globals stay as they were. What the
functions of libraries see is not looked at.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..trace.closure_captures import attributes, frozen, global_names, is_of_library, names_in

if TYPE_CHECKING:
    from .monoid import Monoid

MOST_VERSIONS = 16
MOST_ENTRIES = 64  # of a list or a dictionary that is looked at
PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device)

Reader = Callable[[], Hashable]


def present(op: Monoid) -> Monoid:
    """The version of a monoid at the present values of what its functions see."""
    readers = op.readers
    if readers is None:
        readers = op.readers = tuple(readers_of(op))
    if not readers:
        return op
    key = tuple([read() for read in readers])
    known: Monoid | None = op.versions.get(key)
    return op.versions.keep(key, version_of(op)) if known is None else known


def version_of(op: Monoid) -> Monoid:
    """A monoid that stays as `op` is now."""
    copies: dict[int, Any] = {}
    if op.recipe is not None:
        combinator, ops, *rest = op.recipe
        made: Monoid = combinator(
            [present(part) for part in ops], *[frozen(p, copies) for p in rest]
        )
    else:
        made = type(op)(
            frozen(op.combine, copies), identity=frozen(op.identity, copies), name=op.name,
            element_ndim=op.element_ndim, lift=frozen(op.lift, copies),
            lower=frozen(op.lower, copies), adjoint=frozen_adjoint(op.adjoint, copies),
        )  # fmt: skip
    made.fields, made.readers = op.fields, ()
    return made


def frozen_adjoint(adjoint: Any, copies: dict[int, Any]) -> Any:
    return adjoint and (present(adjoint[0]), frozen(adjoint[1], copies))


def readers_of(op: Monoid) -> Iterator[Reader]:
    """Functions that return what the monoid's functions see, one for each value."""
    seen: set[int] = set()
    if op.recipe is not None:
        _, ops, *rest = op.recipe
        for part in ops:
            if present(part) is not part:
                yield functools.partial(version_key, part)
        for part in rest:
            yield from of_function(part, seen)
        return
    if op.adjoint is not None and present(op.adjoint[0]) is not op.adjoint[0]:
        yield functools.partial(version_key, op.adjoint[0])
    adjoint = None if op.adjoint is None else op.adjoint[1]
    for function in (op.combine, op.lift, op.lower, op.identity, adjoint):
        yield from of_function(function, seen)


def version_key(op: Monoid) -> Hashable:
    return id(present(op))


def of_function(fn: Any, seen: set[int]) -> Iterator[Reader]:
    """Readers of what a callable sees, by itself or through functions that it sees."""
    if id(fn) in seen:
        return
    seen.add(id(fn))
    if isinstance(fn, functools.partial):
        for part in (fn.func, *fn.args, *fn.keywords.values()):
            yield from of_function(part, seen)
    elif isinstance(fn, types.MethodType):
        yield from of_function(fn.__func__, seen)
        yield from of_attributes(fn.__self__, list(names_in(fn.__func__.__code__)), seen)
    elif isinstance(fn, types.FunctionType) and not is_of_library(fn.__module__):
        names = list(names_in(fn.__code__))
        for cell in fn.__closure__ or ():
            yield from of_value(functools.partial(cell_value, cell), names, seen)
        for name in sorted(set(global_names(fn.__code__))):
            if name in fn.__globals__:
                yield from of_value(functools.partial(fn.__globals__.get, name), names, seen)
    elif callable(fn) and not isinstance(fn, type) and not is_of_library(type(fn).__module__):
        call = type(fn).__call__
        if isinstance(call, types.FunctionType):
            yield from of_function(call, seen)
            yield from of_attributes(fn, list(names_in(call.__code__)), seen)


def of_value(read: Callable[[], Any], names: list[str], seen: set[int]) -> Iterator[Reader]:
    """Readers of a variable that a function sees, in whose code are these names."""
    value = read()
    if plain(value) is not None:
        yield lambda: plain(read()) or ("object", id(read()))
    elif isinstance(value, types.FunctionType):
        if not is_of_library(value.__module__):
            yield lambda: id(read())
            yield from of_function(value, seen)
    else:
        yield from of_attributes(value, names, seen)


def of_attributes(owner: Any, names: list[str], seen: set[int]) -> Iterator[Reader]:
    """Readers of those attributes of a module, a class or an object that hold plain values."""
    if ~id(owner) in seen:  # other numbers than those of `of_function`
        return
    seen.add(~id(owner))
    if isinstance(owner, types.ModuleType) and owner.__name__ in sys.stdlib_module_names:
        return  # math.pi
    if isinstance(owner, (types.ModuleType, type, types.FunctionType)):
        known = [name for name, _ in attributes(owner, names)]
    elif is_of_library(type(owner).__module__):
        return
    else:
        known = [name for name in names if name in getattr(owner, "__dict__", {})]
    for name in sorted(set(known)):
        yield from of_value(functools.partial(getattr, owner, name, None), names, seen)


def plain(value: Any) -> Hashable:
    """What tells a number, a string or a small collection of these from others; None for what else
    there is."""
    kind = type(value)
    if isinstance(value, (float, complex)):
        return kind, repr(value)  # 0.0 and -0.0 are equal
    if isinstance(value, PLAIN):
        return kind, value
    if isinstance(value, dict):
        value = [part for item in value.items() for part in item]
    elif not isinstance(value, (tuple, list)):
        return None
    if len(value) > MOST_ENTRIES:
        return None
    parts = tuple([plain(part) for part in value])
    return None if None in parts else (kind, parts)


def cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is assigned to it yet
        return None
