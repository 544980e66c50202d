"""Descriptions of executables and calls for the C++ runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...engines.base.commands import device_number
from ...engines.base.executable import Executable


def program_of(module: Any, executable: Executable) -> Any:
    """The program of an executable; None where some command runs in Python only."""
    version = executable.version
    if executable.program is None or executable.program[0] != version:
        executable.program = version, made(module, executable)
    return executable.program[1]


def made(module: Any, executable: Executable) -> Any:
    if executable.spec.device.type not in ("cpu", "cuda"):
        return None
    commands = executable.described()
    if None in commands:
        return None
    return module.program(
        len(executable.specs), len(executable.spec.names), device_number(executable.spec.device),
        tuple(executable.constants.items()), tuple(commands),
        (*executable.outputs, *executable.finals),
    )  # fmt: skip


def structure_of(tree: Any) -> Any:
    """0 for a leaf, a tuple for a tuple; None where there are other containers."""
    if type(tree) is int:
        return 0
    if type(tree) is not tuple:
        return None
    parts = tuple(structure_of(part) for part in tree)
    return None if None in parts else parts


def numbers_of(tree: Any) -> Sequence[int]:
    """The leaves of nested tuples, in order."""
    return (tree,) if type(tree) is int else tuple(n for part in tree for n in numbers_of(part))
