"""The C++ runner in this process: the module that starts it, calls it and fills its caches.

`call` runs a registered call, or returns MISS. The runner is compiled in the background when an
executable runs for the second time. ASSOCSCAN_RUNNER
chooses: "background" (the default), "wait" (the first call waits for it), "python" (never). A
program that must not be disturbed by a compiler in the background changes `default`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ...caching.bounded import Calls
from ...caching.fork_safe_locks import ForkSafeLock
from ...engines.base import forced_choices as overrides
from ...engines.base.commands import Tensors
from ...engines.base.executable import Executable
from ...engines.base.scan_spec import MaybeTensor
from ...errors import BackendError
from ...monoids.monoid import Monoid
from ...wording import warn
from . import build
from .programs import numbers_of, program_of, structure_of

VARIABLE = "ASSOCSCAN_RUNNER"
MODES = ("background", "wait", "python")
NODE = "ScanBackward"  # the name of the runner's autograd node

default = MODES[0]  # where the variable is not set


MISS: Any = object()  # returned for a call that is not registered


def never(*arguments: Any) -> Any:
    """`call` while the runner is not there."""
    return MISS


call: Callable[..., Any] = never
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
    """Load the runner, or begin to, if it is not there. is_first: the executable that is about to
    run has not run before; in the mode 'background' the runner is then not loaded yet."""
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
    """Load the runner and use it from now on; where that fails, set `why_not`."""
    global call, module, why_not
    with _LOADING:
        if module is not None:
            return
        try:
            loaded = build.load()
        except Exception as error:  # raised on a thread it would only be printed
            why_not = str(error) if isinstance(error, BackendError) else repr(error)
            return
        loaded.set_up(Monoid, Calls, BackendError, MISS)
        overrides.watchers.append(lambda: loaded.set_bypassed(overrides.generation != 0))
        loaded.set_bypassed(overrides.generation != 0)
        module, call = loaded, loaded.call


def run(executable: Executable, tensors: Sequence[MaybeTensor]) -> tuple[Tensors, Tensors]:
    """The outputs and finals of an executable, run in C++ where possible."""
    if module is None:
        start(is_first=not executable.has_run)
        executable.has_run = True
    program = None if module is None else program_of(module, executable)
    if program is not None:
        found: Any = module.run(program, tensors)
        if found is not MISS:
            count = len(executable.outputs)
            return found[:count], found[count:]
    return executable.run(tensors)


def register(
    calls: Calls, arguments: tuple[Any, ...], prepared: Any, in_python: Callable[..., Any]
) -> None:
    """Insert a `PreparedCall` into the runner's cache, unless it is there. Results that are no
    tuples of tensors, and calls with a command for Python only, are left out.

    arguments: as `call` takes them. in_python: (gradient, native_gradient, saved, needed,
    cotangents) → the gradients, for backward passes without a program; `native_gradient` is for
    `insert_backward`.
    """
    executable, gradient = prepared.executable, prepared.gradient
    version = executable, executable.version
    if prepared.python_only or prepared.registered == version:
        return
    prepared.registered = version
    program = program_of(module, executable)
    if program is None:
        return
    numbers = prepared.put(prepared.returned)
    structure = structure_of(numbers)
    if structure is None:
        return
    described = None
    if gradient is not None:
        described = (gradient, in_python, tuple(gradient.reads), tuple(gradient.saved_results),
                     tuple(gradient.integers), NODE)  # fmt: skip
    insert_call(calls, arguments, program, described, structure, tuple(numbers_of(numbers)))


def insert_call(
    calls: Calls, arguments: tuple[Any, ...], program: Any, gradient: tuple[Any, ...] | None,
    structure: Any, returned: tuple[int, ...],
) -> None:  # fmt: skip
    """Insert a call and its program into the runner's cache.

    gradient: None, or a description: the `Differentiable`, the function that runs a backward pass
    in Python, which tensors are saved, which results are saved, which have no derivative, the name
    of the autograd node. structure: 0 for a leaf, a tuple for a tuple. returned: the numbers of the
    results that are its leaves.
    """
    if calls.native is None:
        calls.native = module.new_calls()
    if module.insert_call(calls.native, *arguments, program, gradient, structure, returned):
        calls.clear()  # the runner dropped all other calls, which have to be registered anew


def insert_backward(
    native_gradient: Any, needed: Sequence[bool], given: Sequence[MaybeTensor], program: Any,
    results: Sequence[int | None],
) -> None:  # fmt: skip
    """Insert a backward pass into the runner's cache, if `program` is one.

    native_gradient: the `Gradient` of the C++ nodes. given: the saved tensors and the cotangents,
    which the program takes. results: of each tensor, the number of the program's result that is its
    gradient; None where it has none.
    """
    if module is not None and program is not None:
        numbers = tuple([-1 if k is None else k for k in results])
        module.insert_backward(native_gradient, tuple(needed), tuple(given), program, numbers)
