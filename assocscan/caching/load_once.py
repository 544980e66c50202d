"""Kernels, loaded once per key, whichever thread asks first; failures are tried again later.

Loaded kernels stay loaded, one per generated source: code that another thread or stream may still
run cannot be unloaded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..errors import BackendError

# A failure may be the machine's (a full disk, no memory) or the kernel's: the words of a compiler
# do not tell. So it is repeated, ever more rarely, and never for more than a tenth of the time.
FIRST_WAIT = 30.0
SHARE = 10.0

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class Failure:
    """The message of the last failure, when the next attempt is due, and after which wait."""

    message: str
    due: float
    wait: float


class Once(Generic[K, V]):
    """Values made once per key. Threads that ask for the same key wait for the one that makes it;
    others do not. In the child of a fork nothing is under way."""

    def __init__(self, made: dict[K, V]) -> None:
        self.made = made
        self.failed: dict[K, Failure] = {}
        self.locks: dict[K, Any] = {}  # threading.RLock
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.locks.clear)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, by `make` at the first time.

        A BackendError is raised again, without another attempt, until one is due.
        """
        known = self.made.get(key)
        if known is not None:
            return known
        with self.locks.setdefault(key, threading.RLock()):
            if key not in self.made:
                self.made[key] = self.attempt(key, make)
            return self.made[key]

    def attempt(self, key: K, make: Callable[[], V]) -> V:
        failure = self.failed.get(key)
        start = time.monotonic()
        if failure is not None and start < failure.due:
            raise BackendError(failure.message)
        try:
            value = make()
        except BackendError as error:
            end = time.monotonic()
            wait = max(FIRST_WAIT if failure is None else 2 * failure.wait, SHARE * (end - start))
            self.failed[key] = Failure(str(error), end + wait, wait)
            raise
        self.failed.pop(key, None)
        return value
