"""The plan store: plans on disk, built by one process and loaded by later ones.

A plan is code for the GPU, so folders and files that others may write to are refused. A file is written under a
temporary name and renamed, so it is always complete or absent. If the store fails, plans are built as if there were
none.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cudnn_sdpa.graph.diagnostics import shortened
from cudnn_sdpa.plans import file_format, private_folders, store_files
from cudnn_sdpa.plans.file_format import BadPlanFileError, StoredPlan
from cudnn_sdpa.plans.private_folders import UnsafeFolderError

_log = logging.getLogger("cudnn_sdpa")

DEFAULT_BYTES = 1 << 30

#: Maximum number of attempts to free space on a full disk for one plan.
_MAX_TRIES = 8

#: The fraction of its capacity that a full store keeps, so that not every later save has to evict.
_KEPT_FRACTION = 0.9

#: Seconds to wait for a process that builds the same plan. A build takes one; a stopped process keeps its lock.
_LOCK_SECONDS = 60.0

#: Maximum number of file names that a store remembers.
_MAX_NAMES = 4096

_stores: weakref.WeakSet[PlanStore] = weakref.WeakSet()


@dataclass(frozen=True)
class PlanStoreInfo:
    """Counters of a plan store.

    Attributes:
        folder: Its path.
        plans: Files in it now.
        bytes: Their total size.
        capacity: Maximum number of bytes.
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


class Identified(Hashable, Protocol):
    """The key of a plan, or of anything else that is compiled for a GPU."""

    def identity(self) -> dict[str, object]:
        """Everything that it depends on, JSON-ready."""
        ...


class PlanStore:
    """A folder of compiled plans, shared by any number of processes.

    Beyond its capacity, the least recently used files are removed first; a load counts as a use.
    """

    def __init__(self, folder: Path, capacity: int = DEFAULT_BYTES, *, log_level: int = logging.WARNING) -> None:
        """Opens or creates a folder.

        Args:
            folder: Its path.
            capacity: Maximum number of bytes.
            log_level: Level of failures to save or read plans. Unsafe or damaged files are always a warning.

        Raises:
            UnsafeFolderError: It cannot be created, is not a folder, or is open to others.
        """
        self.folder = folder.absolute()
        self.capacity = capacity
        self._log_level = log_level
        self._size: int | None = None  # unknown before the first save
        self._counters = dict.fromkeys(("loads", "saves", "rejected", "evictions"), 0)
        self._warned: set[str] = set()
        self.write_error = ""  # of the last plan that could not be saved
        self._ignored: dict[str, bytes] = {}
        self._names: dict[Identified, str] = {}  # a first call asks for the same ones several times
        self._start_afresh()
        _stores.add(self)
        with self._opened(make=True):
            pass

    def _start_afresh(self) -> None:
        """Resets the lock in a forked child, which lacks the thread that may hold it."""
        self._mutex, self._room = threading.RLock(), threading.RLock()  # a signal handler may call within

    @contextlib.contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[int]:
        """Opens the folder, which may have been removed, or made writable by others, since its last use.

        Raises:
            UnsafeFolderError: It cannot be used.
        """
        descriptor = private_folders.open_private(self.folder, make=make)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def path(self, key: Identified) -> Path:
        """The path of the plan of `key`, existing or not."""
        name = self._names.get(key)
        if name is None:
            if len(self._names) >= _MAX_NAMES:
                self._names.clear()
            name = self._names[key] = file_format.name_of(key.identity())
        return self.folder / name

    def load(self, key: Identified, *, only_tuned: bool = False) -> StoredPlan | None:
        """The stored plan of `key`; None if there is none that can be trusted.

        With `only_tuned`, an untuned plan is skipped and stays.
        """
        name = self.path(key).name
        try:
            with self._opened() as folder:
                contents = file_format.read(name, folder)
                if contents is None:
                    return None
                plan = _decode(contents)
                if file_format.canonical(plan.identity) != file_format.canonical(key.identity()):
                    raise BadPlanFileError("it belongs to another plan")
                if (only_tuned and not plan.tuned) or self._ignored.get(name) == _digest(plan):
                    return None
                with contextlib.suppress(OSError):
                    store_files.touch(name, folder)  # marks the use, for eviction order
        except BadPlanFileError as error:
            self.reject(key, str(error))
            return None
        except (OSError, UnsafeFolderError) as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # the next save recreates a removed folder
                self._warn("read", f"stored plans cannot be read ({error})")
            return None
        self._count("loads")
        return plan

    def has(self, key: Identified) -> bool:
        """Whether there is a file for `key`, which may be damaged."""
        return self.path(key).is_file()

    def save(self, key: Identified, plan: StoredPlan) -> bool:
        """Saves a plan; returns whether it could. A failure is logged once."""
        name = self.path(key).name
        try:
            contents = plan.encode()
            with self._opened(make=True) as folder:
                self._make_room(folder, len(contents), name)
                self._write_or_make_room(folder, name, contents)
            self._count("saves")
            self._ignored.pop(name, None)
        except (OSError, UnsafeFolderError) as error:
            self.write_error = str(error)
            self._warn("write", f"plans cannot be saved in {self.folder} ({error})")
            return False
        return True

    def reject(self, key: Identified, why: str) -> None:
        """Removes the file of `key`, which is damaged or holds another plan."""
        self._note_rejection(key, why)
        with contextlib.suppress(OSError, UnsafeFolderError), self._opened() as folder:
            os.unlink(self.path(key).name, dir_fd=folder)

    def ignore(self, key: Identified, plan: StoredPlan, why: str) -> None:
        """Ignores the stored plan of `key` in this process; the file stays until a new plan replaces it.

        For an intact plan that cuDNN rejects: if the cause is the GPU or its memory, other processes can still use it.
        """
        self._ignored[self.path(key).name] = _digest(plan)
        self._note_rejection(key, why)

    def _note_rejection(self, key: Identified, why: str) -> None:
        _log.warning("ignoring the stored plan %s: %s; it will be built again", self.path(key), why)
        self._count("rejected")

    @contextlib.contextmanager
    def building(self, key: Identified, *, in_background: bool = False) -> Iterator[None]:
        """While a process is in this context, others that would build the same plan wait, then load it.

        Args:
            key: The plan's key.
            in_background: Whether a helper builds it. Calls that need the plan do not wait for that, but build it
                themselves: a helper must first start, runs at low priority, and takes many times as long.
        """
        with contextlib.ExitStack() as stack:
            try:
                if os.access(self.folder, os.W_OK | os.X_OK):  # otherwise there will be no file for others to load
                    folder = stack.enter_context(self._opened())
                    locks = store_files.folder_of_locks(folder)
                    stack.callback(os.close, locks)
                    name = self.path(key).stem + ".background" * in_background + ".lock"
                    if not stack.enter_context(store_files.locked(locks, name, _LOCK_SECONDS)):
                        self._warn("lock", f"plans in {self.folder} are built without a lock (it is held for too long)")
            except (OSError, UnsafeFolderError) as error:
                self._warn("lock", f"plans in {self.folder} are built without a lock ({error})")
            yield

    def info(self) -> PlanStoreInfo:
        """The counters."""
        sizes: list[int] = []
        with contextlib.suppress(OSError, UnsafeFolderError), self._opened() as folder:
            sizes = [file.size for file in store_files.listed(folder) if file.is_plan]
        return PlanStoreInfo(
            folder=self.folder, plans=len(sizes), bytes=sum(sizes), capacity=self.capacity, **self._counters
        )

    def clear(self) -> None:
        """Removes all plans."""
        with contextlib.suppress(OSError, UnsafeFolderError), self._opened() as folder:
            for file in store_files.listed(folder):
                if file.is_plan:
                    with contextlib.suppress(OSError):
                        os.unlink(file.name, dir_fd=folder)

    def _write_or_make_room(self, folder: int, name: str, contents: bytes) -> None:
        """Writes a file; on a full disk, others are evicted for it."""
        tries, removed = 1, 1
        while not store_files.try_write(folder, name, contents, or_raise=tries == _MAX_TRIES or not removed):
            removed = self._remove(folder, len(contents), name)
            tries += 1

    def _make_room(self, folder: int, added: int, name: str) -> None:
        """Keeps the folder within its capacity when a file of this size and name is added.

        Scanning thousands of files takes longer than building a plan. So only a process's first save does it, and later
        ones when the capacity may be exceeded: all processes add the sizes of their files to one shared total.
        """
        with self._room, store_files.shared_size(folder) as shared:
            size = shared.read() if self._size is not None else None
            if size is None:
                size = self._size
            if size is None or size + added > self.capacity:
                size = self._shrink(folder, added, name)
            self._size = size + added
            shared.write(self._size)

    def _shrink(self, folder: int, added: int, name: str) -> int:
        """Evicts the least recently used files if a new one needs their space; returns the bytes left."""
        store_files.sweep(folder)
        left = sum(file.size for file in store_files.listed(folder) if file.name != name)
        if left + added > self.capacity:
            left -= self._remove(folder, left + added - int(_KEPT_FRACTION * self.capacity), name)
        return max(0, left)

    def _remove(self, folder: int, min_bytes: int, name: str) -> int:
        """Removes least recently used files of at least this size, except `name`; returns the bytes removed."""
        sizes = store_files.remove_oldest(folder, min_bytes, name)
        for _ in sizes:
            self._count("evictions")
        return sum(sizes)

    def _count(self, counter: str) -> None:
        with self._mutex:
            self._counters[counter] += 1

    def _warn(self, kind: str, message: str) -> None:
        """Logs one message of each kind."""
        with self._mutex:
            if kind in self._warned:
                return
            self._warned.add(kind)
        _log.log(self._log_level, "%s", message)

    def __repr__(self) -> str:
        return f"PlanStore({str(self.folder)!r})"


def _renew_locks() -> None:
    for store in list(_stores):
        store._start_afresh()


os.register_at_fork(after_in_child=_renew_locks)


def _digest(plan: StoredPlan) -> bytes:
    return hashlib.sha256(plan.data).digest()


def _decode(contents: bytes) -> StoredPlan:
    try:
        return StoredPlan.decode(contents)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadPlanFileError(f"its description cannot be read ({shortened(str(error))})") from error
