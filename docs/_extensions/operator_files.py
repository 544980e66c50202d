"""Which operators of `assocscan.ops` each of its files defines."""

from __future__ import annotations

import importlib
import pkgutil

from assocscan import Monoid, ops


def families() -> dict[str, list[str]]:
    """The public operators, by the module that defines them."""
    found: dict[str, list[str]] = {}
    for module in pkgutil.iter_modules(ops.__path__):
        inside = vars(importlib.import_module(f"assocscan.ops.{module.name}"))
        names = [n for n in ops.__all__ if inside.get(n) is getattr(ops, n)]
        names = [n for n in names if origin(n) == f"assocscan.ops.{module.name}"]
        if names:
            found[module.name] = names
    missing = {*ops.__all__} - {name for names in found.values() for name in names}
    assert not missing, f"in no module of ops: {sorted(missing)}"
    return found


def origin(name: str) -> str:
    made = getattr(ops, name)
    return str((made.combine if isinstance(made, Monoid) else made).__module__)
