"""The plan store: plans on disk, built by one process and loaded by later ones.

A plan is code for the GPU, so folders and files that others may write to are refused. A file is written under a
temporary name and renamed, so it is always complete or absent. Nothing is locked: processes that miss a plan at the
same time all build it, and the last file stays. If the store fails, plans are built as if there were none.

A file is a line with the format, a line of JSON with the plan's description, and its bytes. Nothing is unpickled or
evaluated. The description holds the whole key, so that plans are never confused, and the digest of the bytes, so that a
damaged file is detected before cuDNN reads it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cudnn_sdpa.graph.diagnostics import shortened
from cudnn_sdpa.plans import private_folders
from cudnn_sdpa.plans.private_folders import UnsafeFolderError, is_private
from cudnn_sdpa.settings import renewed_in_children

_log = logging.getLogger("cudnn_sdpa")

DEFAULT_BYTES = 1 << 30

#: The fraction of its capacity that a full store keeps, so that not every later save has to evict.
_KEPT_FRACTION = 0.9

#: The fraction of its capacity that a process writes before it rescans the folder, to which others write too.
_UNSEEN_FRACTION = 1 / 16

#: Age at which a file that is being written belongs to a killed process.
_ABANDONED_SECONDS = 3600.0

#: Tolerance for timestamps in the future; later ones come from a wrong clock.
_CLOCK_SECONDS = 1.0

#: Format version, part of every file name; changes whenever files of older versions could be misread.
FORMAT = 1
_MAGIC = f"cudnn_sdpa plan, format {FORMAT}\n".encode()

#: Begins the names of files that are being written.
TEMPORARY = ".writing-"

#: Larger files are not read; plans take 60 to 300 KB.
MAX_BYTES = 64 << 20

#: The facts of a plan in its description, with their types.
_FACTS = {"engine": (str,), "knobs": (dict,), "workspace": (int,), "build_seconds": (int, float)}

#: Guards the counters of all stores; a signal handler may call within.
_mutex = renewed_in_children(threading.RLock())


class BadPlanFileError(Exception):
    pass


@dataclass(frozen=True)
class StoredPlan:
    """A compiled plan and its description; files of older versions lack `tuned`."""

    identity: dict[str, object]
    engine: str
    knobs: dict[str, int]
    workspace: int
    build_seconds: float
    data: bytes
    tuned: bool = False

    @classmethod
    def of_text(cls, key: Identified, engine: str, text: str) -> StoredPlan:
        """A text about an engine, kept as plans are."""
        return cls(
            key.identity(), engine=engine, knobs={}, workspace=0, build_seconds=0.0, data=text.encode(), tuned=True
        )

    def encode(self) -> bytes:
        facts = {name: getattr(self, name) for name in (*_FACTS, "tuned")}
        line = canonical({"key": self.identity, "size": len(self.data), **facts})
        return b"".join([_MAGIC, _digest(line, self.data).encode(), b"\n", line, b"\n", self.data])

    @classmethod
    def decode(cls, contents: bytes) -> StoredPlan:
        if not contents.startswith(_MAGIC):
            raise BadPlanFileError("it is not a plan in this version's format")
        digest, _, rest = contents[len(_MAGIC) :].partition(b"\n")
        line, _, data = rest.partition(b"\n")
        if digest != _digest(line, data).encode():
            raise BadPlanFileError("its contents do not match its digest")
        try:
            description = json.loads(line)
            facts = {name: description[name] for name in _FACTS}
            wrong = [name for name, allowed in _FACTS.items() if type(facts[name]) not in allowed]
            wrong += ["key"] if type(description["key"]) is not dict else []
            if not wrong and any(type(value) is not int for value in description["knobs"].values()):
                wrong.append("knobs")
            wrong += ["workspace"] if not wrong and description["workspace"] < 0 else []
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadPlanFileError(f"its description cannot be read ({shortened(str(error))})") from error
        if wrong:
            raise BadPlanFileError(f"its description is not a plan's: {', '.join(wrong)}")
        return cls(identity=description["key"], data=data, tuned=description.get("tuned") is True, **facts)


def canonical(description: object) -> bytes:
    return json.dumps(description, sort_keys=True, separators=(",", ":")).encode()


def _digest(line: bytes, data: bytes) -> str:
    return hashlib.sha256(line + b"\n" + data).hexdigest()


def read(name: str, folder: int) -> bytes | None:
    """The contents of a file in an open folder; None if it is missing.

    A file that another user could have written, a special one and a far too large one is a `BadPlanFileError`.
    """
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadPlanFileError("it is not a regular file")
        if not is_private(status):
            raise BadPlanFileError("it belongs to another user, or others may write to it")
        if status.st_size > MAX_BYTES:
            raise BadPlanFileError(f"it has {status.st_size} bytes, more than any plan")
        return file.read(MAX_BYTES)


def write(name: str, folder: int, contents: bytes) -> None:
    """Writes a file of an open folder, complete or not at all, readable for all who may read the folder."""
    temporary = TEMPORARY + os.urandom(8).hex()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
            os.fchmod(file.fileno(), 0o600 | os.fstat(folder).st_mode & 0o044)
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # a file system may refuse times
            touch(temporary, folder)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def touch(name: str, folder: int) -> None:
    """Sets a file's time by the clock that it is compared with; the file system's own is some milliseconds behind."""
    now = time.time_ns()
    os.utime(name, ns=(now, now), dir_fd=folder)


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
    def identity(self) -> dict[str, object]: ...


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
        """
        self.folder = folder.absolute()
        self.capacity = capacity
        self._log_level = log_level
        self._room = 0  # bytes that this process may write before it looks at the folder
        self._counters = dict.fromkeys(("loads", "saves", "rejected", "evictions"), 0)
        self._warned: set[str] = set()
        self.write_error = ""  # of the last plan that could not be saved
        with self._opened(make=True):
            pass

    @contextlib.contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[int]:
        descriptor = private_folders.open_private(self.folder, make=make)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def path(self, key: Identified) -> Path:
        """The path of the plan of `key`, existing or not."""
        return self.folder / _name_of(key)

    def load(self, key: Identified, *, only_tuned: bool = False) -> StoredPlan | None:
        """The stored plan of `key`; None if there is none that can be trusted, or `only_tuned` excludes it."""
        name = self.path(key).name
        try:
            with self._opened() as folder:
                contents = read(name, folder)
                if contents is None:
                    return None
                plan = StoredPlan.decode(contents)
                if canonical(plan.identity) != canonical(key.identity()):
                    raise BadPlanFileError("it belongs to another plan")
                if only_tuned and not plan.tuned:
                    return None
                with contextlib.suppress(OSError):
                    touch(name, folder)  # a use, for the order of eviction
        except BadPlanFileError as error:
            self.reject(key, str(error))
            return None
        except (OSError, UnsafeFolderError) as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # the next save recreates a removed folder
                self._warn("stored plans cannot be read from %s (%s)", error)
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
                try:
                    write(name, folder, contents)
                except OSError as error:
                    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                    # A full disk: plans of the store make room, with some to spare for the file system.
                    if not is_full or not self._evict(folder, 2 * len(contents), name):
                        raise
                    write(name, folder, contents)
            self._count("saves")
        except (OSError, UnsafeFolderError) as error:
            self.write_error = str(error)
            self._warn("plans cannot be saved in %s (%s)", error)
            return False
        return True

    def reject(self, key: Identified, why: str) -> None:
        """Removes the file of `key`, which is damaged or holds another plan."""
        self.ignore(key, why)
        with contextlib.suppress(OSError, UnsafeFolderError), self._opened() as folder:
            os.unlink(self.path(key).name, dir_fd=folder)

    def ignore(self, key: Identified, why: str) -> None:
        """Counts and logs an intact plan of `key` that cuDNN rejects; the file stays until a new plan replaces it.

        The cause may be this GPU or its memory, and other processes may still load the plan.
        """
        _log.warning("ignoring the stored plan %s: %s; it will be built again", self.path(key), why)
        self._count("rejected")

    def info(self) -> PlanStoreInfo:
        """The counters of the store."""
        sizes: list[int] = []
        with contextlib.suppress(OSError, UnsafeFolderError), self._opened() as folder:
            sizes = [file.size for file in _listed(folder) if file.is_plan]
        return PlanStoreInfo(
            folder=self.folder, plans=len(sizes), bytes=sum(sizes), capacity=self.capacity, **self._counters
        )

    def clear(self) -> None:
        """Removes all plans."""
        with contextlib.suppress(OSError, UnsafeFolderError), self._opened() as folder:
            for file in _listed(folder):
                if file.is_plan:
                    with contextlib.suppress(OSError):
                        os.unlink(file.name, dir_fd=folder)

    def _make_room(self, folder: int, added: int, name: str) -> None:
        """Keeps the folder within its capacity when a file of this size and name is added.

        Scanning thousands of files takes longer than building a plan, so scans are rare. Meanwhile other processes
        write, and each may exceed the capacity by a fraction.
        """
        if added > self._room:
            _sweep(folder)
            size = sum(file.size for file in _listed(folder) if file.name != name)
            if size + added > self.capacity:
                size -= self._evict(folder, size + added - int(_KEPT_FRACTION * self.capacity), name)
            self._room = min(int(_UNSEEN_FRACTION * self.capacity), self.capacity - size)
        self._room -= added

    def _evict(self, folder: int, min_bytes: int, name: str) -> int:
        latest, freed = time.time() + _CLOCK_SECONDS, 0
        plans = [file for file in _listed(folder) if file.is_plan and file.name != name]
        # Files of the future, from a wrong clock, would never be evicted otherwise.
        for file in sorted(plans, key=lambda file: file.used if file.used < latest else 0.0):
            if freed >= min_bytes:
                break
            try:
                os.unlink(file.name, dir_fd=folder)
                self._count("evictions")
            except FileNotFoundError:
                pass  # another process has freed it
            except OSError:
                continue
            freed += file.size
        return freed

    def _count(self, counter: str) -> None:
        with _mutex:
            self._counters[counter] += 1

    def _warn(self, text: str, error: Exception) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.log(self._log_level, text, self.folder, error)

    def __repr__(self) -> str:
        return f"PlanStore({str(self.folder)!r})"


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    used: float

    @property
    def is_plan(self) -> bool:
        return _is_plan_name(self.name)


@functools.lru_cache(maxsize=4096)
def _name_of(key: Identified) -> str:
    return hashlib.sha256(canonical({"format": FORMAT, "key": key.identity()})).hexdigest() + ".plan"


def _is_plan_name(name: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{64}\.plan", name) is not None


def _listed(folder: int) -> list[_File]:
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_plan_name(entry.name) or entry.name.startswith(TEMPORARY):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    files.append(_File(entry.name, status.st_size, status.st_mtime))
    return files


def _sweep(folder: int) -> None:
    for file in _listed(folder):
        if not file.is_plan and abs(time.time() - file.used) > _ABANDONED_SECONDS:
            with contextlib.suppress(OSError):
                os.unlink(file.name, dir_fd=folder)
