"""The C++ runner in this process: the module that starts, asks and teaches it.

`call` runs a call that it knows, or returns MISS. The runner is compiled in the background when an
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


MISS: Any = object()  # the answer to a call that the runner does not know


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


def teach(
    calls: Calls, arguments: tuple[Any, ...], prepared: Any, in_python: Callable[..., Any]
) -> None:
    """Have the runner answer such a call (a `PreparedCall`) from now on, if its result is made of
    tuples.

    arguments: as `call` takes them. in_python: (gradient, node, saved, needed, cotangents) → the
    gradients, for backward passes that the runner does not know; `node` is for `keep_backward`.
    """
    executable, gradient = prepared.executable, prepared.gradient
    version = executable, executable.version
    if not prepared.answered or prepared.told == version:
        return
    prepared.told = version
    program = program_of(module, executable)
    if program is None:
        return
    numbers = prepared.put(prepared.returned)
    structure = structure_of(numbers)
    if structure is None:
        return
    node = None
    if gradient is not None:
        node = (gradient, in_python, tuple(gradient.reads), tuple(gradient.saved_results),
                tuple(gradient.integers), NODE)  # fmt: skip
    keep(calls, arguments, program, node, structure, tuple(numbers_of(numbers)))


def keep(
    calls: Calls, arguments: tuple[Any, ...], program: Any, node: tuple[Any, ...] | None,
    structure: Any, returned: tuple[int, ...],
) -> None:  # fmt: skip
    """Have the runner answer such a call by a program.

    node: None, or of the autograd node: the gradient, what runs it in Python, which tensors are
    saved, which results are saved, which have no derivative, the name. structure: 0 for a leaf, a
    tuple for a tuple. returned: the numbers of the results that are its leaves.
    """
    if calls.hot is None:
        calls.hot = module.new_calls()
    if module.keep(calls.hot, *arguments, program, node, structure, returned):
        calls.clear()  # the runner dropped all others, which have to be told again


def keep_backward(
    node: Any, needed: Sequence[bool], given: Sequence[MaybeTensor], program: Any,
    results: Sequence[int | None],
) -> None:  # fmt: skip
    """Have the runner run such a backward pass from now on, if `program` is one.

    given: the saved tensors and the cotangents, which the program takes. results: of each tensor,
    the number of the program's result that is its gradient; None where it has none.
    """
    if module is not None and program is not None:
        numbers = tuple([-1 if k is None else k for k in results])
        module.keep_backward(node, tuple(needed), tuple(given), program, numbers)
