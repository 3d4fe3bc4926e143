"""The environment of a helper process: the machine's own driver, or a stand-in without one."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from cudnn_sdpa.errors import OfflineError
from cudnn_sdpa.plans import private_folders
from cudnn_sdpa.plans import store as stores
from cudnn_sdpa.plans.store import BadPlanFileError

_SOURCE = Path(__file__).with_name("stand_in_driver.c")
_LIBRARY, _MARKER = "libcuda.so.1", "cudnn_sdpa_stand_in_driver"


def has_real_driver() -> bool:
    try:
        library = ctypes.CDLL(_LIBRARY)
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
    try:
        path = private_folders.in_users_cache("stand-in-driver") / hashlib.sha256(source.encode()).hexdigest()[:16]
        folder = private_folders.open_private(path)
        try:
            if (path / _LIBRARY).is_symlink():
                raise BadPlanFileError("it is a link")
            if stores.read(_LIBRARY, folder) is None:
                stores.write(_LIBRARY, folder, _compile(source))
        except BadPlanFileError as error:
            raise OfflineError(f"{path / _LIBRARY} cannot be used: {error}; remove {path}") from error
        finally:
            os.close(folder)
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
    return path


def compiler() -> str | None:
    candidates = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def _compile(source: str) -> bytes:
    path = compiler()
    if path is None:
        raise OfflineError(
            "planning for a GPU on a machine without an NVIDIA driver needs a C compiler, and none of $CC, cc, gcc and "
            "clang is on the PATH; install one (on Debian: apt-get install gcc libc6-dev)"
        )
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "driver.c").write_text(source)
        command = [path, "-shared", "-fPIC", "-w", f"-Wl,-soname,{_LIBRARY}", "-o", _LIBRARY, "driver.c"]
        result = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False, timeout=120)
        if result.returncode != 0:
            raise OfflineError(f"{path} could not compile the stand-in driver: {result.stderr.strip()[-500:]}")
        return (Path(scratch) / _LIBRARY).read_bytes()
