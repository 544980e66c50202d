"""Runs the C++ compiler as a process with a time limit; it is killed if Python is interrupted.

It uses `posix_spawn`, because `subprocess` waits for the end of a pipe to learn whether the program
was started. If another thread forks at that moment, the child holds the pipe open and the wait does
not end. For the same reason nothing here waits for the end of a pipe.
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

from ...caching import process_end
from ...errors import BackendError

# A kernel of cost `kernel.MAX_COST` takes two to three minutes on the build machine.
COMPILE_SECONDS = 300.0
VERSION_SECONDS = 10.0
PATIENCE = 5.0  # seconds until a line on stderr says what takes so long
VARIABLE = "ASSOCSCAN_COMPILE_SECONDS"
MAX_CHARACTERS = 4000  # of the compiler's output in an error message
MAX_PAUSE = 0.02  # seconds between two checks whether a process has ended
PIPE_BYTES = 1 << 16


def seconds_allowed() -> float:
    """The time limit for one kernel. Raises BackendError if $ASSOCSCAN_COMPILE_SECONDS is wrong."""
    text = os.environ.get(VARIABLE, "").strip()
    try:
        seconds = float(text) if text else COMPILE_SECONDS
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise BackendError(f"{VARIABLE} is {text!r}, expected a number of seconds above 0")
    return seconds


def run_compiler(
    command: Sequence[str], folder: Path, what: str, seconds: float = 0.0, quiet: bool = False
) -> None:
    """Run this command, with temporary files in `folder`. Raises BackendError, with the compiler's
    messages, if it fails or takes too long.

    what: the name of the kernel in messages. seconds: the time limit; 0: `seconds_allowed`.
    quiet: print nothing where it takes long.
    """
    seconds, compiler = seconds or seconds_allowed(), shlex.join(command[:1])
    printed = folder / "printed"
    printed.touch()
    printed.chmod(0o600)
    output = [(os.POSIX_SPAWN_OPEN, 1, str(printed), os.O_WRONLY, 0), (os.POSIX_SPAWN_DUP2, 1, 2)]
    with Process() as process:
        try:
            process.start(command, {**os.environ, "TMPDIR": str(folder)}, output)
        except OSError as error:
            raise BackendError(f"the C++ compiler {compiler} cannot be started: {error}") from error
        code = process.wait(min(PATIENCE, seconds))
        if code is None and seconds > PATIENCE:
            if not quiet:
                announce(what, seconds)
            code = process.wait(seconds - PATIENCE)
        if code is None:
            raise BackendError(
                f"the C++ compiler {compiler} did not finish {what} within {seconds:g} seconds; "
                f"{VARIABLE} sets another limit"
            )
    if code != 0:
        raise BackendError(
            f"the C++ compiler {compiler} failed on {what} ({outcome(code)}):\n{last_text(printed)}"
        )


class Process:
    """A program with empty standard input. Files that it creates are readable by this user only. At
    the end of the `with` block, or of this process, it is killed, with all processes that it
    started, if it still runs.
    """

    pid: int | None = None
    code: int | None = None
    owner: int = 0

    def __enter__(self) -> Process:
        return self

    def start(self, command: Sequence[str], environment: dict[str, str], output: list[Any]) -> None:
        """Raises OSError if it cannot be started, BackendError if this process is ending."""
        shell = ("/bin/sh", "-c", 'umask 077; exec "$@"', "sh", *command)
        actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), *output]
        # Reset to the default: Python ignores SIGPIPE, which a child would inherit, and handles
        # SIGINT.
        signals = [signal.SIGPIPE, signal.SIGINT]
        self.owner = os.getpid()

        def spawned() -> Process:
            self.pid = os.posix_spawn(
                shell[0], shell, environment, file_actions=actions, setpgroup=0, setsigdef=signals
            )
            return self

        with interrupt_afterwards():  # else Ctrl-C could lose the process id
            process_end.begin(spawned, Process.kill)

    def __exit__(self, *_: object) -> None:
        self.kill()
        process_end.forget(self)

    def kill(self) -> None:
        """Kill it if it still runs. A forked child of this process leaves it alone."""
        if self.pid is not None and os.getpid() == self.owner and self.wait(0) is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait(math.inf)

    def wait(self, seconds: float) -> int | None:
        """The exit status (negative: minus the signal) if it ends within so many seconds, else
        None."""
        assert self.pid is not None
        until, pause = time.monotonic() + seconds, 0.0005
        while self.code is None:
            try:
                found, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the user's program has already waited for all its children
                found, status = self.pid, 0
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
    """Delay Ctrl-C to the end of the block. Only the main thread receives it."""
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
    """Print that a compilation takes long."""
    text = (
        f"assocscan: compiling {what} takes longer than {PATIENCE:g} seconds; the result is "
        f"kept for later processes (the limit is {seconds:g} seconds, {VARIABLE})"
    )
    print(text, file=sys.stderr, flush=True)


def outcome(code: int) -> str:
    """An exit status as text: `exit status 1`, or `killed by SIGSEGV`."""
    if code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def last_text(file: Path) -> str:
    """The last MAX_CHARACTERS of the compiler's output, without the name of the build folder."""
    try:
        text = file.read_bytes().decode(errors="replace")
    except OSError:
        return ""
    return text.replace(f"{file.parent}{os.sep}", "").strip()[-MAX_CHARACTERS:]


def version_line(command: Sequence[str]) -> str:
    """The first line that a compiler prints for --version; "unknown" if it prints none in time."""
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
