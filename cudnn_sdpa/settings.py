"""Process-wide settings with context managers that threads may enter and leave in any order."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Override(Generic[T]):
    """A value of a setting: permanent, or for the duration of `with` statements."""

    def __init__(self, overrides: Overrides[T], value: T) -> None:
        self._overrides = overrides
        self._value = value
        self._created = _Entry(value, weakref.ref(self))
        self._entered: list[_Entry[T]] = []
        overrides._add(self._created)

    def _enter(self) -> None:
        entry = _Entry(self._value)
        self._entered.append(entry)
        self._overrides._enter(self._created, entry)

    def __exit__(self, *_: object) -> None:
        self._overrides._leave(self._entered.pop())


class _Entry(Generic[T]):
    """A value that a `with` statement holds, or one that was set by a call, with a weak reference to its override."""

    def __init__(self, value: T, override: weakref.ref[Override[T]] | None = None) -> None:
        self.value = value
        self.override = override

    @property
    def is_entered(self) -> bool:
        """Whether a `with` statement holds it."""
        return self.override is None

    @property
    def is_permanent(self) -> bool:
        """Whether a call has set it, and no `with` statement can enter its override any more."""
        return self.override is not None and self.override() is None


class Overrides(Generic[T]):
    """The overrides of one setting; the latest that has not ended is in force.

    Args:
        get: Returns the value in force, of any kind that `put` takes.
        put: Sets the value in force.
    """

    def __init__(self, get: Callable[[], T], put: Callable[[T], None]) -> None:
        self._get = get
        self._put = put
        self._entries: list[_Entry[T]] = []
        self._lock = renewed_in_children(threading.RLock())
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_changing = False
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._is_changing = False

    def _change(self, change: Callable[[], None]) -> None:
        """Makes a change, after those that it interrupts in this thread.

        The garbage collector may end a generator's `with` statement, and a signal handler may set a value, anywhere.
        """
        self._waiting.append(change)
        with self._lock:
            if self._is_changing:
                return
            self._is_changing = True
            try:
                while self._waiting:
                    self._waiting.popleft()()
            finally:
                self._is_changing = False

    def _add(self, entry: _Entry[T]) -> None:
        """Puts a value in force, for good or until a `with` statement enters its override."""
        self._change(functools.partial(self._replace, None, entry))

    def _enter(self, created: _Entry[T], entry: _Entry[T]) -> None:
        """Puts the value of a `with` statement in force, in place of the one that its override has set."""
        self._change(functools.partial(self._replace, created, entry))

    def _replace(self, old: _Entry[T] | None, new: _Entry[T]) -> None:
        entries = self._entries
        if not entries:
            self._base = self._get()
        if old in entries:
            entries.remove(old)
        # What lies below a permanent value never comes into force again, unless a `with` statement holds it.
        while len(entries) > 1 and entries[-1].is_permanent and not entries[-2].is_entered:
            del entries[-2]
        entries.append(new)
        self._put(new.value)

    def _leave(self, entry: _Entry[T]) -> None:
        """Removes the value of a `with` statement, and those that calls have set while it was in force."""
        self._change(functools.partial(self._remove, entry))

    def _remove(self, entry: _Entry[T]) -> None:
        entries = self._entries
        start = end = entries.index(entry)
        while end + 1 < len(entries) and not entries[end + 1].is_entered:
            end += 1
        del entries[start : end + 1]
        self._put(entries[-1].value if entries else self._base)


LockT = TypeVar("LockT")


def renewed_in_children(lock: LockT) -> LockT:
    """Makes a `threading` lock that lives as long as the process free in every forked child.

    Otherwise a lock that another thread holds at the fork would never be released in the child.
    """
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
