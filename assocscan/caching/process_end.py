"""What is undone when this process ends: compilers that run, folders and files that are unfinished.

Python runs the callbacks of `atexit` while daemon threads still run, for instance the one that
compiles the C++ runner. What such a thread began after our callback would stay behind. So from then
on only the thread that ends the process can begin something; others get a BackendError.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

from ..errors import BackendError
from .fork_safe_locks import ForkSafeLock

T = TypeVar("T", bound=Hashable)

_LOCK = ForkSafeLock()
_UNDO: dict[Hashable, Callable[[], object]] = {}  # what was begun → what undoes it
_ENDING: list[int] = []  # the thread that ends this process, once it has begun to


def begin(make: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Call `make` and return its result. Unless `forget` is called with the result, `undo` is
    called with it when this process ends; what was begun last is undone first. A forked child
    undoes nothing of its parent's.

    make: takes a short time, because the end of the process waits for it.

    Raises BackendError if another thread is ending this process.
    """
    with _LOCK:
        if _ENDING and threading.get_ident() not in _ENDING:
            raise BackendError("this process is ending")
        made = make()
        _UNDO[made] = lambda: undo(made)
    return made


def forget(made: Hashable) -> None:
    """Do not undo this at the end of the process: it is finished, or undone already."""
    with _LOCK:
        _UNDO.pop(made, None)


def undo_all() -> None:
    """Undo all that was begun and not forgotten; what was begun last, first."""
    with _LOCK:
        _ENDING[:] = [threading.get_ident()]
        unfinished = list(_UNDO.items())
    for made, undo in reversed(unfinished):
        with contextlib.suppress(Exception):  # the others are undone nevertheless
            undo()
        forget(made)


def _forget_parent() -> None:
    _UNDO.clear()
    _ENDING.clear()


def _end_of_worker(_: object) -> None:
    """For a process of `multiprocessing`, as workers of a DataLoader are: if it was forked, it ends
    without the callbacks of `atexit` that its parent registered."""
    multiprocessing.util.Finalize(None, undo_all, exitpriority=0)


atexit.register(undo_all)
multiprocessing.util.register_after_fork(_LOCK, _end_of_worker)
if multiprocessing.parent_process() is not None:
    _end_of_worker(None)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
