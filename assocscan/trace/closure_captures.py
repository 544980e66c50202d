"""What a function's code can see besides its arguments: closures, and the globals that it names."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

# Their functions do as they always do; their modules hold much that looks as if it could change.
LIBRARIES = ("torch", "numpy", "assocscan")
_MISSING = object()
# Globals that a copy of a function keeps as they are.
VALUES = (
    bool, int, float, complex, str, bytes, tuple, list, dict, torch.dtype, torch.device, np.generic,
)  # fmt: skip


def is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES


def cell_values(fn: types.FunctionType) -> Iterator[Any]:
    """The closure's values; None for a cell that is still empty."""
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield None


@functools.lru_cache(maxsize=1024)
def all_names(code: types.CodeType) -> tuple[str, ...]:
    """`names_in`, each name once."""
    return tuple(sorted(set(names_in(code))))


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names that a function's code, inner functions included, looks up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> frozenset[str]:
    """The names that a function's code, inner functions included, looks up among its globals."""
    found = {
        i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= global_names(constant)
    return frozenset(found)


def attributes(value: Any, names: list[str]) -> Iterator[tuple[str, Any]]:
    """What those names mean in a module, or as data in a class or on a function."""
    if isinstance(value, types.ModuleType):
        if is_of_library(value.__name__):
            return
    elif not isinstance(value, (type, types.FunctionType)) or is_of_library(value.__module__):
        return
    for name in names:
        found = inspect.getattr_static(value, name, _MISSING)
        is_data = isinstance(value, types.ModuleType) or not hasattr(type(found), "__get__")
        if found is not _MISSING and is_data:
            yield name, found


def captured(fn: Any) -> list[torch.Tensor]:
    """The tensors that a function sees by itself or through functions that it sees."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                visit(part)
        elif isinstance(value, (tuple, list)):
            for part in value:
                visit(part)
        elif isinstance(value, types.FunctionType) and not is_of_library(value.__module__):
            names = set(names_in(value.__code__)) & value.__globals__.keys()
            for part in (*cell_values(value), *(value.__globals__[name] for name in names)):
                visit(part)

    visit(fn)
    return found


def frozen(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """A function with copies of the variables that it sees, and of the functions in these.

    An operator is kept for later calls with a function that behaves equally, and may read its own
    again then: for other dtypes, or where a gradient is first wanted. By then the variables that it
    sees may have other values, as in

        [associative_scan(lambda a, b: a + b + k, x) for k in (0.5, 1.5)]

    where both functions share one variable k. So an operator keeps a copy. Variables are those of
    closures, and globals that hold numbers, strings, functions or collections; not attributes.

    copies: those made so far, by the identity of the original: functions may see themselves.
    """
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, functools.partial):
        keywords = {name: frozen(v, copies) for name, v in value.keywords.items()}
        arguments = [frozen(v, copies) for v in value.args]
        return functools.partial(frozen(value.func, copies), *arguments, **keywords)
    if type(value) in (list, tuple, dict):
        return frozen_collection(value, copies)
    if not isinstance(value, types.FunctionType) or is_of_library(value.__module__):
        return value
    own = own_globals(value, set())
    if not value.__closure__ and not own:
        return value
    cells = tuple(types.CellType() for _ in value.__closure__ or ())
    space = dict(value.__globals__) if own else value.__globals__
    copy = types.FunctionType(value.__code__, space, value.__name__, value.__defaults__, cells)
    copy.__kwdefaults__ = value.__kwdefaults__
    copy.__module__, copy.__qualname__ = value.__module__, value.__qualname__
    copy.__dict__.update(value.__dict__)
    copies[id(value)] = copy
    for name in own:
        space[name] = frozen(space[name], copies)
    for cell, given in zip(cells, value.__closure__ or (), strict=True):
        try:
            cell.cell_contents = frozen(given.cell_contents, copies)
        except ValueError:  # nothing is assigned to it yet
            continue
    return copy


def frozen_collection(value: Any, copies: dict[int, Any]) -> Any:
    """A list, a tuple or a dictionary of copies."""
    if type(value) is tuple:
        return tuple([frozen(part, copies) for part in value])
    made: Any = type(value)()
    copies[id(value)] = made
    if type(value) is list:
        made.extend(frozen(part, copies) for part in value)
    else:
        made.update((key, frozen(part, copies)) for key, part in value.items())
    return made


def own_globals(fn: types.FunctionType, seen: set[int]) -> list[str]:
    """The global names through which a function sees what may change: a plain value, a closure."""
    seen.add(id(fn))
    found = []
    for name in sorted(global_names(fn.__code__) & fn.__globals__.keys()):
        value = fn.__globals__[name]
        if isinstance(value, types.FunctionType) and not is_of_library(value.__module__):
            if id(value) in seen or value.__closure__ or own_globals(value, seen):
                found.append(name)
        elif value is None or isinstance(value, VALUES):
            found.append(name)
    return found
