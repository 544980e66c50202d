"""Monoids in pickles (`torch.save` of a module, workers of a DataLoader): by reference.

A pickle holds no code. It holds the qualified name under which the monoid stands in its module; or
else, for a monoid that its module registered, the module and the registered name; or else the
qualified names of its functions. Loading imports the module.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from typing import Any

from .errors import MonoidError
from .monoid import Monoid, monoids, resolve

_ROLES = ("combine", "lift", "lower", "adjoint", "identity")


def reduce(op: Monoid) -> tuple[Any, ...]:
    """What `Monoid.__reduce__` returns. Raises MonoidError where no reference can be made."""
    module, qualified = op.origin
    if lookup(module, qualified) is op:
        return lookup, (module, qualified)
    if "<locals>" not in qualified and module and monoids().get(op.name) is op:
        return registered, (module, op.name)
    for role in _ROLES:
        refuse_local(op, role)
    return rebuild, (
        op.combine, op.identity, op.name, op.element_ndim, op.lift, op.lower, op.adjoint,
    )  # fmt: skip


def refuse_local(op: Monoid, role: str) -> None:
    """Raise MonoidError for a function that no name leads to."""
    value = getattr(op, role)
    functions = value[1:] if role == "adjoint" and value is not None else (value,)
    for fn in functions:
        if not callable(fn) or not hasattr(fn, "__qualname__"):
            continue
        if lookup(fn.__module__, fn.__qualname__) is fn:
            continue
        kind = "a lambda" if fn.__name__ == "<lambda>" else "a local function"
        raise MonoidError(
            f"{op.name!r} cannot be pickled: its {role} is {kind} ({fn.__module__}."
            f"{fn.__qualname__}), which another process cannot import; make the monoid, or its "
            "functions, at the top level of a module"
        ) from pickle.PicklingError(f"cannot pickle {fn!r}")


def lookup(module: str, qualified: str) -> Any:
    """What stands under a qualified name; None for nothing (a local function, a lambda)."""
    try:
        found: Any = importlib.import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found


def registered(module: str, name: str) -> Monoid:
    """The monoid that a module registers under a name when it is imported."""
    importlib.import_module(module)
    return resolve(name)


def rebuild(combine: Callable[..., Any], *rest: Any) -> Monoid:
    """A monoid of the same parts, which is not registered."""
    names = ("identity", "name", "element_ndim", "lift", "lower", "adjoint")
    return Monoid(combine, **dict(zip(names, rest, strict=True)))
