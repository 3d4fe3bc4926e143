"""Locks that processes hold on files, which the system frees when they end, however that is.

A file is removed by who holds its lock. So who gets a lock looks whether the file is still in its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from typing import IO

#: Between two looks at a lock that another process holds; the first come sooner.
_PAUSE_SECONDS = 0.03


@contextlib.contextmanager
def held(folder: int, name: str, seconds: float) -> Iterator[bool]:
    """Holds the lock of a name in an open folder; the value is False if others hold it for longer than `seconds`.

    Raises:
        OSError: There are no locks here.
    """
    end = time.monotonic() + seconds
    file = _open(folder, name)
    try:
        taken = _take(file, end)
        while taken and not _is_in_place(file, folder, name):  # who held it has removed it
            file.close()
            file = _open(folder, name)
            taken = _take(file, end)
        try:
            yield taken
        finally:
            if taken:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                free(file)
    finally:
        file.close()


def make(folder: int, prefix: str) -> tuple[str, IO[bytes]]:
    """A new file, open for writing, with its name in an open folder. Its lock is held until it is closed.

    Raises:
        OSError: It cannot be made.
    """
    while True:
        name = prefix + secrets.token_hex(8)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb")
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:  # else another process saw it without its lock, and has removed it
            return name, file
        file.close()


def remove_if_free(folder: int, name: str, *, if_not_known: bool = False) -> None:
    """Removes a file that nobody holds the lock of.

    Args:
        folder: Its folder.
        name: Its name.
        if_not_known: Whether to remove it where there are no locks.
    """
    with contextlib.suppress(OSError):
        # For writing too: on NFS, whole-file locks are those of `fcntl`, which a reader does not get.
        descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            except OSError:
                if not if_not_known:
                    return
            if _is_in_place(file, folder, name):
                os.unlink(name, dir_fd=folder)
            free(file)


def lock(file: IO[bytes], seconds: float) -> bool:
    """Takes the lock of an open file; whether it was free in time.

    Raises:
        OSError: There are no locks here.
    """
    return _take(file, time.monotonic() + seconds)


def free(file: IO[bytes]) -> None:
    """Frees the lock of an open file, also for a forked child that has the file too."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


def _open(folder: int, name: str) -> IO[bytes]:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "rb+", buffering=0)


def _take(file: IO[bytes], end: float) -> bool:
    pause = 0.001
    while not _is_taken(file):
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_SECONDS)
    return True


def _is_taken(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_in_place(file: IO[bytes], folder: int, name: str) -> bool:
    try:
        there = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(file.fileno()))
