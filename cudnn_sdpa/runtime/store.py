"""Plans on disk: what one process has built, the next one loads.

A plan is code for the GPU, so a folder that others may write to is refused, and so are single files. A file is written
under another name and renamed, which leaves it whole or absent whatever happens meanwhile. Whatever is wrong with the
store, plans are built as if there were none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cudnn_sdpa.runtime import plan_file
from cudnn_sdpa.runtime.plan_file import BadPlanFileError, StoredPlan

_log = logging.getLogger("cudnn_sdpa")

DEFAULT_BYTES = 1 << 30
_LOCKS = "locks"
_TEMPORARY = ".writing-"

#: A writer that has not renamed its file by then has been killed.
_ABANDONED_SECONDS = 3600.0

#: The part of its capacity that a full store keeps, so that not every further save has to remove something.
_LEFT = 0.9

#: How long to wait for a process that is building the same plan. It takes a second; one that is stopped holds its lock.
_LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class PlanStoreInfo:
    """Counters of a plan store.

    Attributes:
        folder: Where it is.
        plans: Files in it now.
        bytes: Their size.
        capacity: Most bytes that are kept.
        loads: Plans that this process has loaded from it.
        saves: Plans that this process has saved to it.
        rejected: Files that this process found damaged, foreign or unsafe, and removed where it could.
        evictions: Files that this process removed to stay within the capacity.
    """

    folder: Path
    plans: int
    bytes: int
    capacity: int
    loads: int
    saves: int
    rejected: int
    evictions: int


class Identified(Protocol):
    """The key of a plan, or of anything else that is compiled for a GPU."""

    def identity(self) -> dict[str, Any]:
        """All that it depends on, as values of JSON."""
        ...


class UnsafeFolderError(Exception):
    """A folder that somebody else may write to, or that cannot be used; the message says why."""


class PlanStore:
    """A folder of compiled plans, shared by any number of processes.

    Least recently used files go first when it grows over its capacity; a load counts as a use.
    """

    def __init__(self, folder: Path, capacity: int = DEFAULT_BYTES, *, complaints: int = logging.WARNING) -> None:
        """Opens or makes a folder.

        Args:
            folder: Where it is.
            capacity: Most bytes that are kept.
            complaints: Logging level of what keeps plans from being kept or read. Files that are unsafe or damaged are
                always a warning.

        Raises:
            UnsafeFolderError: It cannot be made, is no folder, or is open to others.
        """
        self.folder = folder
        self.capacity = capacity
        self._complaints = complaints
        self._size: int | None = None  # not known before the first save
        self._counters = dict.fromkeys(("loads", "saves", "rejected", "evictions"), 0)
        self._said: set[str] = set()
        self._mutex = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = folder.stat()
        except OSError as error:
            raise UnsafeFolderError(f"{folder} cannot be used: {error}") from error
        if not stat.S_ISDIR(status.st_mode):
            raise UnsafeFolderError(f"{folder} is no folder")
        if not plan_file.is_private(status):
            raise UnsafeFolderError(
                f"{folder} belongs to another user or is writable by others, and plans are code for the GPU; make it "
                f"private with: chmod go-w {folder}"
            )

    def path(self, key: Identified) -> Path:
        """Where the plan of `key` is, or would be."""
        return self.folder / plan_file.name_of(key.identity())

    def load(self, key: Identified, *, only_tuned: bool = False) -> StoredPlan | None:
        """The stored plan of `key`; None if there is none, or none that can be trusted.

        With `only_tuned`, a plan that was not chosen by its time is left where it is.
        """
        path = self.path(key)
        try:
            contents = plan_file.read(path)
            if contents is None:
                return None
            plan = _decode(contents)
            if plan_file.canonical(plan.identity) != plan_file.canonical(key.identity()):
                raise BadPlanFileError("it is another plan's")
        except BadPlanFileError as error:
            self.reject(key, str(error))
            return None
        except OSError as error:
            self._warn("read", f"stored plans cannot be read ({error})")
            return None
        if only_tuned and not plan.tuned:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # a use, for the order in which files go
        self._count("loads")
        return plan

    def save(self, key: Identified, plan: StoredPlan) -> None:
        """Keeps a plan. What cannot be written is not kept, and said once."""
        try:
            contents = plan.encode()
            self._write(self.path(key), contents)
            self._count("saves")
            self._make_room(len(contents))
        except OSError as error:
            self._warn("write", f"plans cannot be kept in {self.folder} ({error})")

    def reject(self, key: Identified, why: str) -> None:
        """Removes the file of `key`, which is of no use."""
        path = self.path(key)
        _log.warning("ignoring the stored plan %s: %s; it will be built again", path, why)
        self._count("rejected")
        with contextlib.suppress(OSError):
            path.unlink()

    @contextlib.contextmanager
    def building(self, key: Identified) -> Iterator[None]:
        """While a process is in it, others that want to build the same plan wait, and can load it afterwards.

        Lock files cannot be removed safely, so there are 256 for all plans; now and then two plans share one.
        """
        if not os.access(self.folder, os.W_OK | os.X_OK):  # nothing will be kept that others could wait for
            yield
            return
        import filelock  # 80 ms, most of it asyncio: not for processes that find all their plans

        lock = filelock.FileLock(self.folder / _LOCKS / f"{self.path(key).stem[:2]}.lock", timeout=_LOCK_SECONDS)
        held = False
        try:
            (self.folder / _LOCKS).mkdir(exist_ok=True, mode=0o700)
            lock.acquire()
            held = True
        except (OSError, filelock.Timeout, NotImplementedError) as error:
            self._warn("lock", f"plans in {self.folder} are built without a lock ({error})")
        try:
            yield
        finally:
            if held:
                lock.release()

    def info(self) -> PlanStoreInfo:
        """The counters."""
        files = self._files()
        size = sum(size for _, size, _ in files)
        return PlanStoreInfo(self.folder, len(files), size, self.capacity, **self._counters)

    def clear(self) -> None:
        """Removes all plans."""
        for _, _, path in self._files():
            with contextlib.suppress(OSError):
                path.unlink()

    def _write(self, path: Path, contents: bytes) -> None:
        descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=self.folder)  # readable by this user alone
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(contents)
                file.flush()
                os.fsync(descriptor)
            os.replace(name, path)  # noqa: PTH105 - whole or not at all
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108
            raise

    def _make_room(self, added: int) -> None:
        """Keeps the folder within its capacity.

        To look at thousands of files takes longer than to build a plan. So that is done in the first save of a process,
        and afterwards only when there may be too many; what other processes save meanwhile shows then.
        """
        with self._mutex:
            if self._size is not None:
                self._size += added
                if self._size <= self.capacity:
                    return
        size = self._shrink()
        with self._mutex:
            self._size = size
        self._sweep()

    def _shrink(self) -> int:
        """Removes what has not been used for longest if there is too much; returns the bytes that are left."""
        files = self._files()
        left = sum(size for _, size, _ in files)
        if left > self.capacity:
            for _, size, path in sorted(files)[:-1]:  # the newest stays, however large it is
                if left <= _LEFT * self.capacity:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                    left -= size
                    self._count("evictions")
        return left

    def _sweep(self) -> None:
        """Removes what killed writers have left."""
        long_ago = time.time() - _ABANDONED_SECONDS
        for path in self.folder.glob(_TEMPORARY + "*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < long_ago:
                    path.unlink()

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of the last use, size and path of all plans."""
        result = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(".plan"):
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        result.append((status.st_mtime, status.st_size, Path(entry.path)))
        return result

    def _count(self, what: str) -> None:
        with self._mutex:
            self._counters[what] += 1

    def _warn(self, kind: str, message: str) -> None:
        with self._mutex:
            if kind in self._said:
                return
            self._said.add(kind)
        _log.log(self._complaints, "%s", message)

    def __repr__(self) -> str:
        return f"PlanStore({str(self.folder)!r})"


def _decode(contents: bytes) -> StoredPlan:
    try:
        return StoredPlan.decode(contents)
    except (ValueError, KeyError, TypeError) as error:
        raise BadPlanFileError(f"its description cannot be read ({error})") from error
