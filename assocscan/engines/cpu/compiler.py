"""Compiles C++ source with the system's compiler, or takes it from the cache folder, and loads it.

The cache is keyed by the source, the headers, the flags, the compiler's version and the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from ...caching import cache_folder as disk_cache
from ...caching.load_once import Once
from ...caching.trusted_files import read_regular
from ...errors import BackendError
from .compiler_process import run_compiler, version_line
from .kernel import headers

FLAGS = (
    "-std=c++17", "-march=native", "-shared", "-fPIC", "-pthread", "-fwrapv",
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti",
)  # fmt: skip
# Long operators are compiled with -O2: -O3 doubles the time to compile them (GCC 12.2, MatrixLRU of
# size 8: forward 5.4 seconds in place of 2.9, backward 9 in place of 4), and their scans are not
# faster (measured on 64 × 4096). For few elements they are compiled with -O1: most of the time goes
# into loops over many lanes, which then hardly run (the states of a filter of order 8: 38 seconds
# with -O2, 2.2 with -O1). -DFOR_FEW tells the source that -O1 is used.
SHORT, LONG, LONG_FOR_FEW = ("-O3",), ("-O2", "-ftree-vectorize"), ("-O1", "-DFOR_FEW")
# The names of the lines of /proc/cpuinfo that tell what -march=native means: on x86, ARM (whose
# cores may differ), RISC-V, s390x and POWER.
CPU = frozenset(
    (
        "flags", "model name", "Features", "CPU implementer", "CPU architecture", "CPU variant",
        "CPU part", "isa", "uarch", "features", "cpu",
    )
)  # fmt: skip
CANDIDATES = ("c++", "g++", "clang++")
ENTRY = "assocscan_run"
ATTEMPTS = 3  # if another process removes the cache folder while a compiler writes into it

Run = Callable[..., int]
_LOADED: dict[str, Run] = {}
_ONCE = Once(_LOADED)


@functools.cache
def compiler_command() -> tuple[str, ...]:
    """The C++ compiler and its own arguments: $CXX, or the first of c++, g++, clang++ found."""
    named = os.environ.get("CXX", "").strip()
    try:
        wanted = [shlex.split(named)] if named else [[c] for c in CANDIDATES]
    except ValueError:  # an unbalanced quote
        return ()
    for command in wanted:
        found = shutil.which(command[0])
        if found:
            return (os.path.abspath(found), *command[1:])
    return ()


def compiler() -> str | None:
    """The path of the C++ compiler, None where none was found."""
    command = compiler_command()
    return command[0] if command else None


@functools.cache
def compiler_version() -> str:
    """The first line that the compiler prints for --version."""
    command = compiler_command()
    return version_line(command) if command else ""


def why_unavailable() -> str | None:
    """The reason why generated C++ cannot run on this machine; None where it can."""
    if platform.system() == "Windows":
        return "the C++ engine has not been built for Windows"
    if compiler() is None:
        wanted = os.environ.get("CXX") or ", ".join(CANDIDATES)
        return (
            f"no C++ compiler was found (looked for {wanted}); install one "
            "(Debian: apt-get install g++) or set CXX"
        )
    return None


@functools.cache
def _cpu() -> str:
    """A description of the CPU: the meaning of -march=native depends on it."""
    try:
        found = description(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = ""
    return found or f"{platform.machine()} {platform.processor()}"


def description(cpuinfo: str) -> str:
    """The distinct lines, of a text in the format of /proc/cpuinfo, whose name is in `CPU`."""
    lines = dict.fromkeys(cpuinfo.splitlines())
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in CPU)


@functools.cache
def _fixed_key() -> str:
    parts = [*headers().values(), *compiler_command(), *FLAGS, compiler_version(), _cpu()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def load(source: str, is_short: bool = True, what: str = "a kernel", for_few: bool = False) -> Run:
    """The function `assocscan_run` of this source, compiled unless the cache has it.

    is_short: compile with SHORT; else with LONG, or LONG_FOR_FEW where it is `for_few` elements or
        for an operator so long that LONG takes minutes.
    what: the name of the kernel in messages.

    Raises BackendError, with the compiler's messages, if it cannot be compiled.
    """
    level = SHORT if is_short else LONG_FOR_FEW if for_few else LONG
    return _ONCE.get("\0".join([*level, source]), lambda: _load(source, level, what))


def entry_name(source: str, level: tuple[str, ...]) -> str:
    """The file name of the library of this source in the cache folder."""
    key = hashlib.sha256("\0".join([_fixed_key(), *level, source]).encode()).hexdigest()[:32]
    return f"{key}.so"


def _load(source: str, level: tuple[str, ...], what: str) -> Run:
    name = entry_name(source, level)
    known = disk_cache.find(name)
    if known is not None:
        try:
            return opened(known)
        except BackendError:  # made by another system that shares the folder: compile it again
            pass
    return _compile(source, level, name, what)


def opened(library: Path) -> Run:
    """The function `assocscan_run` of a library. Raises BackendError if it cannot be loaded."""
    try:
        function: Run = getattr(ctypes.CDLL(str(library)), ENTRY)
    except (OSError, AttributeError) as error:
        said = str(error).replace(f"{library.parent}{os.sep}", "")
        raise BackendError(f"a compiled kernel cannot be loaded: {said}") from error
    function.argtypes = [ctypes.c_void_p]  # type: ignore[attr-defined]
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    return function


def _compile(source: str, level: tuple[str, ...], name: str, what: str) -> Run:
    reason = why_unavailable()
    if reason is not None:
        raise BackendError(f"the cpu backend cannot run: {reason}")
    for attempt in range(1, ATTEMPTS + 1):
        with disk_cache.build_folder() as folder:
            try:
                content = build(source, level, folder, name, what)
                function = opened(folder / name)
                break
            except (OSError, BackendError) as error:
                removed = not folder.is_dir()
                if not removed or attempt == ATTEMPTS:
                    if isinstance(error, BackendError):
                        raise
                    said = error.strerror or str(error)
                    raise BackendError(
                        f"{what} cannot be compiled in {folder.parent}: {said}"
                    ) from error
    disk_cache.store(name, content)
    return function


def build(source: str, level: tuple[str, ...], folder: Path, name: str, what: str) -> bytes:
    """Compile the source to the file `name` in the folder, and return the file's content."""
    for file, text in {**headers(), "kernel.cpp": source}.items():
        path = folder / file
        path.touch(0o600)
        path.chmod(0o600)  # with any umask: the compiler must be able to read it
        path.write_text(text, encoding="utf-8")
    built = folder / name
    command = [*compiler_command(), *FLAGS, *level, str(folder / "kernel.cpp"), "-o", str(built)]
    run_compiler(command, folder, what)
    content = read_regular(built)
    if content is None or is_cut_short(content):
        wrote = "no library" if content is None else f"an incomplete one of {len(content)} bytes"
        raise BackendError(
            f"the C++ compiler {shlex.join(compiler_command())} ended without an error, but wrote "
            f"{wrote}"
        )
    return content


def is_cut_short(content: bytes) -> bool:
    """Whether a library is incomplete: an ELF file that ends before the end of its table of
    sections, which linkers write last. Loading it would kill the process (SIGBUS). In
    other formats only an empty file is recognised; the loader has to detect the rest."""
    if not content.startswith(b"\x7fELF"):
        return not content
    if len(content) < 64:
        return True
    order = "<" if content[5] == 1 else ">"
    offset, word, counts = (40, "Q", 58) if content[4] == 2 else (32, "I", 46)  # 64 or 32 bits
    (start,) = struct.unpack_from(order + word, content, offset)
    size, count = struct.unpack_from(order + "HH", content, counts)
    return bool(start + size * count > len(content))
