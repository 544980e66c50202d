"""The cache folder: a store on disk for compiled kernels, shared by processes.

An entry is one file: the stored bytes, then the seal (their length and checksum). It is written
under a temporary name, synchronised and renamed, so that an interrupt or a power cut cannot leave
an incomplete entry. An entry that is damaged later fails the checksum and is compiled again.
Entries and folders that other users could have written are not used (`trusted_files`). If the
folder cannot be used, a private temporary folder is used instead, with one warning.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ..errors import BackendError
from ..wording import warn
from . import process_end
from .fork_safe_locks import ForkSafeLock
from .trusted_files import read_regular, why_untrusted

if sys.platform != "win32":
    import fcntl

T = TypeVar("T")

_MAGIC = b"assocscan 1\n"
_LENGTH = 8
_SEAL = len(_MAGIC) + _LENGTH + hashlib.sha256().digest_size

BUILD = "build-"  # how the names of build folders begin
MARK = "assocscan.lock"  # a file in each of them, locked while its process lives

_LOCK = ForkSafeLock()
_TEMPORARY: list[Path] = []  # this process's temporary folder: at most one entry


@functools.cache
def chosen_folder() -> Path:
    """$ASSOCSCAN_CACHE_DIR, or assocscan in the user's cache folder, as an absolute path.

    Computed once, so that a relative path means the same folder after os.chdir. Raises OSError if
    there is neither.
    """
    named = os.environ.get("ASSOCSCAN_CACHE_DIR")
    if named:
        return Path.cwd() / named
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "assocscan"
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise OSError("this user has no home folder")
    return Path(home) / ".cache" / "assocscan"


def why_unusable() -> str | None:
    """The reason why the chosen folder cannot be used; None if it can. Creates a missing folder."""
    try:
        folder = chosen_folder()
        make_private(folder)
        reason = why_untrusted(folder)
        if reason is None:
            tempfile.TemporaryFile(dir=folder).close()
        return reason
    except OSError as error:
        return said(error)


def said(error: OSError) -> str:
    """The system's message, without the random name of a temporary file."""
    return error.strerror or str(error)


def cache_folder() -> Path:
    """The folder for new entries. Raises BackendError if neither the chosen folder nor a temporary
    one can be used."""
    reason = why_unusable()
    return chosen_folder() if reason is None else temporary_folder(reason)


def in_cache_folder(action: Callable[[Path], T]) -> T:
    """The result of `action` in the chosen folder, tried again if another process removes that
    folder meanwhile; else in a temporary folder. Raises BackendError if neither can be used."""
    reason = None
    for _ in range(2):
        reason = why_unusable()
        if reason is not None:
            break
        try:
            return action(chosen_folder())
        except FileNotFoundError as error:
            reason = said(error)
        except OSError as error:
            reason = said(error)
            break
    assert reason is not None
    folder = temporary_folder(reason)
    try:
        return action(folder)
    except OSError as error:
        raise BackendError(f"nothing can be written to {folder}: {said(error)}") from error


def make_private(folder: Path) -> None:
    """Create a folder, and its missing parents, with access for this user only (with any umask)."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_private(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # another process was faster, or it is a file
        return
    folder.chmod(0o700)


def temporary_folder(reason: str) -> Path:
    """A private folder of this process, used instead of the chosen folder. `reason` is for the
    warning."""
    with _LOCK:
        is_new = not _TEMPORARY
        if is_new or not _TEMPORARY[0].is_dir():
            _TEMPORARY[:] = [private_folder(reason)]
        folder = _TEMPORARY[0]
    if is_new:
        with contextlib.suppress(OSError):
            reason = f"{chosen_folder()}: {reason}"
        warn(
            f"assocscan cannot use its cache folder ({reason}); kernels are compiled into {folder} "
            "for this process only"
        )
    return folder


def private_folder(reason: str) -> Path:
    """A new folder in the system's temporary folder. Raises BackendError if it cannot be created or
    other users could write to it."""
    try:
        folder = process_end.begin(
            lambda: Path(tempfile.mkdtemp(prefix="assocscan-")).absolute(), remove
        )
        folder.chmod(0o700)
        untrusted = why_untrusted(folder)
    except OSError as error:
        untrusted = said(error)
    else:
        if untrusted is None:
            return folder
        remove(folder)
        process_end.forget(folder)
    raise BackendError(
        f"there is no folder to compile kernels in: the cache folder cannot be used ({reason}), "
        f"nor can a temporary one ({untrusted}); set ASSOCSCAN_CACHE_DIR to a folder of your own"
    )


def remove(folder: Path) -> None:
    """Remove a folder, as far as possible; again if a thread or a killed compiler was just writing
    a file into it."""
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break


@contextlib.contextmanager
def build_folder() -> Iterator[Path]:
    """A new private folder, removed at the end of the block or of this process. Raises BackendError
    if none can be created. Build folders that killed processes left are removed first.

    tempfile.TemporaryDirectory is not used: a child that is forked meanwhile would remove the
    folder when it ends.
    """

    def make(parent: Path) -> Path:
        remove_abandoned(parent)
        made = process_end.begin(lambda: Path(tempfile.mkdtemp(prefix=BUILD, dir=parent)), remove)
        made.chmod(0o700)
        return made

    folder = in_cache_folder(make)
    handle = None
    try:
        handle = mark(folder)
        yield folder
    finally:
        remove(folder)
        process_end.forget(folder)
        if handle is not None:
            os.close(handle)


def mark(folder: Path) -> int | None:
    """Put a locked file MARK into a build folder, and return its handle, to be closed when the
    folder is removed; None where files cannot be locked. The system unlocks it when this process
    ends, in any way. It gets its name once it is locked, so that no other process locks it first.
    """
    if sys.platform == "win32":
        return None
    handle = None
    try:
        handle = os.open(folder / "unlocked", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(handle, 0o600)  # with any umask
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(folder / "unlocked", folder / MARK)
    except OSError:
        if handle is not None:
            os.close(handle)
        return None
    return handle


def remove_abandoned(parent: Path) -> None:
    """Remove the build folders of processes that do not live any more. Folders without MARK stay:
    they may be the user's own, since any folder can be chosen as the cache folder."""
    if sys.platform == "win32":
        return
    for folder in parent.glob(f"{BUILD}*"):
        with contextlib.suppress(OSError):  # it has no MARK, or its process lives
            handle = os.open(folder / MARK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(folder)
            finally:
                os.close(handle)


def find(name: str) -> Path | None:
    """The path of an entry that is complete and that only this user or root can have written; None
    if there is none. The file ends with the seal, which loaders of shared libraries ignore."""
    for folder in _readable():
        if read_entry(folder / name) is not None:
            return folder / name
    return None


def read(name: str) -> bytes | None:
    """The bytes that were stored under a name; None if there are none that can be trusted."""
    for folder in _readable():
        content = read_entry(folder / name)
        if content is not None:
            return content
    return None


def _readable() -> Iterator[Path]:
    """The folders that may hold entries, the chosen one first; it may be read-only."""
    with contextlib.suppress(OSError):
        folder = chosen_folder()
        if why_untrusted(folder) is None:
            yield folder
    yield from _TEMPORARY


def read_entry(path: Path) -> bytes | None:
    """The stored bytes of an entry; None if it is missing, damaged or not trusted."""
    data = read_regular(path, check_owner=True)
    if data is None or len(data) < _SEAL:
        return None
    content = data[:-_SEAL]
    return content if data[-_SEAL:] == seal(content) else None


def seal(content: bytes) -> bytes:
    """The end of an entry: a fixed text, the length and the checksum of the stored bytes."""
    length = len(content).to_bytes(_LENGTH, "little")
    return _MAGIC + length + hashlib.sha256(content).digest()


def store(name: str, content: bytes) -> None:
    """Store an entry for later processes. If it cannot be stored, nothing is raised: the caller
    already has the compiled kernel."""
    with contextlib.suppress(BackendError):
        in_cache_folder(lambda folder: write_entry(folder / name, content))


def remove_folder(path: Path) -> None:
    """Rename a folder that has the name of an entry, and remove it as far as possible; files of
    another user stay, under the new name."""
    aside = path.with_name(f"old-{path.name}-{os.getpid()}")
    path.rename(aside)
    with contextlib.suppress(OSError):
        aside.chmod(0o700)
    shutil.rmtree(aside, ignore_errors=True)


def write_entry(path: Path, content: bytes) -> None:
    """Write an entry to a temporary name, readable by this user only, then rename it."""
    made = process_end.begin(lambda: tempfile.mkstemp(prefix="new-", dir=path.parent), _unlink)
    handle, temporary = made
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content + seal(content))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o600)
        if path.is_dir() and not path.is_symlink():
            remove_folder(path)
        os.replace(temporary, path)
    except BaseException:
        _unlink(made)
        raise
    finally:
        process_end.forget(made)


def _unlink(made: tuple[int, str]) -> None:
    with contextlib.suppress(OSError):
        os.unlink(made[1])
