"""Overrides of the engines' choices (tiles, modes), for tests and measurements.

`generation` is 0 where no override is active, and a new number in every `with` block that sets one.
It is part of the key of the cache of executables, so that a scan that was prepared without the
override is not reused inside of the block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

generation = 0
watchers: list[Callable[[], None]] = []  # called after every change of `generation`
_numbers = itertools.count(1)


class Override(Generic[T]):
    """One choice that tests and measurements can override."""

    def __init__(self) -> None:
        self._values: list[T] = []

    @property
    def current(self) -> T | None:
        """The value of the innermost active `with` block; None where there is none."""
        return self._values[-1] if self._values else None

    @contextmanager
    def forced(self, value: T) -> Iterator[None]:
        """Use `value` inside of the `with` block."""
        global generation
        before, generation = generation, next(_numbers)
        self._values.append(value)
        tell_watchers()
        try:
            yield
        finally:
            self._values.pop()
            generation = before
            tell_watchers()


def tell_watchers() -> None:
    for watcher in watchers:
        watcher()
