"""The cache folder: compiled kernels of all engines, kept from process to process.

An entry is one file: what was stored, its length and its checksum. It is written under another
name, synchronised and renamed, so that neither an interrupt nor a power cut leaves half of one;
one that was damaged afterwards fails the checksum and is compiled again. Entries and folders that
other users could have written are not used (`trust`). Where the folder cannot be used, a private
temporary one takes its place, with one warning.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ..errors import BackendError
from ..wording import warn
from .fork_safe_locks import ForkSafeLock
from .trusted_files import read_trusted, why_untrusted

T = TypeVar("T")

_MAGIC = b"assocscan 1\n"
_LENGTH = 8
_SEAL = len(_MAGIC) + _LENGTH + hashlib.sha256().digest_size

_LOCK = ForkSafeLock()
_TEMPORARY: list[Path] = []  # at most one


@functools.cache
def chosen_folder() -> Path:
    """$ASSOCSCAN_CACHE_DIR, or assocscan in the user's cache folder, as an absolute path.

    Found once, so that a relative path means the same folder after os.chdir. Raises OSError where
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
    """Why the chosen folder cannot be used; None where it can. It is made if it is missing."""
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
    """What the system says, without the random name of a temporary file."""
    return error.strerror or str(error)


def cache_folder() -> Path:
    """The folder that new entries go to. Raises BackendError where there is none."""
    reason = why_unusable()
    return chosen_folder() if reason is None else temporary_folder(reason)


def in_cache_folder(action: Callable[[Path], T]) -> T:
    """What an action does in the chosen folder; once more where that was removed meanwhile, then in
    a temporary one. Raises BackendError where there is neither."""
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
    """Make a folder that only this user can enter, whatever the umask is, and those above it."""
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
    """A private folder for this process, which takes the place of the chosen one."""
    with _LOCK:
        is_new = not _TEMPORARY
        if is_new or not _TEMPORARY[0].is_dir():
            _TEMPORARY[:] = [private_folder(reason)]
            atexit.register(_remove, _TEMPORARY[0], os.getpid())
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
    """A new folder in the system's temporary one. Raises BackendError where that is no good."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="assocscan-")).absolute()
        folder.chmod(0o700)
        untrusted = why_untrusted(folder)
    except OSError as error:
        untrusted = said(error)
    else:
        if untrusted is None:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
    raise BackendError(
        f"there is no folder to compile kernels in: the cache folder cannot be used ({reason}), "
        f"nor can a temporary one ({untrusted}); set ASSOCSCAN_CACHE_DIR to a folder of your own"
    )


def _remove(folder: Path, owner: int) -> None:
    """Clear away a temporary folder, unless this is a child of the process that made it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def build_folder() -> Iterator[Path]:
    """An empty private folder, removed at the end. Raises BackendError where none can be made.

    tempfile.TemporaryDirectory would also remove it when a child that was forked meanwhile ends.
    """

    def make(parent: Path) -> Path:
        made = Path(tempfile.mkdtemp(prefix="build-", dir=parent))
        made.chmod(0o700)
        return made

    folder = in_cache_folder(make)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find(name: str) -> Path | None:
    """The path of an entry that is whole and can only be of this user or root.

    Its content is what was stored, followed by the seal, which loaders of shared libraries ignore.
    """
    for folder in _readable():
        if read_entry(folder / name) is not None:
            return folder / name
    return None


def read(name: str) -> bytes | None:
    """What was stored under a name; None where there is nothing, or nothing that can be trusted."""
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
    """The content of an entry; None for one that is missing, damaged, or not to be trusted."""
    data = read_trusted(path)
    if data is None or len(data) < _SEAL:
        return None
    content = data[:-_SEAL]
    return content if data[-_SEAL:] == seal(content) else None


def seal(content: bytes) -> bytes:
    """Length and checksum, as they stand at the end of an entry."""
    length = len(content).to_bytes(_LENGTH, "little")
    return _MAGIC + length + hashlib.sha256(content).digest()


def store(name: str, content: bytes) -> None:
    """Keep an entry for later processes, if that is possible at all: the caller has what it
    compiled."""
    with contextlib.suppress(BackendError):
        in_cache_folder(lambda folder: write_entry(folder / name, content))


def remove_folder(path: Path) -> None:
    """Clear the place of an entry, in a folder of nothing but entries; what cannot be removed, of
    another user say, stays there under another name."""
    aside = path.with_name(f"old-{path.name}-{os.getpid()}")
    path.rename(aside)
    with contextlib.suppress(OSError):
        aside.chmod(0o700)
    shutil.rmtree(aside, ignore_errors=True)


def write_entry(path: Path, content: bytes) -> None:
    """Write it whole under another name, for this user alone, then put it in its place."""
    handle, temporary = tempfile.mkstemp(prefix="new-", dir=path.parent)
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
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
