"""Locks that are reset in a forked child process, where the thread that held one does not exist."""

from __future__ import annotations

import os
import threading
from types import TracebackType


class ForkSafeLock:
    """A re-entrant lock that is replaced by a new one in a forked child process."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._lock.release()
