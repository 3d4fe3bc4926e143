"""Locks that a forked child does not inherit as taken: the thread that would give them back is not in it."""

from __future__ import annotations

import os
from typing import TypeVar

LockT = TypeVar("LockT")


def renewed_in_children(lock: LockT) -> LockT:
    """A lock of `threading` that lives as long as the process, free in every forked child."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
