"""Compiles the kernels of runs of the benchmarks before they are measured, in several processes.

Each process takes every n-th case of all runs and calls its contenders once; the kernels then lie
in the cache folders of assocscan and Triton. What cannot be compiled here is compiled, or fails, in
the run itself.
"""

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from assocscan.runtime.native import runner as native
from assocscan_bench import command
from assocscan_bench.cases import TORCH, Case, Contender
from assocscan_bench.suites import SUITES


def compile_all(context: Any, runs: list[str], count: int, until: float) -> None:
    """In so many processes, which are ended at that time of `time.monotonic`."""
    parts = [context.Process(target=compile_part, args=(runs, k, count)) for k in range(count)]
    for process in parts:
        process.start()
    for process in parts:
        process.join(max(0.0, until - time.monotonic()))
    late = [process for process in parts if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    if late:
        print(f"{len(late)} of {count} processes were ended before they had compiled all")


def compile_part(runs: list[str], part: int, count: int) -> None:
    """The C++ runner in the first process; then the cases of this part."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # compilers and peers print
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    if part == 0:
        command.prepare_runner(False)
    else:
        native.default = "python"
    jobs = [job for words in runs for job in cases_of(words)][part::count]
    # Peers that may end in illegal memory accesses come last: no call succeeds after one.
    for is_apart in (False, True):
        again = list(failed(jobs, is_apart))
        if again:  # the other processes may have taken the memory
            for _ in failed(again, is_apart):
                pass


def cases_of(words: str) -> list[Callable[[], Case]]:
    """The cases of the first suite, as the command makes them."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    given = parser.parse_intermixed_args(shlex.split(words))
    return list(SUITES[given.suites[0]](command.settings_of(given)))


def failed(jobs: Iterable[Callable[[], Case]], is_apart: bool) -> Iterable[Callable[[], Case]]:
    """The cases of which something did not run for want of memory."""
    for make in jobs:
        lacked_memory = False
        try:
            contenders = make().contenders.values()
        except torch.OutOfMemoryError:
            yield make
            continue
        for contender in contenders:
            if is_compiled(contender) and contender.apart == is_apart:
                lacked_memory |= not called(contender)
        del contenders
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if lacked_memory:
            yield make


def is_compiled(contender: Contender) -> bool:
    """Whether a call leaves kernels for other processes."""
    return contender.kind != TORCH and not contender.wall


def called(contender: Contender) -> bool:
    """Whether there was enough memory to call it."""
    try:
        contender.make()()
    except torch.OutOfMemoryError:
        return False
    except Exception as error:  # of any peer or compiler: its own run will say it again
        print(f"{type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return True
