"""Runs the CUDA engine's kernels on the CPU, every CUDA thread a fiber (`tests/emulator`).

`emulated()` puts the emulator in the launcher's place: the engine then takes CPU tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import platform
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from repository import TESTS

from assocscan import monoids
from assocscan.caching import cache_folder
from assocscan.cuda import launcher, workspace
from assocscan.cuda import prepare as scan
from assocscan.cuda.kernel import CudaKernel
from assocscan.cuda.newton import prepare as newton
from assocscan.cuda.source import headers
from assocscan.engines.cpu.compiler import compiler, compiler_version
from assocscan.runtime import backends as engines
from assocscan.runtime import executable_cache as executables
from assocscan.runtime import gpu_engine_choice

EMULATOR = TESTS / "emulator"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fwrapv", "-ffp-contract=off", "-w", "-fcf-protection=none")
SHARED = ("prelude.h", "machine.h", "machine.cpp")
PROCESSORS = 4


def why_unavailable() -> str | None:
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return "the emulator switches stacks of x86-64 Linux"
    return None if compiler() else "no C++ compiler"


class Emulated:
    """A compiled kernel; `seed` changes the order in which threads run, `clock_step` how much time
    passes between two looks at the clock."""

    seed = 1
    clock_step = 20
    blocks_per_processor = 1
    flags: tuple[str, ...] = ()
    launches: list[tuple[CudaKernel | None, int]] = []  # noqa: RUF012

    def __init__(self, library: Path, kernel: CudaKernel | None) -> None:
        self.library = ctypes.CDLL(str(library))
        self.kernel = kernel
        self.library.emulate.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p,
            ctypes.c_int, ctypes.c_char_p,
        ]  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        return int(self.library.shared_bytes())

    def launch(
        self, grid: int, parameters: bytes, given: Sequence[torch.Tensor], waits: bool
    ) -> None:
        assert len(parameters) == self.library.parameter_bytes()
        if self.kernel is not None:
            assert self.shared_bytes == self.kernel.shared_bytes
            check_alignments(self.kernel, given)
        ranges = []
        spaces = [space.memory for space in workspace._SPACES.values()]
        for t in (*given, *spaces):
            storage = t.untyped_storage()
            ranges += [storage.data_ptr(), storage.data_ptr() + storage.nbytes()]
        words = ctypes.create_string_buffer(1024)
        Emulated.launches.append((self.kernel, grid))
        failed = self.library.emulate(
            grid, parameters, Emulated.seed, Emulated.clock_step,
            (ctypes.c_uint64 * len(ranges))(*ranges), len(ranges) // 2, words,
        )  # fmt: skip
        if failed:
            raise AssertionError(f"emulated kernel: {words.value.decode()}")


def check_alignments(kernel: CudaKernel, given: Sequence[torch.Tensor]) -> None:
    """x86 loads from any address; a GPU ends the process where a load is wider than the alignment
    of its address. What is read beyond an input's last step is loaded as the input is."""
    leaves = {(role, k): leaf for role, k, leaf in kernel.leaves}
    names = [name for names in kernel.pointers() for name in names]
    names += [("offsets", 0)] if kernel.packed else []
    names += [("report", 0)] if kernel.newton is not None else []
    for (role, k), t in zip(names, given, strict=True):
        if role in ("offsets", "report"):
            continue
        widest = leaves["input" if role == "boundary" else role, k].align
        address = t.data_ptr()
        assert address % widest == 0, f"{role} {k} at {address:#x} is loaded by {widest} bytes"


def compile_with(*arguments: str) -> None:
    command = [str(compiler()), *FLAGS, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise AssertionError(f"{' '.join(command)}\n{run.stderr[-6000:]}")


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join([*texts, *FLAGS, compiler_version()]).encode()).hexdigest()[:32]


@functools.cache
def shared_by_kernels() -> Path:
    """A folder with what is compiled once for all kernels: the headers that they include, and the
    machine that runs them."""
    texts = {name: (EMULATOR / name).read_text() for name in SHARED}
    folder = cache_folder.cache_folder() / f"emulator-{digest(*texts.values())}"
    if not folder.exists():
        with cache_folder.build_folder() as name:
            for file, text in texts.items():
                (name / file).write_text(text)
            header, machine = name / "prelude.h", name / "machine.cpp"
            compile_with("-x", "c++-header", str(header), "-o", f"{header}.gch")
            compile_with("-c", str(machine), "-o", str(name / "machine.o"))
            with contextlib.suppress(OSError):  # another process was faster
                name.rename(folder)
    return folder


@functools.cache
def build(source: str, *flags: str) -> Path:
    """The kernel's library, from the cache folder or compiled."""
    texts = headers() | {f.name: f.read_text() for f in EMULATOR.iterdir()}
    unit = source + '#include "run.h"\n'
    name = f"{digest(unit, *texts.values(), *flags)}.so"
    found = cache_folder.find(name)
    if found is not None:
        return found
    shared = shared_by_kernels()
    with cache_folder.build_folder() as folder:
        for file, text in (texts | {"unit.cpp": unit}).items():
            if file not in SHARED:
                (folder / file).write_text(text)
        compile_with("-shared", "-include", str(shared / "prelude.h"), "-I", str(shared), *flags,
                     str(folder / "unit.cpp"), str(shared / "machine.o"),
                     "-o", str(folder / name))  # fmt: skip
        cache_folder.store(name, (folder / name).read_bytes())
    found = cache_folder.find(name)
    assert found is not None
    return found


def load(source: str, kernel: CudaKernel | None, device: torch.device) -> Any:
    return Emulated(build(source, *Emulated.flags), kernel)


@contextlib.contextmanager
def emulated(
    seed: int = 1, processors: int = PROCESSORS, flags: tuple[str, ...] = ()
) -> Iterator[type[Emulated]]:
    """Scans with backend="cuda" inside take CPU tensors. `flags` go to the compiler."""
    Emulated.seed, Emulated.flags = seed, flags
    Emulated.launches.clear()
    availability = engines.availability
    with contextlib.ExitStack() as stack:
        patch = lambda where, name, value: stack.enter_context(  # noqa: E731
            mock.patch.object(where, name, value)
        )
        patch(launcher, "load", load)
        patch(launcher, "has_bulk_copies", lambda device: True)
        for module in (scan, newton, gpu_engine_choice):
            patch(module, "processors", lambda device: processors)
        patch(scan, "shared_memory", lambda device: 227 << 10)
        patch(launcher, "memory_bandwidth", lambda device: 3.35e12)
        patch(launcher, "on", lambda device: contextlib.nullcontext())
        patch(engines, "availability", lambda: availability() | {"cuda": None})
        patch(engines, "why_not_here", lambda device, backend: None)
        forget()
        yield Emulated
    forget()


def forget() -> None:
    """What is known of earlier calls, with or without the emulator."""
    for known in monoids().values():
        known.calls.clear()
        known.reductions.clear()
    executables._PREPARED.clear()
    workspace._SPACES.clear()
