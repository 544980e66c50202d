"""What a monoid's functions see besides their arguments, and the monoid at its present values.

A function may read a number from a closure, a global, an attribute, a list or a dictionary. A trace
holds the value that it had. So a monoid with such functions has one version for each set of values:
a monoid of copies of its functions, in which closures and globals stay as they were. The values are
looked up at every call. What the functions of libraries see is not looked at.
"""

from __future__ import annotations

import builtins
import collections
import enum
import functools
import inspect
import numbers
import sys
import types
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..torch_private import OPERATIONS
from ..trace.closure_captures import all_names, cell_values, frozen, global_names, is_of_library

if TYPE_CHECKING:
    from .monoid import Monoid

MOST_VERSIONS = 16
# Values that are looked at, and how deep they are nested; others are told apart by identity.
MOST_VALUES, DEEPEST = 256, 16
PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device)
COLLECTIONS = (tuple, list, set, frozenset, collections.deque)
MAPPINGS = (dict, types.MappingProxyType)
ROLES = ("combine", "lift", "lower", "identity")
# Methods that code calls without naming them; `forward` is that of torch's modules.
IMPLIED = frozenset(
    f"__{name}__" for name in (
        "call", "getitem", "getattr", "float", "int", "bool", "index", "len", "iter", "eq", "lt",
        "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg",
    )
) | {"forward"}  # fmt: skip


def present(op: Monoid, within: frozenset[int] = frozenset()) -> Monoid:
    """The version of a monoid at the present values of what its functions see. within: `Seen`."""
    if op.sees_nothing:
        return op
    seen = Seen(within).of_monoid(op)
    if not seen.varies:
        op.sees_nothing = True
        return op
    key = tuple(seen.key)
    known: Monoid | None = op.versions.get(key)
    if known is not None:
        return known
    made = version_of(op)
    made.held = seen.held
    if tuple(Seen(within).of_monoid(op).key) != key:  # another thread changed a value meanwhile
        return made
    return op.versions.insert(key, made)


def same_values(op: Monoid) -> Callable[[], bool] | None:
    """Whether a monoid's functions see the values that they see now; None where they see none."""
    if present(op) is op:
        return None
    seen = Seen().of_monoid(op)

    def holds() -> bool:
        return Seen().of_monoid(op).key == seen.key  # `seen` holds what its key names

    return holds


def may_see(op: Monoid, things: Iterable[Any]) -> bool:
    """Whether a monoid's functions may see one of these: of cells, modules and objects without
    attributes it is not known."""
    if present(op) is op:
        return False
    visited = Seen().of_monoid(op).visited
    ids = {v[0] if isinstance(v, tuple) else v for v in visited}
    return any(
        id(t) in ids or type(t) in (object, types.CellType, types.ModuleType) for t in things
    )


def version_of(op: Monoid) -> Monoid:
    """A monoid that stays as `op` is now."""
    copies: dict[int, Any] = {}
    if op.recipe is not None:
        combinator, ops, *rest = op.recipe
        parts = [frozen(part, copies) for part in rest]
        made: Monoid = combinator([present(part) for part in ops], *parts)
    else:
        adjoint = op.adjoint and (present(op.adjoint[0]), frozen(op.adjoint[1], copies))
        made = type(op)(
            frozen(op.combine, copies), identity=frozen(op.identity, copies), name=op.name,
            element_ndim=op.element_ndim, lift=frozen(op.lift, copies),
            lower=frozen(op.lower, copies), adjoint=adjoint,
        )  # fmt: skip
    made.fields, made.sees_nothing = op.fields, True
    return made


class Seen:
    """A walk through what functions see.

    key: equal for equal values. held: what the key names by its identity, which must not be used
    again while the key is. varies: whether anything was seen that may change. within: the monoids
    whose functions see this one: they may be seen by it, as by a method of a module that holds it.
    """

    def __init__(self, within: frozenset[int] = frozenset()) -> None:
        self.within = within
        self.key: list[Hashable] = []
        self.held: list[Any] = []
        self.varies = False
        self.visited: set[Any] = set()
        self.left = MOST_VALUES

    def of_monoid(self, op: Monoid) -> Seen:
        self.within |= {id(op)}
        if op.recipe is not None:
            _, ops, *rest = op.recipe
            for part in ops:
                self.monoid(part)
            functions: Iterable[Any] = rest
        else:
            functions = [getattr(op, role) for role in ROLES]
            if op.adjoint is not None:
                self.monoid(op.adjoint[0])
                functions = [*functions, op.adjoint[1]]
        for function in functions:
            if callable(function):
                self.callable(function, 0)
        return self

    def monoid(self, op: Monoid) -> None:
        if id(op) in self.within:
            self.key.append("again")
            return
        version = present(op, self.within)
        self.varies |= version is not op
        self.named(version)

    def named(self, value: Any) -> None:
        """By its identity."""
        self.key.append(id(value))
        self.held.append(value)

    def callable(self, fn: Any, depth: int) -> None:
        """A function, or what is called as one."""
        if isinstance(fn, types.FunctionType):
            self.function(fn, depth)
        elif isinstance(fn, types.MethodType):
            if is_of_library(type(fn.__self__).__module__):
                return
            self.callable(fn.__func__, depth)
            names = getattr(getattr(fn.__func__, "__code__", None), "co_names", ())
            self.value(fn.__self__, names, depth + 1)
        elif isinstance(fn, functools.partial):
            self.callable(fn.func, depth)
            for part in (*fn.args, *fn.keywords.values()):
                self.value(part, (), depth + 1)
        elif hasattr(fn, "__wrapped__") and not is_of_library(type(fn).__module__):
            self.callable(fn.__wrapped__, depth)  # functools.lru_cache
        elif isinstance(fn, (type, types.BuiltinFunctionType)) or is_of_library(
            type(fn).__module__
        ):
            return
        else:
            self.value(fn, ("__call__", "forward"), depth + 1)

    def function(self, fn: types.FunctionType, depth: int) -> None:
        space = fn.__globals__
        if id(fn) in self.visited:
            return
        self.visited.add(id(fn))
        if is_of_library(space.get("__name__")):
            if hasattr(fn, "__wrapped__"):  # torch.no_grad()
                self.callable(fn.__wrapped__, depth)
            return
        self.named(fn.__code__)
        names = all_names(fn.__code__)
        for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            self.value(value, names, depth + 1)
        for value in cell_values(fn):
            self.value(value, names, depth + 1)
        for name in sorted(global_names(fn.__code__)):
            if name in space:
                self.value(space[name], names, depth + 1)
            elif not hasattr(builtins, name):
                self.varies = True
                self.key.append(name)
        for name in sorted(vars(fn).keys() & set(names)):
            self.value(vars(fn)[name], names, depth + 1)

    def value(self, value: Any, names: Iterable[str], depth: int) -> None:
        """What a function sees in whose code are these names."""
        self.left -= 1
        kind = type(value)
        if isinstance(value, types.ModuleType):
            if not (is_of_library(value.__name__) or is_standard(value)):
                self.attributes(value, names, depth)
            return
        if isinstance(value, types.BuiltinFunctionType) or kind.__module__ == OPERATIONS or (
            isinstance(value, (types.FunctionType, type)) and is_of_library(value.__module__)
            and not hasattr(value, "__wrapped__")
        ):  # fmt: skip
            return
        self.varies = True
        if self.left < 0 or depth > DEEPEST:
            self.named(value)
        elif isinstance(value, enum.Enum):
            self.key.append((kind, value.name))
        elif isinstance(value, PLAIN) and kind.__hash__ is not None:
            self.key.append((kind, value))
        elif isinstance(value, (float, complex)):
            self.key.append((kind, float.hex(value) if isinstance(value, float) else repr(value)))
        elif isinstance(value, (np.generic, numbers.Number)):
            self.key.append((kind, repr(value)))
        elif (
            isinstance(value, np.ndarray)
            and value.size <= MOST_VALUES
            and not value.dtype.hasobject
        ):
            self.key.append((value.shape, str(value.dtype), value.tobytes()))
        elif isinstance(value, (*COLLECTIONS, *MAPPINGS)):
            self.collection(value, names, depth)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self.callable(value, depth + 1)
        elif hasattr(kind, "exclusive_form"):
            self.monoid(value)
        elif isinstance(value, torch.Tensor) or is_of_library(kind.__module__):
            self.named(value)
        elif hasattr(value, "__wrapped__"):
            self.callable(value, depth + 1)
        else:
            self.attributes(value, names, depth)

    def collection(self, value: Any, names: Iterable[str], depth: int) -> None:
        if id(value) in self.visited:
            self.key.append("again")
            return
        self.visited.add(id(value))
        self.held.append(value)
        self.key.append((type(value), len(value)))
        parts = value
        if isinstance(value, MAPPINGS):
            parts = [part for item in value.items() for part in item]
        elif isinstance(value, (set, frozenset)):
            parts = sorted(value, key=repr)
        for part in parts:
            self.value(part, names, depth + 1)

    def attributes(self, owner: Any, names: Iterable[str], depth: int) -> None:
        """Those attributes of a module or a class that are named in the code; of an object those of
        `names_in`."""
        names = tuple(names)
        if (id(owner), names) in self.visited:
            return
        self.visited.add((id(owner), names))
        self.held.append(owner)
        self.named(type(owner))
        is_object = not isinstance(owner, (types.ModuleType, type))
        if is_object:
            names = self.names_in(owner, names)
        for name in sorted(set(names)):
            found = inspect.getattr_static(owner, name, Seen)
            if found is Seen:
                continue
            if isinstance(found, (staticmethod, classmethod)):
                found = found.__func__
            if name in IMPLIED and not isinstance(found, types.FunctionType):
                continue
            if isinstance(found, types.FunctionType) and not isinstance(owner, types.ModuleType):
                self.callable(found, depth + 1)
                self.value(owner, all_names(found.__code__), depth + 1)
                continue
            if hasattr(type(found), "__get__") and not isinstance(found, types.FunctionType):
                try:  # a property, a slot
                    found = getattr(owner, name)
                except Exception:
                    continue
            self.key.append(name)
            self.value(found, names, depth + 1)

    def names_in(self, owner: Any, names: Iterable[str]) -> tuple[str, ...]:
        """All attributes that an object holds, and the methods that Python calls."""
        return (*names, *getattr(owner, "__dict__", ()), *IMPLIED)


def is_standard(module: types.ModuleType) -> bool:
    return module.__name__.partition(".")[0] in sys.stdlib_module_names and (
        module.__name__ != "__main__"
    )
