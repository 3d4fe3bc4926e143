"""Settings of the process that a `with` statement may end, in whatever order threads enter and leave them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Override(Generic[T]):
    """A value that a setting was given: it stays, or ends with a `with` statement."""

    def __init__(self, overrides: Overrides[T], value: T) -> None:
        self._overrides = overrides
        self._entry = _Entry(value, weakref.ref(self))
        overrides._add(self._entry)

    def _enter(self) -> None:
        self._entry.entered = True

    def __exit__(self, *_: object) -> None:
        self._overrides._remove(self._entry)


class _Entry(Generic[T]):
    """A value, whether a `with` statement has it, and what could still be entered."""

    def __init__(self, value: T, use: weakref.ref[Any]) -> None:
        self.value = value
        self.use = use
        self.entered = False

    @property
    def stays(self) -> bool:
        return not self.entered and self.use() is None


class Overrides(Generic[T]):
    """The values that one setting was given, of which the latest that has not ended is in force.

    Args:
        get: Gives what is in force.
        put: Sets it.
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
            elif self._entries[-1].stays:  # it is never taken back: what follows takes its place
                self._entries.pop()
            self._entries.append(entry)
            self._put(entry.value)

    def _remove(self, entry: _Entry[T]) -> None:
        """Takes a value back, and with it what was set to stay while it was in force."""
        with self._lock:
            if entry not in self._entries:
                return
            begin = end = self._entries.index(entry)
            while end + 1 < len(self._entries) and not self._entries[end + 1].entered:
                end += 1
            del self._entries[begin : end + 1]
            self._put(self._entries[-1].value if self._entries else self._base)


# Locks that a forked child does not inherit as taken: the thread that would give them back is not in it.


LockT = TypeVar("LockT")


def renewed_in_children(lock: LockT) -> LockT:
    """A lock of `threading` that lives as long as the process, free in every forked child."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
