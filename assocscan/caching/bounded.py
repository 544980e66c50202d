"""Bounded, thread-safe cache."""

from __future__ import annotations

from typing import Generic, TypeVar

from .fork_safe_locks import ForkSafeLock

MOST = 4096
_LOCK = ForkSafeLock()  # of all of them: each would be kept for as long as the process

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V], Generic[K, V]):
    """A dictionary of bounded size for values that can be made again; threads may fill it."""

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self.most = most

    def keep(self, key: K, value: V) -> V:
        """Enter and return the value. When it is full, everything is forgotten first."""
        with _LOCK:
            if len(self) >= self.most:
                self.clear()
            self[key] = value
        return value
