"""Which plan store this process uses: `use_plan_store`, or what the environment says."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import platformdirs

from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.runtime.store import DEFAULT_BYTES, PlanStore, UnsafeFolderError

_log = logging.getLogger("cudnn_sdpa")

#: Environment variable that names the store's folder.
VARIABLE = "CUDNN_SDPA_PLAN_DIR"
OFF = "off"


class PlanStoreUse:
    """What `use_plan_store` returns: leave it alone, or use it in a `with` statement to go back to what was before.

    Attributes:
        store: The store in use; None if plans are not kept.
    """

    def __init__(self, store: PlanStore | None, before: PlanStore | None) -> None:
        self.store = store
        self._before = before

    def __enter__(self) -> PlanStore | None:
        return self.store

    def __exit__(self, *_: object) -> None:
        _Setting.store = self._before


class _Setting:
    """The store of this process; looked up in the environment when it is first needed."""

    store: PlanStore | None = None
    known = False


_setting_lock = threading.Lock()


def active() -> PlanStore | None:
    """The plan store in use."""
    if not _Setting.known:
        with _setting_lock:
            if not _Setting.known:
                _Setting.store = _from_environment()
                _Setting.known = True
    return _Setting.store


def _from_environment() -> PlanStore | None:
    folder = os.environ.get(VARIABLE, "")
    if not folder or folder == OFF:
        return None
    try:
        return PlanStore(_absolute(folder))
    except UnsafeFolderError as error:
        _log.warning("plans are not kept, in spite of %s: %s", VARIABLE, error)
        return None


def use_plan_store(path: str | os.PathLike[str] | None = None, *, capacity: int = DEFAULT_BYTES) -> PlanStoreUse:
    """Keeps compiled plans in a folder, from which this process and later ones load them instead of building.

    A plan that is loaded takes some milliseconds, one that is built 30 to 700. What is loaded is checked against its
    digest and against the whole key, of which the GPU's properties and the versions of cuDNN, its frontend and this
    package are part; what does not fit is ignored, removed and built again, with a warning of the logger "cudnn_sdpa".
    Plans are code for the GPU: the folder must belong to the user or to root, and nobody else may write to it.

    The setting holds for the whole process, until the end of the `with` statement if it is used in one. Without a
    call, the environment variable `CUDNN_SDPA_PLAN_DIR` names the folder; unset or "off", plans are not kept.

    Args:
        path: The folder, which is made if it is not there. None is "plans" in the user's cache folder; "off" is none.
        capacity: Most bytes that are kept (a plan takes 60 to 300 KB); the least recently used plans go first.

    Returns:
        A context manager whose value is the store, for its `info()` and `clear()`.

    Raises:
        OptionError: The folder cannot be used or is open to others, or the capacity is no positive integer.

    Examples:
        >>> import tempfile, cudnn_sdpa
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with cudnn_sdpa.use_plan_store(folder) as store:
        ...         store.info().plans
        0
    """
    if type(capacity) is not int or capacity < 1:
        raise OptionError("capacity", repr(capacity), "bytes, an integer of at least 1")
    before = active()
    _Setting.store = None if path == OFF else _open(path, capacity)
    return PlanStoreUse(_Setting.store, before)


def _absolute(path: str | os.PathLike[str]) -> Path:
    """The folder as it is meant now, wherever the program goes later."""
    return Path(path).expanduser().absolute()


def _open(path: str | os.PathLike[str] | None, capacity: int) -> PlanStore:
    folder = Path(platformdirs.user_cache_dir("cudnn_sdpa")) / "plans" if path is None else _absolute(path)
    try:
        return PlanStore(folder, capacity)
    except UnsafeFolderError as error:
        raise OptionError("path", str(folder), f"a folder that only its owner can write to ({error})") from error
