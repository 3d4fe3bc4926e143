"""The plan store of this process: from `use_plan_store`, the environment, or the user's cache folder."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.plans import private_folders
from cudnn_sdpa.plans.private_folders import OpenFolderError, UnsafeFolderError
from cudnn_sdpa.plans.store import DEFAULT_BYTES, PlanStore
from cudnn_sdpa.settings import Override, Overrides, renewed_in_children

_log = logging.getLogger("cudnn_sdpa")

#: Environment variable that names the store's folder; unset or empty, it is in the user's cache folder.
VARIABLE = "CUDNN_SDPA_PLAN_DIR"
OFF = "off"


class PlanStoreUse(Override[tuple[PlanStore | None, bool]]):
    """The result of `use_plan_store`: ignore it, or use it in a `with` statement to restore the previous store.

    Attributes:
        store: The store in use; None if plans are not stored.
    """

    def __init__(self, store: PlanStore | None) -> None:
        self.store = store
        super().__init__(_overrides, (store, True))

    def __enter__(self) -> PlanStore | None:
        self._enter()
        return self.store


class Setting:
    store: PlanStore | None = None
    is_resolved = False


_setting_lock = renewed_in_children(threading.RLock())


def _put(setting: tuple[PlanStore | None, bool]) -> None:
    with _setting_lock:
        Setting.store, Setting.is_resolved = setting


_overrides = Overrides(lambda: (Setting.store, Setting.is_resolved), _put)


def active() -> PlanStore | None:
    if not Setting.is_resolved:
        with _setting_lock:
            if not Setting.is_resolved:
                Setting.store = _from_environment()
                Setting.is_resolved = True
    return Setting.store


def folder_of_environment() -> Path | None:
    """The default folder, existing or not; None if the environment switches storing off."""
    folder = os.environ.get(VARIABLE, "")
    return None if is_off(folder) else private_folders.named_or_in_cache(folder, "plans")


def _from_environment() -> PlanStore | None:
    is_named = bool(os.environ.get(VARIABLE))
    try:
        folder = folder_of_environment()
        level = logging.WARNING if is_named else logging.INFO
        return None if folder is None else PlanStore(folder, log_level=level)
    except UnsafeFolderError as error:
        if is_named:
            _log.warning("plans are not stored despite %s: %s", VARIABLE, error)
        else:  # not requested, so only information
            level = logging.WARNING if isinstance(error, OpenFolderError) else logging.INFO
            text = "plans are not stored for later processes: %s; %s can name another folder"
            _log.log(level, text, error, VARIABLE)
        return None


def use_plan_store(path: str | os.PathLike[str] | None = None, *, capacity: int = DEFAULT_BYTES) -> PlanStoreUse:
    """Sets the folder of compiled plans, from which this process and later ones load plans instead of building them.

    Loading a plan takes some milliseconds, building one 30 to 700. A loaded plan is checked against its digest and the
    whole key, which includes the GPU's properties and the versions of cuDNN, its frontend and this package. A mismatch
    is removed and built again, with a warning of the logger "cudnn_sdpa". Plans are code for the GPU: the folder must
    belong to the user or to root, and no other user may write to it.

    The setting is process-wide, and ends with the `with` statement if it is used in one. Without a call, the
    environment variable `CUDNN_SDPA_PLAN_DIR` names the folder; "off", in upper or lower case, disables storing. If it
    is unset, the folder is "plans" in the user's cache folder, usually `~/.cache/cudnn_sdpa/plans`, created at the
    first lookup. If that is unusable, plans are not stored; this is logged at level info, or as a warning for a folder
    that the variable names or that is open to others.

    Args:
        path: The folder, created if missing. None is the one in the user's cache folder; "off" disables storing.
        capacity: Maximum number of bytes (a plan takes 60 to 300 KB); the least recently used plans are removed first.

    Returns:
        A context manager whose value is the store, for its `info()` and `clear()`.

    Raises:
        OptionError: The folder cannot be used or is open to others, or the capacity is not a positive integer.

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
    return isinstance(path, str) and path.strip().lower() == OFF


def open_store(path: str | os.PathLike[str] | None, argument: str, capacity: int = DEFAULT_BYTES) -> PlanStore:
    """Opens a folder that the caller named as `argument`; None is the one in the user's cache folder."""
    is_path = isinstance(path, (str, os.PathLike)) and os.fspath(path) and "\0" not in os.fspath(path)
    if not (path is None or is_path):
        raise OptionError(argument, repr(path), "the path of a folder")
    try:
        return PlanStore(private_folders.named_or_in_cache(path, "plans"), capacity)
    except UnsafeFolderError as error:
        raise OptionError(argument, str(path), f"a folder that only its owner can write to ({error})") from error
