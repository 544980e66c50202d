"""The status words of the CUDA engine, on the CPU: every interleaving of a few blocks; threads."""

from __future__ import annotations

import platform
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from repository import TESTS

from assocscan.engines.cpu.compiler import compiler

PROGRAMS = TESTS / "protocol"
pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(
        (platform.machine(), platform.system()) != ("x86_64", "Linux"),
        reason="the programs are for x86-64 Linux",
    ),
]


def run(program: str, folder: Path, *flags: str) -> str:
    headers = files("assocscan.cuda")
    for name in ("status_and_watchdog.cuh", "wait_for_slots.cuh"):
        (folder / name).write_text(headers.joinpath(name).read_text(encoding="utf-8"))
    built = folder / "program"
    command = [str(compiler()), "-std=c++17", "-I", str(folder), str(PROGRAMS / program), "-o",
               built, *flags]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    done = subprocess.run([built], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("words,runs", [(1, 10171), (4, 29584)])
def test_every_interleaving(words: int, runs: int, tmp_path: Path) -> None:
    """Prefixes handed on are whole and right, stale tags are not taken, the epoch wraps, nobody
    waits forever; the counts say that the search did not end early."""
    said = run(
        "interleavings.cpp", tmp_path, "-O2", f"-DPAYLOAD_WORDS={words}", "-fcf-protection=none"
    )
    assert f"{runs} interleavings" in said


@pytest.mark.exhaustive
def test_threads_under_thread_sanitizer(tmp_path: Path) -> None:
    (tmp_path / "empty.cpp").write_text("int main() { return 0; }")
    sanitizer = ["-fsanitize=thread", "-mcx16"]
    empty = str(tmp_path / "empty")
    probe = [str(compiler()), *sanitizer, f"{empty}.cpp", "-o", empty, "-latomic"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("the compiler has no ThreadSanitizer or no libatomic")
    if subprocess.run([empty], capture_output=True, check=False).returncode:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    said = run("threads.cpp", tmp_path, "-O1", "-g", *sanitizer, "-latomic", "-pthread")
    assert said == "wrong: 0\n"
