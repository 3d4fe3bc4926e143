"""Folders in which nobody else can have put anything, as OpenSSH asks of those with keys (its `StrictModes`).

It is not enough that a folder is its owner's: who may write to a folder above it can put another one in its place.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from pathlib import Path

import platformdirs

#: As many links as Linux follows.
_MAX_LINKS = 40

#: Environment variable with folders that are not looked at on the way, with colons between them: the user trusts
#: whoever may write to them, as on a volume that is mounted for one program alone.
TRUSTED_VARIABLE = "CUDNN_SDPA_TRUSTED_FOLDERS"

_OR_TRUST = f"or trust all who may write to it, with the environment variable {TRUSTED_VARIABLE}="


class UnsafeFolderError(Exception):
    """A folder that somebody else may write to, or that cannot be used; the message says why."""


class OpenFolderError(UnsafeFolderError):
    """A folder that could be used, if nobody else could put something in its place or into it."""


def is_private(status: os.stat_result) -> bool:
    """Whether nobody but this user and the system's administrator can have written something."""
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def open_private(folder: Path, *, make: bool = True) -> int:
    """Opens a folder that only this user and the administrator can change or replace.

    Args:
        folder: An absolute path.
        make: Whether it is made if it is not there, and what is missing above it, all with mode 0700.

    Returns:
        A descriptor, by which files in it are reached whatever becomes of its path.

    Raises:
        UnsafeFolderError: It is open to others, is no folder, or cannot be used.
    """
    try:
        real = _walk(folder, make)
        descriptor = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UnsafeFolderError(f"{folder} cannot be used: {error}") from error
    status = os.fstat(descriptor)
    if is_private(status):
        return descriptor
    os.close(descriptor)
    if status.st_uid not in (os.getuid(), 0):
        raise OpenFolderError(
            f"{folder} belongs to another user (uid {status.st_uid}), who could put code in it; name a folder that is "
            "not there yet, which is made for this user"
        )
    raise OpenFolderError(
        f"{folder} is writable by others, who could put code in it; make it private with: chmod go-w {folder}"
    )


def check_above(folder: Path) -> None:
    """Makes sure that nobody else can put another folder in the place of one that need not be there yet.

    Raises:
        UnsafeFolderError: Somebody can.
        OSError: It cannot be looked at.
    """
    with contextlib.suppress(FileNotFoundError):
        _walk(folder, make=False)


def _walk(folder: Path, make: bool) -> str:
    """The path without links, every folder above it looked at on the way, as the system follows it."""
    current, links, rest = "/", 0, list(folder.parts[1:])
    _check(current, os.lstat(current))
    while rest:
        name = rest.pop(0)
        if name == "..":
            current = os.path.dirname(current)  # noqa: PTH120 - links are resolved already
            continue
        path = os.path.join(current, name)  # noqa: PTH118 - the same
        status = _status(path, make)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise UnsafeFolderError(f"{folder} leads through too many links")
            if not _is_trustworthy(status.st_uid):
                raise OpenFolderError(f"{path} is a link that belongs to another user; name the folder it leads to")
            target = Path(os.readlink(path))  # noqa: PTH115
            current = "/" if target.is_absolute() else current
            rest = [*(part for part in target.parts if part != "/"), *rest]
        elif not stat.S_ISDIR(status.st_mode):
            raise UnsafeFolderError(f"{path} cannot be used: it is no folder")
        else:
            if rest:
                _check(path, status)
            current = path
    return current


def _status(path: str, make: bool) -> os.stat_result:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):  # another process was quicker
        os.mkdir(path, 0o700)  # noqa: PTH102
    return os.lstat(path)


def _check(path: str, status: os.stat_result) -> None:
    """Makes sure that nobody else can replace what is in a folder and belongs to this user.

    In a folder like /tmp everybody may write and nobody may replace what is another's; what is in it is looked at next.
    """
    if path in os.environ.get(TRUSTED_VARIABLE, "").split(os.pathsep):
        return
    if not _is_trustworthy(status.st_uid):
        raise OpenFolderError(
            f"{path} belongs to another user (uid {status.st_uid}), who could put another folder in the place of what "
            f"is in it; name a folder outside, {_OR_TRUST}{path}"
        )
    open_to = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not open_to or status.st_mode & stat.S_ISVTX:
        return
    if open_to == stat.S_IWGRP and _is_users_own_group(status.st_gid):
        return
    raise OpenFolderError(
        f"{path} is writable by others, who could put another folder in the place of what is in it; make it private "
        f"with: chmod go-w {path}; or have only owners replace what is in it, with: chmod +t {path}; {_OR_TRUST}{path}"
    )


def _is_trustworthy(owner: int) -> bool:
    """Whether the owner of a folder above is this user or the administrator.

    Where a container knows this user alone (Apptainer, bubblewrap, `unshare`), the administrator's files belong to
    nobody there.
    """
    return owner in (os.getuid(), 0) or owner == _outsiders()


@functools.cache
def _outsiders() -> int | None:
    """The user that all users outside of this namespace are shown as; None where that may be somebody inside."""
    try:
        owner = int(Path("/proc/sys/fs/overflowuid").read_text())
        ranges = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    return None if any(first <= owner < first + count for first, _, count in ranges) else owner


def _is_users_own_group(group: int) -> bool:
    """Whether a group is the one that some systems make for each user, with nobody else in it."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def in_users_cache(name: str) -> Path:
    """A folder of this package's in the user's cache folder, there or not.

    Raises:
        UnsafeFolderError: The user has no cache folder, and no home to make it in.
    """
    try:
        cache = Path(platformdirs.user_cache_dir("cudnn_sdpa"))
    except RuntimeError:  # so does a new platformdirs say that no home is known; an old one leaves the "~" in the path
        cache = Path("~")
    if not cache.is_absolute():
        raise UnsafeFolderError("the user has no cache folder, for lack of a home or an absolute XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no home is known: the environment has named another cache folder
        home = Path.home()
        if cache.is_relative_to(home) and not os.access(home, os.F_OK):
            raise UnsafeFolderError(f"there is no home folder {home}")
    return cache / name
