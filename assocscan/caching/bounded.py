"""Bounded, thread-safe cache."""

from __future__ import annotations

from typing import Generic, TypeVar

from .locks import ForkSafeLock

MOST = 4096

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V], Generic[K, V]):
    """A dictionary of bounded size for values that can be made again; threads may fill it."""

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self.most = most
        self.lock = ForkSafeLock()

    def keep(self, key: K, value: V) -> V:
        """Enter and return the value. When it is full, everything is forgotten first."""
        with self.lock:
            if len(self) >= self.most:
                self.clear()
            self[key] = value
        return value
