"""Bounded, thread-safe cache."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from .fork_safe_locks import ForkSafeLock

MOST = 4096
MOST_CALLS = 512  # as many as the C++ runner keeps (`runner.cpp`)
_LOCK = ForkSafeLock()  # shared by all caches: a ForkSafeLock is never freed

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V], Generic[K, V]):
    """A dictionary of bounded size, for values that can be computed again. Thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self.most = most

    def keep(self, key: K, value: V) -> V:
        """Enter the value and return it. If the cache is full, all entries are removed first."""
        with _LOCK:
            if len(self) >= self.most:
                self.clear()
            self[key] = value
        return value


class Calls(BoundedCache[Any, Any]):
    """The kept calls of one function, by key.

    hot: those that the C++ runner keeps (`runtime/native`), by keys of its own.
    """

    def __init__(self, most: int = MOST_CALLS) -> None:
        super().__init__(most)
        self.hot: Any = None

    def clear(self) -> None:
        super().clear()
        self.hot = None
