"""A process that checks and times one contender, case after case.

A kernel with an illegal memory access takes the CUDA context of its process with it: every later
call there fails. So peers that are known to do that are run here, and the suite goes on without
them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import torch
import torch.multiprocessing

from ..cases import Case
from ..settings import Settings

SECONDS = 300.0  # for one case: the first one compiles
MOST_LOST = 3  # processes: each takes some ten seconds to start
Measure = Callable[..., dict[str, Any]]


class OwnProcess:
    """Measures the contender `name`; started when it is needed, and again after it has ended, until
    MOST_LOST of them were lost."""

    def __init__(self, name: str, settings: Settings, measure: Measure) -> None:
        self.name, self.settings, self.measure = name, settings, measure
        self.process: Any = None
        self.lost = 0
        self.pipe: connection.Connection | None = None

    def start(self) -> connection.Connection:
        context: Any = torch.multiprocessing.get_context("spawn")
        ours: connection.Connection
        ours, theirs = context.Pipe()
        arguments = theirs, self.name, self.settings, self.measure
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.pipe = ours
        return ours

    def run(self, make: Callable[[], Case], copies: Any) -> dict[str, Any]:
        """What `measure` found of the contender of this case, or a note that says why nothing."""
        if self.lost >= MOST_LOST:
            return {"note": f"not run: {self.lost} processes of its own were lost before"}
        pipe = self.pipe or self.start()
        try:
            pipe.send((make, copies))
            if not pipe.poll(SECONDS):
                return {"note": self.ended(f"no answer in {SECONDS:.0f} seconds")}
            found, is_well = pipe.recv()
        except (EOFError, OSError):
            self.process.join(10)
            return {"note": self.ended(f"its process ended with status {self.process.exitcode}")}
        if not is_well:
            found["note"] = self.ended(found.get("note", "") + ", and its GPU context was lost")
        return dict(found)

    def ended(self, why: str) -> str:
        """The words; the next case gets a new process."""
        self.lost += 1
        self.close()
        return why

    def close(self) -> None:
        """End the process, if there is one."""
        if self.pipe is not None:
            self.pipe.close()
            self.process.kill()
            self.process.join()
        self.pipe = None


def serve(pipe: Any, name: str, settings: Settings, measure: Measure) -> None:
    """Measure until the pipe is closed, or until the device fails."""
    from .timing import Timer

    os.dup2(2, 1)  # compilers print, and standard output is for the records
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asked
    timer, is_well = Timer(settings), True
    while is_well:
        try:
            make, copies = pipe.recv()
        except EOFError:
            return
        try:
            case = make()
            found = measure(case, case.contenders[name], timer, copies)
        except Exception as error:  # of any peer or compiler
            found = {"note": said(error)}
            is_well = not settings.is_gpu or answers()
        pipe.send((found, is_well))


def answers() -> bool:
    """Whether the GPU still does what this process asks."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def said(error: Exception) -> str:
    """Type and first line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
