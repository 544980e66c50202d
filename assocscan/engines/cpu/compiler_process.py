"""The C++ compiler as a process: with a time limit, and ended where Python is interrupted.

Nothing here waits for the end of a pipe: a process that is forked meanwhile would keep it open.
That is why it is `posix_spawn` and not `subprocess`, which learns through a pipe whether a program
could be started.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ...errors import BackendError

# A kernel of `kernel.MAX_COST` takes two to three minutes on the build machine.
COMPILE_SECONDS = 300.0
VERSION_SECONDS = 10.0
PATIENCE = 5.0  # after it one line on stderr, once per process
VARIABLE = "ASSOCSCAN_COMPILE_SECONDS"
MAX_WORDS = 4000
MAX_PAUSE = 0.02  # between two looks at a process
PIPE_BYTES = 1 << 16

_TOLD: list[str] = []


def seconds_allowed() -> float:
    """How long one kernel may be compiled. Raises BackendError for a variable that is no number."""
    text = os.environ.get(VARIABLE, "").strip()
    try:
        seconds = float(text) if text else COMPILE_SECONDS
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise BackendError(f"{VARIABLE} is {text!r}, expected a number of seconds above 0")
    return seconds


def run_compiler(command: Sequence[str], folder: Path, what: str) -> None:
    """Run it; its temporary files go to `folder`. Raises BackendError, with its own words, where it
    does not end well."""
    seconds, compiler = seconds_allowed(), shlex.join(command[:1])
    words = folder / "words"
    words.touch()
    words.chmod(0o600)
    output = [(os.POSIX_SPAWN_OPEN, 1, str(words), os.O_WRONLY, 0), (os.POSIX_SPAWN_DUP2, 1, 2)]
    with Process() as process:
        try:
            process.start(command, {**os.environ, "TMPDIR": str(folder)}, output)
        except OSError as error:
            raise BackendError(f"the C++ compiler {compiler} cannot be started: {error}") from error
        code = process.wait(min(PATIENCE, seconds))
        if code is None and seconds > PATIENCE:
            announce(what, seconds)
            code = process.wait(seconds - PATIENCE)
        if code is None:
            raise BackendError(
                f"the C++ compiler {compiler} did not finish {what} within {seconds:g} seconds; "
                f"{VARIABLE} sets another limit"
            )
    if code != 0:
        raise BackendError(
            f"the C++ compiler {compiler} failed on {what} ({outcome(code)}):\n{last_words(words)}"
        )


class Process:
    """A program without input, whose files are for this user alone; it is killed, with what it
    started, where the block is left before it ends."""

    number: int | None = None
    code: int | None = None

    def __enter__(self) -> Process:
        return self

    def start(self, command: Sequence[str], environment: dict[str, str], output: list[Any]) -> None:
        shell = ("/bin/sh", "-c", 'umask 077; exec "$@"', "sh", *command)
        actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), *output]
        signals = [signal.SIGPIPE, signal.SIGINT]  # Python ignores one and handles the other
        with interrupt_afterwards():  # else its number is lost
            self.number = os.posix_spawn(
                shell[0], shell, environment, file_actions=actions, setpgroup=0, setsigdef=signals
            )

    def __exit__(self, *_: object) -> None:
        if self.number is not None and self.wait(0) is None:
            with contextlib.suppress(OSError):
                os.killpg(self.number, signal.SIGKILL)
            self.wait(math.inf)

    def wait(self, seconds: float) -> int | None:
        """The exit status, negative for a signal, if it ends within so many seconds, else None."""
        assert self.number is not None
        until, pause = time.monotonic() + seconds, 0.0005
        while self.code is None:
            try:
                found, status = os.waitpid(self.number, os.WNOHANG)
            except ChildProcessError:  # the program that uses us collects its children itself
                found, status = self.number, 0
            if found:
                self.code = os.waitstatus_to_exitcode(status)
                break
            rest = until - time.monotonic()
            if rest <= 0:
                break
            pause = min(2 * pause, MAX_PAUSE)
            time.sleep(min(pause, rest))
        return self.code


@contextlib.contextmanager
def interrupt_afterwards() -> Iterator[None]:
    """Postpone Ctrl-C to the end of the block; only the main thread is interrupted."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *received: pending.append(received))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            handler(*pending[0])


def announce(what: str, seconds: float) -> None:
    """Say, once per process, why nothing seems to happen."""
    if not _TOLD:
        _TOLD.append(what)
        text = (
            f"assocscan: compiling {what} takes longer than {PATIENCE:g} seconds; the result is "
            f"kept for later processes (the limit is {seconds:g} seconds, {VARIABLE})"
        )
        print(text, file=sys.stderr, flush=True)


def outcome(code: int) -> str:
    """How a process ended: `exit status 1`, or `killed by SIGSEGV`."""
    if code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def last_words(file: Path) -> str:
    """The end of what it printed, in whatever encoding, without the name of the build folder."""
    try:
        text = file.read_bytes().decode(errors="replace")
    except OSError:
        return ""
    return text.replace(f"{file.parent}{os.sep}", "").strip()[-MAX_WORDS:]


def version_line(command: Sequence[str]) -> str:
    """The first line that a compiler prints of itself; "unknown" where it does not."""
    reader, writer = os.pipe()
    output = [(os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_OPEN, 2, os.devnull, 1, 0)]
    try:
        with Process() as process:
            try:
                process.start([*command, "--version"], dict(os.environ), output)
            finally:
                os.close(writer)
            if process.wait(VERSION_SECONDS) is None:
                return "unknown"
        os.set_blocking(reader, False)
        lines = os.read(reader, PIPE_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return "unknown"
    finally:
        os.close(reader)
    return lines[0] if lines else "unknown"
