"""Monoids in pickles (`torch.save` of a module, workers of a DataLoader): by reference.

A pickle holds no code. It holds the qualified name under which the monoid stands in its module; or
else, for a monoid that its module registered, the module and the registered name; or else the
qualified names of its functions. Loading imports the module. A monoid made from monoids is the
combinator and what it was given.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from typing import Any

from ..errors import MonoidError
from ..hooks import HOOKS
from .monoid import Monoid, monoids, resolve

_ROLES = ("combine", "lift", "lower", "adjoint", "identity")


def reduce(op: Monoid) -> tuple[Any, ...]:
    """What `Monoid.__reduce__` returns. Raises MonoidError where no reference can be made."""
    if op.recipe is not None:
        combinator, ops, *rest = op.recipe
        for part in rest:
            require_reference(op, "function", part)
        return combinator, (ops, *rest)
    module, qualified = op.origin
    if lookup(module, qualified) is op:
        return lookup, (module, qualified)
    if "<locals>" not in qualified and module and monoids().get(op.name) is op:
        return registered, (module, op.name)
    for role in _ROLES:
        require_reference(op, role, getattr(op, role))
    return rebuild, (
        op.combine, op.identity, op.name, op.element_ndim, op.lift, op.lower, op.adjoint,
    )  # fmt: skip


def require_reference(op: Monoid, role: str, part: Any) -> None:
    """Raise MonoidError for a part that cannot be pickled: a function that no name leads to."""
    try:
        pickle.dumps(part)
    except Exception as error:
        name = getattr(part, "__qualname__", "")
        kind = "not importable"
        if "<locals>" in name or "<lambda>" in name:
            kind = "a lambda" if name.endswith("<lambda>") else "a local function"
        raise MonoidError(
            f"{op.name!r} cannot be pickled: its {role} is {kind}, which another process cannot "
            f"find ({error}); make the monoid, or its functions, at the top level of a module"
        ) from error


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


HOOKS.pickled_monoid = reduce
