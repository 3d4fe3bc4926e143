"""Which plan store this process uses: `use_plan_store`'s, what the environment says, or the user's cache folder."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.plans.private_folders import OpenFolderError, UnsafeFolderError, in_users_cache
from cudnn_sdpa.plans.store import DEFAULT_BYTES, PlanStore
from cudnn_sdpa.settings import Override, Overrides, renewed_in_children

_log = logging.getLogger("cudnn_sdpa")

#: Environment variable that names the store's folder; unset or empty, it is in the user's cache folder.
VARIABLE = "CUDNN_SDPA_PLAN_DIR"
OFF = "off"


class PlanStoreUse(Override[tuple[PlanStore | None, bool]]):
    """What `use_plan_store` returns: leave it alone, or use it in a `with` statement to go back to what was before.

    Attributes:
        store: The store in use; None if plans are not kept.
    """

    def __init__(self, store: PlanStore | None) -> None:
        self.store = store
        super().__init__(_overrides, (store, True))

    def __enter__(self) -> PlanStore | None:
        self._enter()
        return self.store


class _Setting:
    """The store of this process; not known, and no folder made for it, until a plan is first looked for."""

    store: PlanStore | None = None
    known = False


_setting_lock = renewed_in_children(threading.Lock())


def _put(setting: tuple[PlanStore | None, bool]) -> None:
    with _setting_lock:
        _Setting.store, _Setting.known = setting


_overrides = Overrides(lambda: (_Setting.store, _Setting.known), _put)


def active() -> PlanStore | None:
    """The plan store in use."""
    if not _Setting.known:
        with _setting_lock:
            if not _Setting.known:
                _Setting.store = _from_environment()
                _Setting.known = True
    return _Setting.store


def folder_of_environment() -> Path | None:
    """The folder that a process uses which chooses none, there or not; None if the environment switches plans off.

    Raises:
        UnsafeFolderError: The environment names none, and the user has no place for one.
    """
    folder = os.environ.get(VARIABLE, "")
    if is_off(folder):
        return None
    return _absolute(folder) if folder else _default_folder()


def _from_environment() -> PlanStore | None:
    folder = os.environ.get(VARIABLE, "")
    if is_off(folder):
        return None
    try:
        return PlanStore(_absolute(folder)) if folder else PlanStore(_default_folder(), complaints=logging.INFO)
    except UnsafeFolderError as error:
        if folder:
            _log.warning("plans are not kept, in spite of %s: %s", VARIABLE, error)
        else:  # nobody asked for it, but who would have one is told what keeps it from being used
            level = logging.WARNING if isinstance(error, OpenFolderError) else logging.INFO
            text = "plans are not kept for later processes: %s; %s can name another folder"
            _log.log(level, text, error, VARIABLE)
        return None


def _default_folder() -> Path:
    """The folder "plans" in the user's cache folder."""
    return in_users_cache("plans")


def use_plan_store(path: str | os.PathLike[str] | None = None, *, capacity: int = DEFAULT_BYTES) -> PlanStoreUse:
    """Chooses the folder of compiled plans, from which this process and later ones load them instead of building.

    A plan that is loaded takes some milliseconds, one that is built 30 to 700. What is loaded is checked against its
    digest and against the whole key, of which the GPU's properties and the versions of cuDNN, its frontend and this
    package are part; what does not fit is ignored, removed and built again, with a warning of the logger "cudnn_sdpa".
    Plans are code for the GPU: the folder must belong to the user or to root, and nobody else may write to it.

    The setting holds for the whole process, until the end of the `with` statement if it is used in one. Without a
    call, the environment variable `CUDNN_SDPA_PLAN_DIR` names the folder; "off", in any case, is none. Unset, it is
    "plans" in the user's cache folder, usually `~/.cache/cudnn_sdpa/plans`, made when the first plan is looked for.
    Where that cannot be used, plans are not kept, which is logged as information; as a warning for a folder that the
    variable names, or that is open to others.

    Args:
        path: The folder, which is made if it is not there. None is the one in the user's cache folder; "off" is none.
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
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise OptionError("path", repr(path), 'the path of a folder, "off", or None')
    return PlanStoreUse(None if path is not None and is_off(path) else open_store(path, "path", capacity))


def is_off(path: str | os.PathLike[str]) -> bool:
    """Whether no folder is meant: "off", in capitals or not."""
    return isinstance(path, str) and path.strip().lower() == OFF


def _absolute(path: str | os.PathLike[str]) -> Path:
    """The folder as it is meant now, wherever the program goes later.

    Raises:
        UnsafeFolderError: It names the home of somebody who is not there.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise UnsafeFolderError(f"{path} cannot be used: {error}") from error


def open_store(path: str | os.PathLike[str] | None, argument: str, capacity: int = DEFAULT_BYTES) -> PlanStore:
    """Opens a folder that the caller named as `argument`; None is the one in the user's cache folder.

    Raises:
        OptionError: It cannot be used or is open to others.
    """
    if path is not None and not os.fspath(path):
        raise OptionError(argument, repr(path), "the path of a folder")
    try:
        return PlanStore(_default_folder() if path is None else _absolute(path), capacity)
    except UnsafeFolderError as error:
        raise OptionError(argument, str(path), f"a folder that only its owner can write to ({error})") from error
