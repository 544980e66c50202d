"""The C++ runner in this process: whether it is used, and what it is told.

`call` runs a call that it knows, or returns MISS; it is None until the runner is loaded. The runner
is compiled in the background when the same call is made for the second time. ASSOCSCAN_RUNNER
chooses: "background" (the default), "wait" (the first call waits for it), "python" (never).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ...caching.fork_safe_locks import ForkSafeLock
from ...engines.base import forced_choices as overrides
from ...engines.base.executable import Executable, Tensors
from ...engines.base.scan_spec import MaybeTensor
from ...errors import BackendError
from ...monoids.monoid import Monoid
from . import build
from .programs import program_of

VARIABLE = "ASSOCSCAN_RUNNER"
MODES = ("background", "wait", "python")

call: Callable[..., Any] | None = None
MISS: Any = object()
module: Any = None
why_not: str | None = None  # the reason why it is not used
_LOCK = ForkSafeLock()
_started: list[int] = []  # the process that compiles it, if one has begun


def mode() -> str:
    """What ASSOCSCAN_RUNNER says. Raises BackendError for a value that it cannot have."""
    named = os.environ.get(VARIABLE, "").strip() or MODES[0]
    if named not in MODES:
        raise BackendError(f"{VARIABLE} is {named!r}, expected one of {', '.join(MODES)}")
    return named


def start(is_first: bool) -> None:
    """Load the runner, or begin to, if it is not there. is_first: nothing was repeated yet."""
    if module is not None or _started == [os.getpid()]:
        return
    chosen = mode()
    if chosen == "python" or (chosen == "background" and is_first):
        return
    with _LOCK:
        if _started == [os.getpid()]:
            return
        _started[:] = [os.getpid()]
    if chosen == "wait":
        load()
    else:
        threading.Thread(target=load, name="assocscan runner", daemon=True).start()


def load() -> None:
    """Load the runner and use it from now on; where that fails, keep the reason."""
    global call, module, MISS, why_not
    try:
        loaded = build.load()
    except BackendError as error:
        why_not = str(error)
        return
    loaded.set_up(Monoid)
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
