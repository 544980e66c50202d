"""Random states of the cache folder, and compilers with random faults, for `python tests/fuzz`.

All cases share one compiled kernel, that of a sum: compilers are shell scripts that copy it.
A second library, `planted`, stands for what another user left: it makes a file when it is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from processes import COMPILER

from assocscan import BackendError, associative_scan, ops
from assocscan.caching import cache_folder as disk_cache
from assocscan.caching import load_once as once
from assocscan.engines.base import fallback_warning as fallback
from assocscan.engines.cpu import compiler
from assocscan.engines.cpu import prepare as cpu
from assocscan.runtime import executable_cache as executables

OTHER_USER, STRANGER = 54321, 777
IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
X, SUM = torch.arange(5), [0, 1, 3, 6, 10]
PLANTED = """
#include <cstdio>
#include <cstdlib>
static __attribute__((constructor)) void mark() { std::fopen(std::getenv("MARK"), "w"); }
extern "C" int assocscan_run(const long long*) { return 0; }
"""


@dataclass(frozen=True)
class Material:
    """What the cases share."""

    folder: Path
    library: Path
    planted: bytes
    source: str
    level: tuple[str, ...]


@functools.cache
def open_folder() -> str | None:
    """A folder for temporary files that other users can enter; None if there is none."""
    for name in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        path = Path(name).resolve()
        if path.is_dir() and all(p.stat().st_mode & stat.S_IXOTH for p in (path, *path.parents)):
            return name
    return None


@functools.cache
def material() -> Material:
    """Compiled once, before the first case."""
    folder = Path(tempfile.mkdtemp(prefix="assocscan-fuzz-", dir=open_folder()))
    folder.chmod(0o711)
    owner = os.getpid()
    import atexit

    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    os.environ["ASSOCSCAN_CACHE_DIR"] = str(folder / "first")
    os.environ.pop("CXX", None)
    caught: list[tuple[str, bool]] = []
    load = cpu.load

    def noted(source: str, is_short: bool, what: str, for_few: bool) -> Any:
        caught.append((source, is_short))
        return load(source, is_short, what, for_few)

    reset()
    cpu.load = noted
    try:
        assert associative_scan(ops.sum, X, backend="cpu").tolist() == SUM
    finally:
        cpu.load = load
    (entry,) = (folder / "first").iterdir()
    library = folder / "kernel"
    content = disk_cache.read_entry(entry)
    assert content is not None
    library.write_bytes(content)
    (folder / "planted.cpp").write_text(PLANTED)
    command = [str(COMPILER), "-shared", "-fPIC", "-o", folder / "planted", folder / "planted.cpp"]
    subprocess.run(command, check=True)
    for name in ("kernel", "planted"):
        (folder / name).chmod(0o644)
    source, is_short = caught[0]
    level = compiler.SHORT if is_short else compiler.LONG
    return Material(folder, library, (folder / "planted").read_bytes(), source, level)


def reset() -> None:
    """Everything that is kept from call to call."""
    for cache in (
        compiler._LOADED, compiler._ONCE.failed, compiler._ONCE.locks, executables._PREPARED,
        ops.sum.calls, fallback._WARNED, disk_cache._TEMPORARY,
    ):  # fmt: skip
        cache.clear()  # type: ignore[attr-defined]
    for function in (disk_cache.chosen_folder, compiler.compiler_command,
                     compiler.compiler_version, compiler._fixed_key):  # fmt: skip
        function.cache_clear()
    tempfile.tempdir = None
    once.time = time


@contextlib.contextmanager
def workplace(rng: random.Random) -> Iterator[tuple[Path, int]]:
    """A folder for one case, and the user that the package runs as; for root often another one,
    unless other users can enter no folder for temporary files."""
    user = rng.choice([0, OTHER_USER]) if IS_ROOT else os.geteuid()
    user = user if open_folder() is not None else os.geteuid()
    here = Path(tempfile.mkdtemp(prefix="case-", dir=material().folder))
    here.chmod(0o755)
    (here / "tmp").mkdir(mode=0o700)
    umask, before = os.umask(0o022), os.getcwd()
    if IS_ROOT:
        for path in (here, here / "tmp"):
            os.chown(path, user, user)
    reset()
    os.environ |= {"TMPDIR": str(here / "tmp"), "MARK": str(here / "tmp/mark")}
    os.environ.pop("ASSOCSCAN_COMPILE_SECONDS", None)
    try:
        yield here, user
    finally:
        os.chdir(before)
        os.umask(umask)
        shutil.rmtree(here, ignore_errors=True)


@contextlib.contextmanager
def as_user(user: int) -> Iterator[None]:
    if not IS_ROOT or user == 0:
        yield
        return
    os.setresgid(user, user, 0)
    os.setresuid(user, user, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


def scan(backend: str) -> tuple[str, list[str]]:
    """How a scan ended ("right", "wrong" or the BackendError), and the warnings that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            right = associative_scan(ops.sum, X, backend=backend).tolist() == SUM
            said = "right" if right else "wrong"
        except BackendError as error:
            assert backend != "auto", error
            said = str(error)
    return said, [str(w.message) for w in caught]


# ---- Compilers ----

FINE = 'cp "$kernel" "$out"'
# $out is the library that is asked for, $kernel a good one, {n} a random number.
FAULTS = {
    "fails": "echo boom; exit {status}",
    "silent": ":",
    "garbage": 'head -c {n} /dev/urandom > "$out"',
    "empty": ': > "$out"',
    "half a library": 'head -c {n} "$kernel" > "$out"',
    "half a library and fails": 'head -c {n} "$kernel" > "$out"; exit 1',
    "a folder": 'mkdir "$out"',
    "a pipe": 'mkfifo "$out"',
    "a link": 'ln -s "$kernel" "$out"',
    "a dangling link": 'ln -s nowhere "$out"',
    "hangs": "sleep 5",
    "hangs behind another": "sleep 5 & wait",
    "not UTF-8": "printf 'boom \\377\\376\\200' >&2; exit 1",
    "much to say": "head -c 300000 /dev/zero | tr '\\0' x; exit 1",
    "killed": "kill -{signal} $$",
    "another library": 'cp "$planted" "$out"; false',
}
VERSIONS = {
    "fine": "echo fuzz 1.0",
    "silent": ":",
    "fails": "exit 1",
    "not UTF-8": "printf '\\377\\376'",
    "much to say": "head -c 40000 /dev/zero",
    "killed": "kill -9 $$",
}


def write_compiler(here: Path, body: str, version: str = VERSIONS["fine"]) -> Path:
    """A script that notes its calls in `log`."""
    shared = material()
    path = here / "compiler"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) {version}; exit;; esac\n'
        f'echo called >> "{here}/tmp/log"\n'
        f'kernel="{shared.library}" planted="{shared.folder}/planted"\n'
        f"for out; do :; done\n{body}\n"
    )
    path.chmod(0o755)
    os.environ["CXX"] = str(path)
    return path


def calls(here: Path) -> int:
    log = here / "tmp/log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def compiler_case(rng: random.Random) -> str:
    """A fault, then a compiler that works: `auto` is right at once, a named backend raises, nothing
    is compiled again before its time, and nothing stays behind."""
    shared = material()
    fault, version = rng.choice(list(FAULTS)), rng.choice(list(VERSIONS))
    with workplace(rng) as (here, user):
        size = shared.library.stat().st_size
        n = rng.randrange(1, size - 1)
        numbers = {"n": n, "status": rng.randrange(1, 255), "signal": rng.choice([6, 9, 11, 15])}
        body = FAULTS[fault]
        for name, value in numbers.items():
            body = body.replace(f"{{{name}}}", str(value))
        write_compiler(here, body, VERSIONS[version])
        os.environ["ASSOCSCAN_CACHE_DIR"] = str(here / "cache")
        if fault.startswith("hangs"):
            os.environ["ASSOCSCAN_COMPILE_SECONDS"] = "0.05"
        clock = [1000.0]
        once.time = type("clock", (), {"monotonic": staticmethod(lambda: clock[0])})
        with as_user(user):
            order = rng.sample(["auto", "cpu"], 2)
            for backend in order:
                said, warned = scan(backend)
                assert (said == "right") == (backend == "auto"), (fault, said)
                assert len(warned) == (backend == "auto"), warned
                assert "compiler" in said + "".join(warned) or "loaded" in said + "".join(warned)
            assert scan("auto") == ("right", [])
            # A busy machine may end a compiler that hangs before it wrote its line.
            tried = calls(here)
            assert tried == 1 or (fault.startswith("hangs") and tried == 0), (fault, tried)
            assert list((here / "cache").iterdir()) == []
            write_compiler(here, FINE, VERSIONS[version]) if not IS_ROOT or user == 0 else None
        if IS_ROOT and user:
            write_compiler(here, FINE, VERSIONS[version])
        with as_user(user):
            os.environ.pop("ASSOCSCAN_COMPILE_SECONDS", None)
            clock[0] += once.FIRST_WAIT + 1
            assert scan("cpu") == ("right", []), fault
            assert calls(here) == tried + 1 and len(list((here / "cache").iterdir())) == 1
        assert not (here / "tmp/mark").exists()
    return fault


# ---- The cache folder ----

FOLDER_MODES = [0o700] * 6 + [0o755, 0o711, 0o500, 0o555, 0o770, 0o720, 0o707, 0o777, 0o1777]
PARENT_MODES = [0o755] * 5 + [0o700, 0o775, 0o777, 0o1777]
FILE_MODES = [0o600] * 5 + [0o644, 0o400, 0o620, 0o602, 0o666, 0o777]
PLACES = ["folder"] * 6 + ["missing", "deep", "link", "dangling link", "loop", "file", "fifo"]
ENTRIES = [
    "whole", "whole", "whole", "missing", "truncated", "truncated", "flipped", "flipped", "longer",
    "empty", "noise", "unsealed", "folder", "full folder", "fifo", "link", "dangling link", "loop",
]  # fmt: skip
EVENTS = ["nothing"] * 5 + ["compiler removes the folder", "removed between"]
UMASKS = [0o022, 0o077, 0o000, 0o027, 0o777, 0o277]


def entry_content(rng: random.Random, kind: str) -> bytes:
    """The bytes of an entry; the library in it is the planted one."""
    planted = material().planted
    whole = planted + disk_cache.seal(planted)
    k = rng.randrange(len(whole))
    return {
        "truncated": whole[:k],
        "flipped": whole[:k] + bytes([whole[k] ^ (1 << rng.randrange(8))]) + whole[k + 1 :],
        "longer": whole + bytes(rng.randrange(1, 100)),
        "empty": b"",
        "noise": rng.randbytes(rng.randrange(1, 5000)),
        "unsealed": planted,
    }.get(kind, whole)


def make_entry(rng: random.Random, kind: str, path: Path, here: Path) -> None:
    elsewhere = here / "elsewhere"
    if kind == "missing":
        return
    if kind in ("folder", "full folder"):
        (path / "inner" if kind == "full folder" else path).mkdir(parents=True)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        elsewhere.write_bytes(entry_content(rng, "whole"))
        path.symlink_to(elsewhere)
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        path.write_bytes(entry_content(rng, kind))


def cache_case(rng: random.Random) -> str:
    """What the package may load and what not, by a model of who could write where."""
    shared = material()
    owners = [OTHER_USER, 0, STRANGER]
    with workplace(rng) as (here, user):
        write_compiler(here, FINE)
        parent, cache = here / "parent", here / "parent/cache"
        pick = lambda: rng.choice([user] * 6 + owners) if IS_ROOT else user  # noqa: E731
        place, event, umask = rng.choice(PLACES), rng.choice(EVENTS), rng.choice(UMASKS)
        entry, file_mode, file_owner = rng.choice(ENTRIES), rng.choice(FILE_MODES), pick()
        mode, owner = rng.choice(FOLDER_MODES), pick()
        parent_mode, parent_owner = rng.choice(PARENT_MODES), pick()
        if user == OTHER_USER and parent_owner != user:
            parent_mode |= 0o055  # or it is just not there for this user
        parent.mkdir()
        real, named = cache, cache
        if place == "deep":
            named = real = cache / "deeper"
        elif place == "link":
            real = here / "real"
            cache.symlink_to(real)
        elif place in ("dangling link", "loop"):
            cache.symlink_to({"loop": "cache", "dangling link": "nowhere"}[place])
        elif place == "file":
            cache.write_text("a file")
        elif place == "fifo":
            os.mkfifo(cache)
        exists = place in ("folder", "link")
        os.environ["ASSOCSCAN_CACHE_DIR"] = str(named)
        path = real / compiler.entry_name(shared.source, shared.level)
        if exists:
            real.mkdir()
            make_entry(rng, entry, path, here)
            if entry not in ("missing", "link", "dangling link", "loop"):
                path.chmod(file_mode)
            if IS_ROOT and entry != "missing":
                os.lchown(path, file_owner, file_owner)
            real.chmod(mode)
        if IS_ROOT:
            if exists:
                os.chown(real, owner, owner)
            if place in ("link", "dangling link", "loop"):
                os.lchown(cache, owner, owner)
            os.chown(parent, parent_owner, parent_owner)
        else:
            owner = parent_owner = file_owner = user
        parent.chmod(parent_mode)

        # The model.
        ours = (0, user)
        open_parent = bool(parent_mode & 0o002)
        bad_parent = open_parent and not parent_mode & 0o1000
        trusted = exists and not bad_parent and owner in ours and not mode & 0o022
        can_enter = user == 0 or bool(mode & (0o100 if owner == user else 0o001))
        can_read = user == 0 or bool(file_mode & (0o400 if file_owner == user else 0o004))
        used = (
            trusted and can_enter and entry == "whole" and can_read and file_owner in ours
            and not file_mode & 0o022
        )  # fmt: skip
        if exists:
            can_write = user == 0 or (owner == user and mode & 0o300 == 0o300)
            usable = trusted and can_write
        else:
            into_parent = user == 0 or (
                bool(parent_mode & 0o200) if parent_owner == user else open_parent
            )
            usable = place in ("missing", "deep") and not bad_parent and into_parent
        removable = not entry.endswith("folder") or file_owner == user
        if event == "compiler removes the folder" and usable and not used and removable:
            write_compiler(here, f'test -e "{here}/tmp/removed" || {{ touch "{here}/tmp/removed"; '
                           f'rm -rf "{real}"/*; rmdir "{real}"; }}; {FINE}')  # fmt: skip
            usable = place != "link"  # which then leads nowhere

        with as_user(user):
            os.umask(umask)
            said, warned = scan(rng.choice(["auto", "cpu"]))
            assert said == "right" or used, (said, warned)
            loaded = (here / "tmp/mark").exists()
            os.umask(0o022)
        assert loaded == used, (
            f"{place} {mode:o} of {owner}, {entry} {file_mode:o} of "
            f"{file_owner}, as {user}: loaded {loaded}, expected {used}"
        )
        if used:
            assert calls(here) == 0 and warned == []
            return f"{place}, {entry}: loaded"
        assert calls(here) >= 1
        assert len(warned) == (not usable), (warned, usable)
        kept = real if usable else next((here / "tmp").glob("assocscan-*"))
        aside = "old-" if entry.endswith("folder") and file_owner != user else "-"
        entries = [e for e in kept.iterdir() if not e.name.startswith(aside)]
        assert [e.name for e in entries] == [path.name], entries
        assert stat.S_IMODE(entries[0].lstat().st_mode) == 0o600
        if not exists or not usable:
            assert stat.S_IMODE(kept.stat().st_mode) == 0o700
        if event == "removed between" and usable and (user == 0 or parent_owner == user):
            shutil.rmtree(kept)
            reset()
            with as_user(user):
                again, warned = scan("cpu")
            expected = place != "link"  # which then leads nowhere
            assert again == "right" and len(warned) == (not expected), (again, warned)
        return f"{place}{f', {entry}' * exists}: {'compiled' if usable else 'another folder'}"
