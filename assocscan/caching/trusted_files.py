"""Checks that only this user or root can have written a folder or file.

Code is loaded from the cache folder: a file that another user wrote there would run with the rights
of this user. Only POSIX systems are checked; elsewhere a user's folders are private by default.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MAX_LINKS = 40  # the limit of Linux

# O_NONBLOCK: opening a FIFO must not block. O_NOFOLLOW: a symbolic link may point to any file.
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_READ |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def is_trusted_owner(user: int) -> bool:
    """Whether this is the user id of root or of this process."""
    return user in (0, os.geteuid())


def why_untrusted(folder: Path) -> str | None:
    """The reason why other users could have written into a folder; None if they could not.

    The folder itself must belong to this user or root and be writable by no one else. Folders above
    it may belong to others, but none may be writable by all users, except with the sticky bit
    (/tmp); an entry of such a folder must belong to this user or root. Raises OSError if the folder
    cannot be inspected.
    """
    if not hasattr(os, "geteuid"):
        return None
    shared = False  # whether all users can create entries in the parent folder
    for path, status in visited(folder):
        if shared and not is_trusted_owner(status.st_uid):
            return f"{path} belongs to user {status.st_uid} and lies in a folder of all users"
        if stat.S_ISLNK(status.st_mode):
            continue
        shared = bool(status.st_mode & stat.S_IWOTH)
        if shared and not status.st_mode & stat.S_ISVTX:
            return f"all users can write to {path} ({mode_of(status)}; chmod o-w mends it)"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a folder"
    if not is_trusted_owner(status.st_uid):
        return f"{path} belongs to user {status.st_uid}"
    if status.st_mode & OTHERS_WRITE:
        return f"other users can write to {path} ({mode_of(status)}; chmod go-w mends it)"
    return None


def mode_of(status: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(status.st_mode):04o}"


def visited(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every folder and symbolic link that the system visits to resolve an absolute path."""
    here, links = Path(path.anchor), 0
    pending = list(reversed(path.parts[1:]))
    status = os.lstat(here)
    yield here, status
    while pending:
        name = pending.pop()
        if name == "..":
            here = here.parent
            continue
        status = os.lstat(here / name)
        yield here / name, status
        if not stat.S_ISLNK(status.st_mode):
            here = here / name
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.readlink(here / name))
        if target.is_absolute():
            here = Path(target.anchor)
        pending.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))


def read_regular(path: Path, check_owner: bool = False) -> bytes | None:
    """The content of a regular file; None if it is missing or not a regular file. With check_owner
    also None if another user owns it or can write to it."""
    try:
        with open(os.open(path, _READ), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return None
            if (
                check_owner
                and hasattr(os, "geteuid")
                and (not is_trusted_owner(status.st_uid) or status.st_mode & OTHERS_WRITE)
            ):
                return None
            return file.read()
    except OSError:
        return None
