"""Process-wide settings with context managers that threads may enter and leave in any order."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Override(Generic[T]):
    """A value of a setting: permanent, or for the duration of a `with` statement."""

    def __init__(self, overrides: Overrides[T], value: T) -> None:
        self._overrides = overrides
        self._entry = _Entry(value, weakref.ref(self))
        overrides._add(self._entry)

    def _enter(self) -> None:
        self._entry.entered = True

    def __exit__(self, *_: object) -> None:
        self._overrides._remove(self._entry)


class _Entry(Generic[T]):
    """A value, whether a `with` statement holds it, and a weak reference to its override."""

    def __init__(self, value: T, override: weakref.ref[Override[T]]) -> None:
        self.value = value
        self.override = override
        self.entered = False

    @property
    def is_permanent(self) -> bool:
        """Whether no `with` statement has entered the override, and none can any more."""
        return not self.entered and self.override() is None


class Overrides(Generic[T]):
    """The overrides of one setting; the latest that has not ended is in force.

    Args:
        get: Returns the value in force.
        put: Sets the value in force.
    """

    def __init__(self, get: Callable[[], T], put: Callable[[T], None]) -> None:
        self._get = get
        self._put = put
        self._entries: list[_Entry[T]] = []
        self._lock = renewed_in_children(threading.Lock())

    def _add(self, entry: _Entry[T]) -> None:
        with self._lock:
            if not self._entries:
                self._base = self._get()
            # Of two permanent values, the first never comes into force again: whatever ends the second ends both.
            while len(self._entries) > 1 and all(each.is_permanent for each in self._entries[-2:]):
                del self._entries[-2]
            self._entries.append(entry)
            self._put(entry.value)

    def _remove(self, entry: _Entry[T]) -> None:
        """Removes a value, and the permanent ones that were set while it was in force."""
        with self._lock:
            if entry not in self._entries:
                return
            start = end = self._entries.index(entry)
            while end + 1 < len(self._entries) and not self._entries[end + 1].entered:
                end += 1
            del self._entries[start : end + 1]
            self._put(self._entries[-1].value if self._entries else self._base)


LockT = TypeVar("LockT")


def renewed_in_children(lock: LockT) -> LockT:
    """Makes a `threading` lock that lives as long as the process free in every forked child.

    Otherwise a lock that another thread holds at the fork would never be released in the child.
    """
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
