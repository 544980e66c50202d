"""Four processes joined by gloo, which run functions of test modules as the ranks of a group.

`World.run(function, size, …)` runs a module's function on the first `size` ranks, each with a
`Rank` as its first argument. They are forked, once for all tests of a pytest process, from one
Python that has imported torch: that import is what costs seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from repository import BENCH, ROOT, SUPPORT

SIZE = 4
SECONDS = int(
    os.environ.get("ASSOCSCAN_TEST_SECONDS", "240")
)  # for one function, on a busy machine
SECONDS_AFTER_ERROR = 10.0  # for the other ranks, when one has failed


@dataclass(frozen=True)
class Rank:
    """What a function that runs on a rank is given."""

    group: Any
    rank: int
    size: int

    def part(self, tree: Any, lengths: Sequence[int], axis: int = 0) -> Any:
        """This rank's part of every tensor of a tree that `lengths` cut along the axis."""
        from assocscan.pytrees import tree_map

        start = sum(lengths[: self.rank])
        return tree_map(lambda t: t.narrow(axis, start, lengths[self.rank]), tree)


class World:
    """The processes, as the tests see them."""

    def __init__(self) -> None:
        known = os.environ.get("PYTHONPATH", "")
        paths = [str(ROOT), str(BENCH), str(SUPPORT), known]
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )  # fmt: skip

    def run(self, function: Callable[..., None], size: int, *arguments: Any) -> None:
        """Run the function on `size` ranks. Raises AssertionError with the tracebacks of ranks."""
        module = sys.modules[function.__module__]
        job = str(module.__file__), function.__name__, size, arguments
        assert self.process.stdin is not None and self.process.stdout is not None
        pickle.dump(job, self.process.stdin)
        self.process.stdin.flush()
        errors = pickle.load(self.process.stdout)
        assert not errors, "\n".join(errors)

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait(timeout=SECONDS)
        self.process.stdout.close()  # type: ignore[union-attr]


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    import torch

    if not (torch.distributed.is_available() and hasattr(os, "fork")):
        pytest.skip("needs torch.distributed, and processes that can be forked")
    made = World()
    yield made
    made.close()


# ---- In the other processes ----


def serve() -> None:
    """Hand every job to the ranks, and give back the tracebacks of those that failed."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what tests print must not be read as a result
    prepare()
    processes: dict[int, Any] = {}  # their pipes by their ids, in the order of ranks
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EOFError):
        for number in itertools.count():
            job = pickle.load(sys.stdin.buffer)
            if not processes:
                processes = start(f"{folder}/store{number}", out)
            errors = answers(list(processes.values())[: job[2]], job)
            pickle.dump(errors, out)
            out.flush()
            if errors:  # ranks may wait for one another: the next job gets new ones
                end(processes)
    end(processes)


def start(store: str, out: Any) -> dict[int, Any]:
    """Fork the ranks."""
    processes: dict[int, Any] = {}
    for rank in range(SIZE):
        ours, theirs = Pipe()
        process = os.fork()
        if process == 0:
            for other in (*processes.values(), ours, out, sys.stdin):
                other.close()
            with contextlib.suppress(EOFError, KeyboardInterrupt):
                be_rank(rank, store, theirs)
            os._exit(0)
        theirs.close()
        processes[process] = ours
    return processes


def end(processes: dict[int, Any]) -> None:
    """End the ranks, whatever they wait for."""
    for process, pipe in processes.items():
        pipe.close()
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    processes.clear()


def answers(pipes: Sequence[Any], job: Any) -> list[str]:
    """The tracebacks of the ranks that fail. The others get a few seconds more then."""
    for pipe in pipes:
        pipe.send(job)
    errors, waiting, seconds = [], list(pipes), float(SECONDS)
    while waiting:
        ready = wait(waiting, seconds)
        if not ready:
            ranks = [k for k, pipe in enumerate(pipes) if pipe in waiting]
            return [*errors, f"no answer of ranks {ranks}"]
        for pipe in ready:
            waiting.remove(pipe)
            try:
                error = pipe.recv()
            except EOFError:
                error = f"rank {pipes.index(pipe)} has ended"
            if error:
                errors.append(error)
                seconds = SECONDS_AFTER_ERROR
    return errors


def prepare() -> None:
    """Everything that is slow and can be inherited."""
    import warnings

    import torch
    import torch.distributed

    import assocscan.distributed
    from assocscan.engines.cpu import compiler

    torch.set_num_threads(1)
    compiler.SHORT = compiler.LONG = compiler.LONG_FOR_FEW = ("-O0",)
    warnings.simplefilter("error", assocscan.FallbackWarning)


def be_rank(rank: int, store: str, pipe: Any) -> None:
    """Join the group, and run functions until the pipe is closed."""
    import datetime

    import torch.distributed as dist

    signal.alarm(SECONDS)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, SIZE), rank=rank, world_size=SIZE,
        timeout=datetime.timedelta(seconds=SECONDS),
    )  # fmt: skip
    groups = {size: dist.new_group(list(range(size))) for size in range(1, SIZE)}
    groups[SIZE] = dist.group.WORLD
    signal.alarm(0)
    modules: dict[str, Any] = {}
    while True:
        path, name, size, arguments = pipe.recv()
        signal.alarm(SECONDS)
        faulthandler.dump_traceback_later(SECONDS * 0.9)
        try:
            if path not in modules:
                modules[path] = load(path)
            getattr(modules[path], name)(Rank(groups[size], rank, size), *arguments)
            pipe.send("")
        except BaseException:
            pipe.send(f"rank {rank} of {size}:\n{traceback.format_exc()}")
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"ranks_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    serve()
