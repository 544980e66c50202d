"""The C++ runner in this process: whether it is used, and what it is told.

`call` runs a call that it knows, or returns MISS; it is None until the runner is loaded. The runner
is compiled in the background when the same call is made for the second time. ASSOCSCAN_RUNNER
chooses: "background" (the default), "wait" (the first call waits for it), "python" (never). A
program that must not be disturbed by a compiler in the background changes `default`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ...caching.fork_safe_locks import ForkSafeLock
from ...engines.base import forced_choices as overrides
from ...engines.base.commands import Tensors
from ...engines.base.executable import Executable
from ...engines.base.scan_spec import MaybeTensor
from ...errors import BackendError
from ...monoids.monoid import Monoid
from ...wording import warn
from . import build
from .programs import program_of

VARIABLE = "ASSOCSCAN_RUNNER"
MODES = ("background", "wait", "python")

default = MODES[0]  # where the variable is not set


class HotFunction:
    """A function of tensors, with all its other arguments, whose calls the runner may know.

    `call` takes it in the place of a Monoid. hot: the calls that it knows. calls: those that Python
    keeps, where Python keeps them by the function.
    """

    def __init__(self, calls: Any = None) -> None:
        self.hot: Any = None
        self.calls = calls


call: Callable[..., Any] | None = None
MISS: Any = object()
module: Any = None
why_not: str | None = None  # the reason why it is not used
_LOCK, _LOADING = ForkSafeLock(), ForkSafeLock()
_started: list[int] = []  # the process that compiles it, if one has begun


def mode() -> str:
    """What ASSOCSCAN_RUNNER says. Raises BackendError for a value that it cannot have."""
    named = os.environ.get(VARIABLE, "").strip() or default
    if named not in MODES:
        raise BackendError(f"{VARIABLE} is {named!r}, expected one of {', '.join(MODES)}")
    return named


def start(is_first: bool) -> None:
    """Load the runner, or begin to, if it is not there. is_first: nothing was repeated yet."""
    global why_not
    if module is not None or _started == [os.getpid()]:
        return
    try:
        chosen = mode()
    except BackendError as error:
        give_up(str(error))
        return
    if chosen == "python" or (chosen == "background" and is_first):
        return
    with _LOCK:
        if _started == [os.getpid()]:
            return
        _started[:] = [os.getpid()]
    if chosen == "wait":
        load()
        return
    try:
        threading.Thread(target=load, name="assocscan runner", daemon=True).start()
    except RuntimeError as error:  # no more threads, or Python is ending
        why_not = str(error)


def give_up(reason: str) -> None:
    """Stay in Python in this process, and say why once."""
    global why_not
    why_not = reason
    _started[:] = [os.getpid()]
    warn(f"repeated calls run in Python: {reason}")


def load() -> None:
    """Load the runner and use it from now on; where that fails, keep the reason."""
    global call, module, MISS, why_not
    with _LOADING:
        if module is not None:
            return
        try:
            loaded = build.load()
        except Exception as error:  # raised on a thread it would only be printed
            why_not = str(error) if isinstance(error, BackendError) else repr(error)
            return
        loaded.set_up(Monoid, HotFunction, BackendError)
        overrides.watchers.append(lambda: loaded.set_bypassed(overrides.generation != 0))
        loaded.set_bypassed(overrides.generation != 0)
        MISS, module = loaded.MISS, loaded
        call = loaded.call


def run(executable: Executable, tensors: Sequence[MaybeTensor]) -> tuple[Tensors, Tensors]:
    """The outputs and finals of an executable, run in C++ where possible."""
    program = None if module is None else program_of(module, executable)
    if program is not None:
        found: Any = module.run(program, tensors)
        if found is not MISS:
            count = len(executable.outputs)
            return found[:count], found[count:]
    return executable.run(tensors)
