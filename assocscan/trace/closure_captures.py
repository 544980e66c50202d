"""What a function's code can see besides its arguments: closures, and the globals that it names."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch

# Their functions do as they always do; their modules hold much that looks as if it could change.
LIBRARIES = ("torch", "numpy", "assocscan")
_MISSING = object()


def is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES


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
