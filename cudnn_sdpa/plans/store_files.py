"""The files of a plan store and the locks on them: written whole, counted, removed; freed when a process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
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


def make_lock_file(folder: int, prefix: str) -> tuple[str, IO[bytes]]:
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


_LOCKS = "locks"
_TEMPORARY = ".writing-"

#: In the folder of locks: the bytes that the store has, which all processes count together.
_SIZE = "size"
_DIGITS = 20

#: A writer that has not renamed its file by then has been killed, where a disk has no locks that would show it.
_ABANDONED_SECONDS = 3600.0

#: What is dated later than that was dated by another clock.
_CLOCK_SECONDS = 1.0

#: How long to wait for a process that is making room.
_SIZE_SECONDS = 2.0


@dataclass(frozen=True)
class File:
    """A plan, or what a writer has of one."""

    name: str
    size: int
    used: float

    @property
    def is_plan(self) -> bool:
        """Whether it is whole."""
        return self.name.endswith(".plan")


class Size:
    """The bytes that a store has, as all processes count them, in a file that may be missing."""

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file

    def read(self) -> int | None:
        """The number; None if it is not known."""
        text = b""
        if self._file is not None:
            with contextlib.suppress(OSError):
                text = os.pread(self._file.fileno(), 32, 0)
        return int(text) if len(text) == _DIGITS and text.isdigit() else None

    def write(self, size: int) -> None:
        """Sets the number; one write, of which no part is ever there alone."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._file.fileno(), b"%0*d" % (_DIGITS, size), 0)


@contextlib.contextmanager
def size_of(folder: int) -> Iterator[Size]:
    """The bytes that a store has; no other process looks meanwhile."""
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            locks = folder_of_locks(folder)
            stack.callback(os.close, locks)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            found = stack.enter_context(os.fdopen(os.open(_SIZE, flags, 0o600, dir_fd=locks), "rb+", buffering=0))
            if lock(found, _SIZE_SECONDS):  # else a stopped process has it
                stack.callback(free, found)
                file = found
        yield Size(file)


def listed(folder: int) -> list[File]:
    """All plans, and what is being written."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".plan") or entry.name.startswith(_TEMPORARY):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    found.append(File(entry.name, status.st_size, status.st_mtime))
    return found


def is_written(folder: int, name: str, contents: bytes, *, or_raise: bool) -> bool:
    """Writes a file; whether the disk had room for it."""
    try:
        _write(folder, name, contents)
    except OSError as error:
        if or_raise or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


def _write(folder: int, name: str, contents: bytes) -> None:
    """Writes a file, whole or not at all. Who may read the folder may read it.

    A lock tells others that the writer lives: without one, what it has written is a killed writer's.
    """
    mode = 0o600 | os.fstat(folder).st_mode & 0o044
    temporary, file = make_lock_file(folder, _TEMPORARY)
    try:
        with file:
            os.fchmod(file.fileno(), mode)
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            with contextlib.suppress(OSError):
                date(name, folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def date(name: str, folder: int) -> None:
    """Marks a file as used now, by the clock that it will be compared with; the system's own is some ms behind."""
    now = time.time_ns()
    os.utime(name, ns=(now, now), dir_fd=folder)


def folder_of_locks(folder: int) -> int:
    """The folder of locks; it is closed by who asks."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(_LOCKS, 0o700, dir_fd=folder)
    return os.open(_LOCKS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def sweep(folder: int) -> None:
    """Removes what killed processes have left."""
    long_ago = time.time() - _ABANDONED_SECONDS
    for file in listed(folder):
        if not file.is_plan:
            remove_if_free(folder, file.name, if_not_known=file.used < long_ago)
    with contextlib.suppress(OSError):
        locks = folder_of_locks(folder)
        try:
            with os.scandir(locks) as entries:
                names = [entry.name for entry in entries if entry.name.endswith(".lock")]
            for name in names:
                remove_if_free(locks, name)
        finally:
            os.close(locks)


def remove_oldest(folder: int, wanted: int, name: str) -> list[int]:
    """Removes so many bytes, the least recently used plans first, and not the file of this name.

    Returns:
        The sizes of what has gone.
    """
    sweep(folder)
    now, gone = time.time(), list[int]()
    files = [file for file in listed(folder) if file.is_plan and file.name != name]
    for file in files:
        if file.used > now + _CLOCK_SECONDS:  # by a clock that was wrong: it would stay for ever
            with contextlib.suppress(OSError):
                date(file.name, folder)
    for file in sorted(files, key=lambda file: (min(file.used, now), file.used)):
        if sum(gone) >= wanted:
            break
        with contextlib.suppress(OSError):
            os.unlink(file.name, dir_fd=folder)
            gone.append(file.size)
    return gone
