"""Private folders: only their owner and root can write to them, as OpenSSH's `StrictModes` requires for keys.

Owning a folder is not enough: anyone who can write to a parent folder can replace it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from pathlib import Path

import platformdirs

#: Maximum number of symbolic links to follow, as on Linux.
_MAX_LINKS = 40

#: Environment variable with colon-separated folders that are not checked: the user trusts everyone with write access,
#: as on a volume mounted for one program only.
TRUSTED_VARIABLE = "CUDNN_SDPA_TRUSTED_FOLDERS"

_OR_TRUST = f"or trust all users with write access, with the environment variable {TRUSTED_VARIABLE}="


class UnsafeFolderError(Exception):
    pass


class OpenFolderError(UnsafeFolderError):
    pass


def is_private(status: os.stat_result) -> bool:
    return (
        not _acts_for_another()
        and status.st_uid in (os.geteuid(), 0)
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def open_private(folder: Path, *, make: bool = True) -> int:
    """A descriptor of a folder that only this user and root can change or replace, even if its path changes.

    The path is absolute. `make` creates it, with missing parents, all with mode 0700.
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
    if status.st_uid not in (os.geteuid(), 0):
        raise OpenFolderError(
            f"{folder} belongs to another user (uid {status.st_uid}), who could put code in it; name a folder that "
            "does not exist yet: it is created for this user"
        )
    raise OpenFolderError(
        f"{folder} is writable by others, who could put code in it; make it private with: chmod go-w {folder}"
    )


def check_above(folder: Path) -> None:
    """Checks that no other user can replace a folder, which need not exist yet."""
    with contextlib.suppress(FileNotFoundError):
        _walk(folder, make=False)


def _walk(folder: Path, make: bool) -> str:
    if _acts_for_another():
        raise UnsafeFolderError(
            f"{folder} cannot be used: this process acts as user {os.geteuid()} for user {os.getuid()}, whose "
            "environment names folders, and stores nothing"
        )
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
                raise UnsafeFolderError(f"{folder} has too many symbolic links in its path")
            if not _is_trustworthy(status.st_uid):
                raise OpenFolderError(f"{path} is a symbolic link that belongs to another user; name its target")
            target = Path(os.readlink(path))  # noqa: PTH115
            current = "/" if target.is_absolute() else current
            rest = [*(part for part in target.parts if part != "/"), *rest]
        elif not stat.S_ISDIR(status.st_mode):
            raise UnsafeFolderError(f"{path} cannot be used: it is not a folder")
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
    with contextlib.suppress(FileExistsError):  # another process was faster
        os.mkdir(path, 0o700)  # noqa: PTH102
    return os.lstat(path)


def _check(path: str, status: os.stat_result) -> None:
    """Checks that no other user can replace this user's entries in a folder.

    In a sticky folder like /tmp, every user may add entries but replace only their own; the entry is checked next.
    """
    trusted = [name.strip() for name in os.environ.get(TRUSTED_VARIABLE, "").split(os.pathsep)]
    if path in [name.rstrip("/") or name for name in trusted]:
        return
    if not _is_trustworthy(status.st_uid):
        raise OpenFolderError(
            f"{path} belongs to another user (uid {status.st_uid}), who could replace the folders in it; name a folder "
            f"elsewhere, {_OR_TRUST}{path}"
        )
    open_to = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not open_to or status.st_mode & stat.S_ISVTX:
        return
    if open_to == stat.S_IWGRP and _is_users_own_group(status.st_gid):
        return
    raise OpenFolderError(
        f"{path} is writable by others, who could replace the folders in it; make it private with: chmod go-w {path}; "
        f"or let only owners replace entries, with: chmod +t {path}; {_OR_TRUST}{path}"
    )


def _is_trustworthy(owner: int) -> bool:
    """A parent folder belongs to this user or root.

    In a user namespace of this user only (Apptainer, bubblewrap, `unshare`), root's files have the overflow uid.
    """
    return owner in (os.geteuid(), 0) or owner == _overflow_uid()


@functools.cache
def _overflow_uid() -> int | None:
    """The uid shown for all users outside this namespace; None if it may be a user inside."""
    try:
        owner = int(Path("/proc/sys/fs/overflowuid").read_text())
        ranges = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    return None if any(first <= owner < first + count for first, _, count in ranges) else owner


def _acts_for_another() -> bool:
    """A set-uid program has the rights of another user than its caller's."""
    return os.getuid() != os.geteuid()


@functools.cache
def _is_users_own_group(group: int) -> bool:
    """A user's private group has no other members, as Debian's OpenSSH decides it.

    Accounts whose primary group it is are not among its listed members.
    """
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    if user.pw_gid != group or entry.gr_name != user.pw_name or not set(entry.gr_mem) <= {user.pw_name}:
        return False
    return all(other.pw_uid == user.pw_uid for other in pwd.getpwall() if other.pw_gid == group)


def named_or_in_cache(named: str | os.PathLike[str] | None, default: str) -> Path:
    """The absolute path of a folder that the user names, or one in the user's cache folder."""
    try:
        return Path(named).expanduser().absolute() if named else in_users_cache(default)
    except RuntimeError as error:  # the home of an unknown user
        raise UnsafeFolderError(f"{named} cannot be used: {error}") from error


def in_users_cache(name: str) -> Path:
    try:
        cache = Path(platformdirs.user_cache_dir("cudnn_sdpa"))
    except RuntimeError:  # new platformdirs raise this without a home; old ones leave the "~" in the path
        cache = Path("~")
    if not cache.is_absolute():
        raise UnsafeFolderError("the user has no cache folder: there is no home and no absolute XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # without a home, the environment names another cache folder
        home = Path.home()
        if cache.is_relative_to(home) and not os.access(home, os.F_OK):
            raise UnsafeFolderError(f"there is no home folder {home}")
    return cache / name
