"""C++ source → a loaded function, through the system's compiler and a cache on disk.

The cache is keyed by the source, the headers, the flags, the compiler's version and the CPU. A
library is written under a temporary name and renamed, so that concurrent processes and an
interrupt never leave a broken one behind.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import BackendError
from ..locks import ForkSafeLock
from ..user_code import warn
from .kernel import headers

FLAGS = (
    "-std=c++17", "-march=native", "-shared", "-fPIC", "-pthread", "-fwrapv",
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti",
)  # fmt: skip
# Long straight-line code gains nothing from what -O3 adds, which doubles the time that it takes to
# compile (GCC 12.2, MatrixLRU of size 8: 5.4 and 9 seconds forward and backward, 2.9 and 4; its
# scans of 64 × 4096 as fast). Rows of short operators are up to 1.3 times faster with -O3.
SHORT, LONG = ("-O3",), ("-O2", "-ftree-vectorize")
CANDIDATES = ("c++", "g++", "clang++")

_LOCK = ForkSafeLock()
_LOADED: dict[str, Callable[..., int]] = {}
_FAILED: dict[str, str] = {}


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
            return (found, *command[1:])
    return ()


def compiler() -> str | None:
    """The path of the C++ compiler, None where none was found."""
    command = compiler_command()
    return command[0] if command else None


@functools.cache
def compiler_version() -> str:
    """The first line that the compiler prints of itself."""
    if not compiler_command():
        return ""
    command = [*compiler_command(), "--version"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return run.stdout.splitlines()[0] if run.stdout else "unknown"


def why_unavailable() -> str | None:
    """Why generated C++ cannot run here; None where it can."""
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
    """What -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
        kept = [line for line in text.splitlines() if line.startswith(("flags", "model name"))]
        return "\n".join(kept)
    except OSError:
        return f"{platform.machine()} {platform.processor()}"


@functools.cache
def _fixed_key() -> str:
    parts = [*headers().values(), *compiler_command(), *FLAGS, compiler_version(), _cpu()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def cache_folder() -> Path:
    """$ASSOCSCAN_CACHE_DIR, or assocscan in the user's cache folder; a private temporary one,
    with one warning, where that cannot be written."""
    named = os.environ.get("ASSOCSCAN_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(named) if named else Path(base) / "assocscan"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="assocscan-"))
        atexit.register(_remove, temporary, os.getpid())
        warn(
            f"assocscan cannot write its cache folder {folder} ({error.strerror}); "
            f"kernels are compiled into {temporary} for this process only"
        )
        return temporary


def _remove(folder: Path, owner: int) -> None:
    """Clear away a temporary folder, unless this is a child of the process that made it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def load(source: str, is_short: bool = True) -> Callable[..., int]:
    """The function `assocscan_run` of this source, compiled unless the cache has it.

    `is_short` says with which flags it is optimised.

    Raises BackendError, with the compiler's own words, where it cannot be compiled.
    """
    known = _LOADED.get(source)
    if known is not None:
        return known
    with _LOCK:
        if source in _FAILED:
            raise BackendError(_FAILED[source])
        if source not in _LOADED:
            try:
                _LOADED[source] = _load(source, SHORT if is_short else LONG)
            except BackendError as error:
                _FAILED[source] = str(error)
                raise
        return _LOADED[source]


def _load(source: str, level: tuple[str, ...]) -> Callable[..., int]:
    key = hashlib.sha256("\0".join([_fixed_key(), *level, source]).encode()).hexdigest()[:32]
    library = cache_folder() / f"{key}.so"
    if not library.exists():
        _compile(source, level, library)
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError:  # damaged: compile it again
        _compile(source, level, library)
        try:
            loaded = ctypes.CDLL(str(library))
        except OSError as error:
            raise BackendError(f"a compiled kernel cannot be loaded: {error}") from error
    function: Callable[..., int] = loaded.assocscan_run
    function.argtypes = [ctypes.c_void_p]  # type: ignore[attr-defined]
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    return function


def _compile(source: str, level: tuple[str, ...], library: Path) -> None:
    reason = why_unavailable()
    if reason is not None:
        raise BackendError(f"the cpu backend cannot run: {reason}")
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as build:
        folder = Path(build)
        for name, text in headers().items():
            (folder / name).write_text(text, encoding="utf-8")
        unit = folder / "kernel.cpp"
        unit.write_text(source, encoding="utf-8")
        built = folder / library.name
        command = [*compiler_command(), *FLAGS, *level, str(unit), "-o", str(built)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            words = run.stderr.strip()[-4000:] if run.returncode != 0 else ""
            failed = run.returncode != 0
        except OSError as error:
            words, failed = str(error), True
        if failed:
            raise BackendError(
                f"the C++ compiler {shlex.join(compiler_command())} failed on a generated kernel:\n"
                f"{words}"
            )
        built.replace(library)
