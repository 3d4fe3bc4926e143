"""Plans on disk: what one process has built, the next one loads.

A plan is code for the GPU, so a folder that others may write to is refused, and so are single files. A file is written
under another name and renamed, which leaves it whole or absent whatever happens meanwhile. Whatever is wrong with the
store, plans are built as if there were none.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cudnn_sdpa.graph.diagnostics import shortened
from cudnn_sdpa.plans import file_format, private_folders, store_files
from cudnn_sdpa.plans.file_format import BadPlanFileError, StoredPlan
from cudnn_sdpa.plans.private_folders import UnsafeFolderError

_log = logging.getLogger("cudnn_sdpa")

DEFAULT_BYTES = 1 << 30

#: How often room is made on a full disk for one plan.
_MAX_TRIES = 8

#: The part of its capacity that a full store keeps, so that not every further save has to remove something.
_LEFT = 0.9

#: How long to wait for a process that is building the same plan. It takes a second; one that is stopped holds its lock.
_LOCK_SECONDS = 60.0

_stores: weakref.WeakSet[PlanStore] = weakref.WeakSet()


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
        self.folder = folder.absolute()
        self.capacity = capacity
        self._complaints = complaints
        self._size: int | None = None  # not known before the first save
        self._counters = dict.fromkeys(("loads", "saves", "rejected", "evictions"), 0)
        self._said: set[str] = set()
        self._refused: dict[str, bytes] = {}
        self._start_afresh()
        _stores.add(self)
        with self._opened(make=True):
            pass

    def _start_afresh(self) -> None:
        """A forked child has none of the threads that may hold the lock."""
        self._mutex, self._room = threading.Lock(), threading.Lock()

    @contextlib.contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[int]:
        """The folder, as it is now: it may have been removed, or opened to others, since it was used last.

        Raises:
            UnsafeFolderError: It cannot be used.
        """
        descriptor = private_folders.open_private(self.folder, make=make)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def path(self, key: Identified) -> Path:
        """Where the plan of `key` is, or would be."""
        return self.folder / file_format.name_of(key.identity())

    def load(self, key: Identified, *, only_tuned: bool = False) -> StoredPlan | None:
        """The stored plan of `key`; None if there is none, or none that can be trusted.

        With `only_tuned`, a plan that was not chosen by its time is left where it is.
        """
        name = self.path(key).name
        try:
            with self._opened() as folder:
                contents = file_format.read(name, folder)
                if contents is None:
                    return None
                plan = _decode(contents)
                if file_format.canonical(plan.identity) != file_format.canonical(key.identity()):
                    raise BadPlanFileError("it is another plan's")
                if (only_tuned and not plan.tuned) or self._refused.get(name) == _digest(plan):
                    return None
                with contextlib.suppress(OSError):
                    store_files.date(name, folder)  # a use, for the order in which files go
        except BadPlanFileError as error:
            self.reject(key, str(error))
            return None
        except (OSError, UnsafeFolderError) as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # it was removed: the next save makes it again
                self._warn("read", f"stored plans cannot be read ({error})")
            return None
        self._count("loads")
        return plan

    def save(self, key: Identified, plan: StoredPlan) -> None:
        """Keeps a plan. What cannot be written is not kept, and said once."""
        name = self.path(key).name
        try:
            contents = plan.encode()
            with self._opened(make=True) as folder:
                self._make_room(folder, len(contents), name)
                self._write_or_make_room(folder, name, contents)
            self._count("saves")
            self._refused.pop(name, None)
        except (OSError, UnsafeFolderError) as error:
            self._warn("write", f"plans cannot be kept in {self.folder} ({error})")

    def reject(self, key: Identified, why: str) -> None:
        """Removes the file of `key`, which is damaged or foreign."""
        self._note_rejection(key, why)
        with contextlib.suppress(OSError, UnsafeFolderError), self._opened() as folder:
            os.unlink(self.path(key).name, dir_fd=folder)

    def refuse(self, key: Identified, plan: StoredPlan, why: str) -> None:
        """Passes over the stored plan of `key` in this process; the file stays until a plan is saved in its place.

        For what is whole and was not taken: if the fault is the GPU's, or its memory's, others can still use it.
        """
        self._refused[self.path(key).name] = _digest(plan)
        self._note_rejection(key, why)

    def _note_rejection(self, key: Identified, why: str) -> None:
        _log.warning("ignoring the stored plan %s: %s; it will be built again", self.path(key), why)
        self._count("rejected")

    @contextlib.contextmanager
    def building(self, key: Identified, *, in_background: bool = False) -> Iterator[None]:
        """While a process is in it, others that want to build the same plan wait, and can load it afterwards.

        Args:
            key: Of the plan.
            in_background: Whether nobody waits for it. Those who do build it themselves meanwhile: a helper that has
                to start first, and stands back for everybody else, takes many times as long.
        """
        with contextlib.ExitStack() as stack:
            try:
                if os.access(self.folder, os.W_OK | os.X_OK):  # else nothing will be kept that others could wait for
                    folder = stack.enter_context(self._opened())
                    locks = store_files.folder_of_locks(folder)
                    stack.callback(os.close, locks)
                    name = self.path(key).stem + ".background" * in_background + ".lock"
                    if not stack.enter_context(store_files.held(locks, name, _LOCK_SECONDS)):
                        self._warn("lock", f"plans in {self.folder} are built without a lock (it is held for long)")
            except (OSError, UnsafeFolderError) as error:
                self._warn("lock", f"plans in {self.folder} are built without a lock ({error})")
            yield

    def info(self) -> PlanStoreInfo:
        """The counters."""
        sizes: list[int] = []
        with contextlib.suppress(OSError, UnsafeFolderError), self._opened() as folder:
            sizes = [file.size for file in store_files.listed(folder) if file.is_plan]
        return PlanStoreInfo(self.folder, len(sizes), sum(sizes), self.capacity, **self._counters)

    def clear(self) -> None:
        """Removes all plans."""
        with contextlib.suppress(OSError, UnsafeFolderError), self._opened() as folder:
            for file in store_files.listed(folder):
                if file.is_plan:
                    with contextlib.suppress(OSError):
                        os.unlink(file.name, dir_fd=folder)

    def _write_or_make_room(self, folder: int, name: str, contents: bytes) -> None:
        """Writes a file; on a disk that is full, others are removed for it."""
        tries, gone = 1, 1
        while not store_files.is_written(folder, name, contents, or_raise=tries == _MAX_TRIES or not gone):
            gone = self._remove(folder, len(contents), name)
            tries += 1

    def _make_room(self, folder: int, added: int, name: str) -> None:
        """Keeps the folder within its capacity when a file of so many bytes and this name comes.

        To look at thousands of files takes longer than to build a plan. So that is done in the first save of a process,
        and afterwards only when there may be too many: all processes add what they save to one number.
        """
        with self._room, store_files.size_of(folder) as size:
            known = size.read() if self._size is not None else None
            if known is None:
                known = self._size
            if known is None or known + added > self.capacity:
                known = self._shrink(folder, added, name)
            self._size = known + added
            size.write(self._size)

    def _shrink(self, folder: int, added: int, name: str) -> int:
        """Removes what has not been used for longest if a file that comes needs it; the bytes that are left."""
        store_files.sweep(folder)
        left = sum(file.size for file in store_files.listed(folder) if file.name != name)
        if left + added > self.capacity:
            left -= self._remove(folder, left + added - int(_LEFT * self.capacity), name)
        return max(0, left)

    def _remove(self, folder: int, wanted: int, name: str) -> int:
        """Removes so many bytes, the least recently used files first; not the file of this name. Those that went."""
        gone = store_files.remove_oldest(folder, wanted, name)
        for _ in gone:
            self._count("evictions")
        return sum(gone)

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
