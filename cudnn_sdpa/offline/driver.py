"""The environment of a helper process: the machine's own driver, or a stand-in without one."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

from cudnn_sdpa.errors import OfflineError
from cudnn_sdpa.plans import private_folders

_SOURCE = Path(__file__).with_name("stand_in_driver.c")
_MARKER = "cudnn_sdpa_stand_in_driver"

#: Prefix of temporary compilation folders, and the age in seconds of leftovers of killed processes.
_SCRATCH = "tmp"
_ABANDONED_SECONDS = 600.0


def has_real_driver() -> bool:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return not hasattr(library, _MARKER)


def helper_environment() -> dict[str, str]:
    """Environment variables that a helper process needs for planning.

    With a real driver, all GPUs are hidden so that the helper takes no GPU memory. Without one, the stand-in driver is
    first on the library path.
    """
    if has_real_driver():
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    path = [str(stand_in_folder()), os.environ.get("LD_LIBRARY_PATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, path))}


def stand_in_folder() -> Path:
    """The folder of the stand-in driver, compiled on first use into the user's cache folder."""
    if has_real_driver():
        raise OfflineError("this machine has an NVIDIA driver: the stand-in driver must not be used with it")
    source = _SOURCE.read_text()
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    try:
        parent = private_folders.in_users_cache("stand-in-driver")
        folder = parent / digest
        os.close(private_folders.open_private(parent))
        _sweep(parent)
        if not (folder / "libcuda.so.1").exists():
            _compile(source, folder)
        os.close(private_folders.open_private(folder, make=False))
        status = (folder / "libcuda.so.1").lstat()
        if not (stat.S_ISREG(status.st_mode) and private_folders.is_private(status)):
            why = "is a link, belongs to another user or is writable by others"
            raise OfflineError(f"{folder / 'libcuda.so.1'} {why}; remove {folder}")
    except private_folders.UnsafeFolderError as error:
        raise OfflineError(
            f"there is no safe folder for the stand-in driver ({error}). Remove files that others may have put there; "
            "or the environment variable XDG_CACHE_HOME can name another cache folder"
        ) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise OfflineError(
            f"the stand-in driver cannot be made ({error}); the environment variable XDG_CACHE_HOME can "
            "name another cache folder"
        ) from error
    return folder


def compiler() -> str | None:
    candidates = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def _compile(source: str, folder: Path) -> None:
    path = compiler()
    if path is None:
        raise OfflineError(
            "planning for a GPU on a machine without an NVIDIA driver needs a C compiler, and none of $CC, cc, gcc and "
            "clang is on the PATH; install one (on Debian: apt-get install gcc libc6-dev)"
        )
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir(mode=0o700)
        (made / "driver.c").write_text(source)
        command = [path, "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
        result = subprocess.run(command, cwd=made, capture_output=True, text=True, check=False, timeout=120)
        if result.returncode != 0:
            raise OfflineError(f"{path} could not compile the stand-in driver: {result.stderr.strip()[-500:]}")
        (made / "libcuda.so.1").chmod(0o700)  # regardless of the umask
        try:
            made.rename(folder)  # atomic; another process may have been first
        except OSError:
            if not (folder / "libcuda.so.1").exists():
                raise


def _sweep(parent: Path) -> None:
    for scratch in parent.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):
            if abs(time.time() - scratch.stat().st_mtime) > _ABANDONED_SECONDS:
                shutil.rmtree(scratch)
