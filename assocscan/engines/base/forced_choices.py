"""Choices that tests and measurements force: tiles, modes.

Prepared scans are kept under the number `generation`, which is another one inside of every `with`
block that forces something, and 0 outside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

generation = 0
_numbers = itertools.count(1)


class Override(Generic[T]):
    """One choice that can be forced."""

    def __init__(self) -> None:
        self._values: list[T] = []

    @property
    def current(self) -> T | None:
        """The innermost forced value."""
        return self._values[-1] if self._values else None

    @contextmanager
    def forced(self, value: T) -> Iterator[None]:
        global generation
        before, generation = generation, next(_numbers)
        self._values.append(value)
        try:
            yield
        finally:
            self._values.pop()
            generation = before
