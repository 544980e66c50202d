"""Bounded, thread-safe cache."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from .fork_safe_locks import ForkSafeLock

MOST = 4096
MOST_CALLS = 512  # the C++ runner has the same bound (`runner.cpp`)
_LOCK = ForkSafeLock()  # shared by all caches: a ForkSafeLock is never freed

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V], Generic[K, V]):
    """A dictionary of bounded size, for values that can be recomputed. Thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self.most = most

    def insert(self, key: K, value: V) -> V:
        """Insert the value and return it. If the cache is full, all entries are removed first."""
        with _LOCK:
            if len(self) >= self.most:
                self.clear()
            self[key] = value
        return value


class Calls(BoundedCache[Any, Any]):
    """The prepared calls of one function, by key (`runtime/prepared/prepared_call`).

    native: the cache of the C++ runner for the same function (`runtime/native`), with keys of its
        own; None while it is empty.
    """

    def __init__(self, most: int = MOST_CALLS) -> None:
        super().__init__(most)
        self.native: Any = None

    def clear(self) -> None:
        super().clear()
        self.native = None
