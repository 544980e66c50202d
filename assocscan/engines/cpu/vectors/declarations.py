"""Pieces of C++: arrays and their elements, structs, lists of ports, statements.

A leaf is one tensor. A port is one scalar of its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ....program.dtypes import CPP_MEMORY
from ...base.layout import scalar_size
from .emit import TYPES

Statement = Callable[[str], str]  # that stores a value, given its expression


def index(time: bool, states: bool, lane: bool) -> str:
    """Of an element at step t, state n and lane w: 0 where the array does not vary."""
    return f"[{'t' if time else 0}][{'n' if states else 0}][{'w' if lane else 0}]"


def array(name: str, kind: str, time: bool | None, states: bool, lane: bool) -> str:
    """The declaration of an array [step][state][lane]; time=None: [state][lane]."""
    steps = "" if time is None else "[CHUNK]" if time else "[1]"
    sizes = f"{steps}[{'STATES' if states else 1}][{'WIDTH' if lane else 1}]"
    return f"alignas(64) {TYPES[kind]} {name}{sizes};"


def struct(name: str, fields: Sequence[str]) -> str:
    return f"struct {name} {{ {' '.join(fields)} }};"


def port(
    name: str, kind: str, dtype: torch.dtype, leaf: int, part: int, time: bool, states: bool,
    lane: bool,
) -> str:  # fmt: skip
    offset = part * scalar_size(dtype)
    return (
        f"F({name}, {TYPES[kind]}, {CPP_MEMORY[dtype]}, {leaf}, {offset}, "
        f"{int(time)}, {int(states)}, {int(lane)})"
    )


def ports(lists: dict[str, list[str]]) -> list[str]:
    return [f"#define {name}(F) {' '.join(entries)}" for name, entries in lists.items()]


def assigns(place: str) -> Statement:
    return lambda value: f"{place} = {value};"


def adds_to(place: str) -> Statement:
    return lambda value: f"{place} += {value};"


def indented(lines: Sequence[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]
