"""`Once`: makes a value (a loaded kernel) once per key, thread-safe; failures are retried later.

Loaded kernels are never unloaded, because another thread or stream may still run their code.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..errors import BackendError

# A failure may be temporary (a full disk, no memory) or permanent (a kernel that cannot be
# compiled); the compiler's messages do not say which. So it is retried: first after FIRST_WAIT
# seconds, then after twice the last wait, and always after at least SHARE times the duration of the
# attempt, so that attempts take at most a tenth of the time.
FIRST_WAIT = 30.0
SHARE = 10.0

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class Failure:
    """A failed attempt: its message, the time from which the next one is allowed, and the wait
    between them, in seconds."""

    message: str
    due: float
    wait: float


class Once(Generic[K, V]):
    """Values that are made once per key. Threads that ask for a key wait while another thread makes
    its value; threads that ask for other keys do not wait. A forked child process starts without
    locks, because the thread that held one does not exist there."""

    def __init__(self, made: dict[K, V]) -> None:
        self.made = made
        self.failed: dict[K, Failure] = {}
        self.locks: dict[K, Any] = {}  # threading.RLock
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.locks.clear)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key; made by `make` at the first call.

        If `make` raised BackendError, the error is raised again without a new attempt until the
        wait is over.
        """
        value = self.made.get(key)
        if value is not None:
            return value
        with self.locks.setdefault(key, threading.RLock()):
            if key not in self.made:
                self.made[key] = self.attempt(key, make)
            return self.made[key]

    def attempt(self, key: K, make: Callable[[], V]) -> V:
        """Call `make`, unless the wait after a failure is not over."""
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
