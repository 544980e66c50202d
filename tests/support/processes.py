"""Scripts in fresh processes with their own environment.

They are forked from one Python that has loaded torch and traced an operator, but has never asked
for a kernel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import assocscan

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")

SERVER = """
import json, os, shutil, signal, sys, tempfile, threading, time, traceback, warnings
from pathlib import Path
import pytest, torch
from assocscan import BackendError, FallbackWarning, associative_scan, ops

SUM, MAX = [0, 1, 3, 6, 10], [0, 1, 2, 3, 4]

def scan(op=ops.sum, **options):
    return associative_scan(op, torch.arange(5), **options).tolist()

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
warned = []
warnings.simplefilter("always")
warnings.showwarning = lambda message, category, *place: warned.append((category, str(message)))

def only_warning():
    assert [category for category, _ in warned] == [FallbackWarning], warned
    return warned[0][1]

def fork(check, environment={}, errors=None, seconds=60):
    process = os.fork()
    if process == 0:
        signal.alarm(seconds)
        os.environ.update(environment)
        tempfile.tempdir = None
        if errors:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        try:
            check()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return process

def wait(process):
    status = os.waitpid(process, 0)[1]
    assert status == 0, f"exit status {status}"

def execute(script):
    exec(script, globals() | {"CACHE": Path(os.environ["ASSOCSCAN_CACHE_DIR"])})

scan(backend="eager")
for line in sys.stdin:
    script, environment, errors = json.loads(line)
    process = fork(lambda: execute(script), environment, errors)
    print(os.waitpid(process, 0)[1], flush=True)
"""
Run = Callable[..., None]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("CXX", "PYTHONSAFEPATH")}
    options = {"cwd": Path(assocscan.__file__).parents[1], "env": inherited, "text": True}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SERVER], **options, **streams) as process:
        yield process


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def run(server: subprocess.Popen[str], cache: Path, tmp_path: Path) -> Run:
    """Runs a script in a new process, whose cache folder is new unless `environment` names one."""

    def run(script: str, **environment: object) -> None:
        given = {"ASSOCSCAN_CACHE_DIR": cache, "ASSOCSCAN_RUNNER": "python", **environment}
        errors = tmp_path / "errors"
        job = script, {name: str(value) for name, value in given.items()}, str(errors)
        print(json.dumps(job), file=server.stdin, flush=True)
        assert server.stdout is not None
        status = server.stdout.readline()
        assert status == "0\n", errors.read_text(encoding="utf-8") or f"exit status {status}"

    return run


def write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    """A compiler that logs its calls and fails."""
    return write_script(tmp_path / "failing", f"echo $* >> {tmp_path}/log; echo boom >&2; exit 1")


@pytest.fixture
def logging(tmp_path: Path) -> Path:
    """The compiler, with its calls logged; its version is $VERSION where that is set."""
    text = f"""echo "$*" >> {tmp_path}/log
case "$VERSION$*" in ?*--version) echo "$VERSION";; *) exec {COMPILER} "$@";; esac"""
    return write_script(tmp_path / "logging", text)


def compilations(folder: Path) -> int:
    """How often a logging compiler was called, but for its version."""
    lines = (folder / "log").read_text(encoding="utf-8").splitlines()
    return sum("--version" not in line for line in lines)


def libraries(cache: Path) -> list[str]:
    """The names of the cached kernels; nothing else may be there."""
    names = sorted(path.name for path in cache.iterdir())
    assert all(name.endswith(".so") for name in names), names
    return names
