"""Files of a plan store and their locks: atomic writes, size accounting, eviction."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

#: Maximum seconds between polls of a lock that another process holds.
_PAUSE_SECONDS = 0.03


@contextlib.contextmanager
def locked(folder: int, name: str, seconds: float) -> Iterator[bool]:
    """Holds the lock of a name in an open folder; the value is False if others hold it longer than `seconds`.

    Raises:
        OSError: The file system has no locks.
    """
    deadline = time.monotonic() + seconds
    file = _open(folder, name)
    if _identity(file) in _held:  # entered again, as by a signal handler: it would wait for itself
        file.close()
        yield True
        return
    try:
        is_ours = _lock_until(deadline, file, seconds)
        while is_ours and not _is_in_place(file, folder, name):  # its last holder has removed it
            file.close()
            file = _open(folder, name)
            is_ours = _lock_until(deadline, file, seconds)
        held = _identity(file)
        if is_ours:
            _held.add(held)
        try:
            yield is_ours
        finally:
            _held.discard(held)
            if is_ours:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                unlock(file)
    finally:
        file.close()


#: The locks that threads of this process hold.
_held: set[tuple[int, int, int]] = set()
os.register_at_fork(after_in_child=_held.clear)


def _identity(file: IO[bytes]) -> tuple[int, int, int]:
    """A lock as this thread holds it."""
    status = os.fstat(file.fileno())
    return threading.get_ident(), status.st_dev, status.st_ino


def make_lock_file(folder: int, prefix: str) -> tuple[str, IO[bytes]]:
    """A new file, open for writing, with its name in an open folder; locked until it is closed.

    Raises:
        OSError: It cannot be created.
    """
    while True:
        name = prefix + secrets.token_hex(8)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb")
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:  # otherwise another process saw it unlocked and has removed it
            return name, file
        file.close()


def remove_if_free(folder: int, name: str, *, if_not_known: bool = False) -> None:
    """Removes a file that is not locked.

    Args:
        folder: Its folder.
        name: Its name.
        if_not_known: Whether to remove it on a file system without locks.
    """
    with contextlib.suppress(OSError):
        # Opened for writing: NFS implements whole-file locks with `fcntl`, which needs write access.
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
            unlock(file)


def lock(file: IO[bytes], seconds: float) -> bool:
    """Locks an open file; returns whether the lock was free in time.

    Raises:
        OSError: The file system has no locks.
    """
    return _lock_until(time.monotonic() + seconds, file, seconds)


def unlock(file: IO[bytes]) -> None:
    """Unlocks an open file, also one that a forked child shares."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


def _open(folder: int, name: str) -> IO[bytes]:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "rb+", buffering=0)


def _lock_until(deadline: float, file: IO[bytes], seconds: float) -> bool:
    """Locks an open file by a deadline, and within so many seconds of sleep: a test tool may have frozen the clock."""
    pause, slept = 0.001, 0.0
    while not _try_lock(file):
        if time.monotonic() >= deadline or slept >= seconds:
            return False
        time.sleep(pause)
        slept += pause
        pause = min(2 * pause, _PAUSE_SECONDS)
    return True


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_in_place(file: IO[bytes], folder: int, name: str) -> bool:
    try:
        named = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(file.fileno()))


_LOCKS = "locks"
_TEMPORARY = ".writing-"

#: File in the folder of locks: the store's size in bytes, updated by all processes.
_SIZE = "size"
_DIGITS = 20

#: Age at which a temporary file belongs to a killed writer, on a file system without locks that would show it.
_ABANDONED_SECONDS = 3600.0

#: Tolerance for timestamps in the future; later ones come from a wrong clock.
_CLOCK_SECONDS = 1.0

#: Seconds to wait for a process that is evicting files.
_SIZE_SECONDS = 2.0


@dataclass(frozen=True)
class File:
    """A plan file, complete or being written."""

    name: str
    size: int
    used: float

    @property
    def is_plan(self) -> bool:
        """Whether it is complete."""
        return is_plan_name(self.name)


def is_plan_name(name: str) -> bool:
    """Whether `file_format.name_of` makes such names; a file with another one is somebody else's."""
    return re.fullmatch(r"[0-9a-f]{64}\.plan", name) is not None


class SharedSize:
    """The store's size, shared by all processes in a file that may be missing."""

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file

    def read(self) -> int | None:
        """The size; None if it is unknown."""
        text = b""
        if self._file is not None:
            with contextlib.suppress(OSError):
                text = os.pread(self._file.fileno(), 32, 0)
        return int(text) if len(text) == _DIGITS and text.isdigit() else None

    def write(self, size: int) -> None:
        """Sets the size in one write, which is never partial."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._file.fileno(), b"%0*d" % (_DIGITS, size), 0)


@contextlib.contextmanager
def shared_size(folder: int) -> Iterator[SharedSize]:
    """The store's size, locked for other processes."""
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            locks = folder_of_locks(folder)
            stack.callback(os.close, locks)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            opened = stack.enter_context(os.fdopen(os.open(_SIZE, flags, 0o600, dir_fd=locks), "rb+", buffering=0))
            if lock(opened, _SIZE_SECONDS):  # otherwise a stopped process holds it
                stack.callback(unlock, opened)
                file = opened
        yield SharedSize(file)


def listed(folder: int) -> list[File]:
    """All plan files, including those being written."""
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_plan_name(entry.name) or entry.name.startswith(_TEMPORARY):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    files.append(File(entry.name, status.st_size, status.st_mtime))
    return files


def try_write(folder: int, name: str, contents: bytes, *, or_raise: bool) -> bool:
    """Writes a file; returns whether the disk had room."""
    try:
        _write(folder, name, contents)
    except OSError as error:
        if or_raise or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


def _write(folder: int, name: str, contents: bytes) -> None:
    """Writes a file atomically, with the folder's read permissions.

    A lock shows that the writer is alive; an unlocked temporary file belongs to a killed writer.
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
                touch(name, folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def touch(name: str, folder: int) -> None:
    """Sets a file's time by the clock that it is compared with; the file system's own is some ms behind."""
    now = time.time_ns()
    os.utime(name, ns=(now, now), dir_fd=folder)


def folder_of_locks(folder: int) -> int:
    """Opens the folder of locks; the caller closes it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(_LOCKS, 0o700, dir_fd=folder)
    return os.open(_LOCKS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def sweep(folder: int) -> None:
    """Removes files left by killed processes."""
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


def remove_oldest(folder: int, min_bytes: int, name: str) -> list[int]:
    """Removes least recently used plans of at least this size, except the file of this name.

    Returns:
        Sizes of the removed files.
    """
    sweep(folder)
    now, sizes = time.time(), list[int]()
    files = [file for file in listed(folder) if file.is_plan and file.name != name]
    for file in files:
        if file.used > now + _CLOCK_SECONDS:  # from a wrong clock: it would never be evicted
            with contextlib.suppress(OSError):
                touch(file.name, folder)
    for file in sorted(files, key=lambda file: (min(file.used, now), file.used)):
        if sum(sizes) >= min_bytes:
            break
        with contextlib.suppress(OSError):
            os.unlink(file.name, dir_fd=folder)
            sizes.append(file.size)
    return sizes
