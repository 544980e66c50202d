"""Which cases of a test run by default, and the names of cases, from which that is decided."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import torch


def more(has_gpu: bool) -> int:
    """Each `thinned(n)` leaves about one case in `more` · n to the default tests: the README
    promises that they take less than ten minutes on two cores. A larger number would hardly leave
    fewer, since every test keeps one. Where there is a GPU they run on it, in more processes."""
    return 3 if has_gpu else 5


# CI runs about one in so many of a test's exhaustive cases; of those that Triton interprets, where
# a case takes ten seconds, fewer. The others are by_hand.
IN_CI, INTERPRETED_IN_CI = 24, 48


def place(name: str) -> float:
    """A number from 0 to 1 (exclusive) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def kept(names: Iterable[str], n: int, at_least: int = 1) -> set[str]:
    """About one in n of the names, and `at_least` so many of them, 0 or 1.

    Whether a name is kept depends on itself: others that are added or removed change nothing,
    except where a single one is kept because no name falls into the kept part.
    """
    names = set(names)
    found = {name for name in names if place(name) * n < 1}
    return found or set(sorted(names, key=place)[:at_least])


def case_name(value: Any) -> str | None:
    """The name of a parameter by its value, where pytest would number it: a number is its place in
    the list of cases. None leaves it to pytest, or numbers what has no name."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.nn.Module):
        return type(value).__name__
    if isinstance(value, set | frozenset):
        return case_name(tuple(sorted(value)))
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if isinstance(value, tuple) or is_record:
        text = repr(value)
        return None if " at 0x" in text or "tensor(" in text else text
    return None
