"""Process-wide settings with context managers that threads may enter and leave in any order."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

#: Number of the latest values set by calls whose overrides a `with` statement may still enter.
_MAX_SET = 16


class Override(Generic[T]):
    """A value of a setting: permanent, or for the duration of `with` statements."""

    def __init__(self, overrides: Overrides[T], value: T) -> None:
        self._overrides = overrides
        self._set = _Entry(value)
        self._entered: list[_Entry[T]] = []
        overrides._add(self._set)

    def _enter(self) -> None:
        entry = _Entry(self._set.value, is_entered=True)
        self._entered.append(entry)
        self._overrides._add(entry, instead_of=self._set)

    def __exit__(self, *_: object) -> None:
        self._overrides._leave(self._entered.pop())


@dataclass(eq=False)
class _Entry(Generic[T]):
    """A value that a `with` statement holds, or that a call has set."""

    value: T
    is_entered: bool = False
    has_ended: bool = False


class Overrides(Generic[T]):
    """The overrides of one setting; the latest that has not ended is in force.

    Signal handlers and the garbage collector may change the setting in the middle of a change in their thread.
    """

    def __init__(self, get: Callable[[], T], put: Callable[[T], None]) -> None:
        self._get = get
        self._put = put
        self._entries: list[_Entry[T]] = []
        self._lock = renewed_in_children(threading.RLock())

    def _add(self, entry: _Entry[T], instead_of: _Entry[T] | None = None) -> None:
        """Puts a value in force; for a `with` statement, in place of the value that its override has set."""
        with self._lock:
            if not self._entries:
                self._base = self._get()
            self._entries.append(entry)
            if instead_of is not None:
                self._remove(instead_of)
            latest = self._entries[-_MAX_SET - 1 :]
            if len(latest) > _MAX_SET and not any(each.is_entered for each in latest):
                self._remove(latest[0])  # it would come into force only if all later ones were entered and ended
            self._put_latest()

    def _leave(self, entry: _Entry[T]) -> None:
        """Ends a `with` statement, and the values that calls have set while it was in force."""
        with self._lock:
            later = self._entries[self._entries.index(entry) + 1 :]
            ending = [entry, *itertools.takewhile(lambda each: not each.is_entered, later)]
            for each in ending:
                each.has_ended = True
            self._put_latest()  # before they are removed: the first of later entries reads the base
            for each in ending:
                self._remove(each)

    def _remove(self, entry: _Entry[T]) -> None:
        with contextlib.suppress(ValueError):
            self._entries.remove(entry)

    def _latest(self) -> _Entry[T] | None:
        return next((each for each in reversed(self._entries) if not each.has_ended), None)

    def _put_latest(self) -> None:
        while True:
            latest = self._latest()
            self._put(self._base if latest is None else latest.value)
            if self._latest() is latest:  # a signal handler may have changed the entries meanwhile
                return


LockT = TypeVar("LockT")


def renewed_in_children(lock: LockT) -> LockT:
    """Makes a `threading` lock that lives as long as the process free in every forked child.

    Otherwise a lock that another thread holds at the fork would never be released in the child.
    """
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
