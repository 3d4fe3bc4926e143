"""Finds the native module in the user's cache folder, or compiles it into that folder.

A module is code: the folder, its files and the folders above must be the user's or root's, as those of the plan store.
The file's name has a digest of everything that the module was made from and for, and its end one of its contents.
Processes that need the same module at the same time all compile it, and the last file stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

import torch

from cudnn_sdpa.graph.diagnostics import printable, shortened
from cudnn_sdpa.offline.interpreter import exit_reason
from cudnn_sdpa.plans import private_folders, store
from cudnn_sdpa.plans.private_folders import OpenFolderError, UnsafeFolderError
from cudnn_sdpa.plans.store import BadPlanFileError

_log = logging.getLogger("cudnn_sdpa")

#: Environment variable that names the folder of compiled modules; unset or empty, it is in the user's cache folder.
FOLDER_VARIABLE = "CUDNN_SDPA_NATIVE_DIR"

#: The folder of the module's `*.cpp` and `*.h` files.
SOURCES = Path(__file__).parent

#: Seconds after which a compiler counts as hanging: it takes 15 to 40.
_TIMEOUT_SECONDS = 600.0

#: What begins the compiler's command in the background: it has a low priority, and as it takes 1 GB, it is killed and
#: not the program where memory is short.
_IN_BACKGROUND = ("/bin/sh", "-c", '{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null; exec nice -n 10 "$@"', "sh")

#: Begins the names of folders in which a compiler works, and the age at which one is left over from a killed process.
_SCRATCH = "compiling-"
_ABANDONED_SECONDS = 3600.0

#: PyTorch 2.9's headers are C++17 and those of 2.15 are C++20, which both accept.
_FLAGS = (
    *("-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-O2", "-DNDEBUG"),
    *("-Wall", "-Wextra", "-Wno-missing-field-initializers"),
    "-Wl,-z,now",  # a symbol that is missing fails when the module is loaded, not in a call
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
)

#: PyTorch's libraries, which its import has loaded: no path to them is kept in the module.
_LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10")


class CompileError(Exception):
    """The module cannot be compiled here; the message says why.

    Attributes:
        is_expected: Whether a machine may well be without what is missing, such as a compiler.
    """

    def __init__(self, why: str, *, is_expected: bool = False) -> None:
        super().__init__(why)
        self.is_expected = is_expected


def folder_of_environment() -> Path:
    """The folder of modules, existing or not.

    Raises:
        UnsafeFolderError: The environment names none, and the user has no cache folder.
    """
    return private_folders.named_or_in_cache(os.environ.get(FOLDER_VARIABLE), "native")


def name_of(sources: Path) -> str:
    """The name of the module's file: a digest of everything that it depends on, behind a version for people.

    The compiler is not part of it: a machine without one loads what another has compiled.
    """
    identity = {
        "sources": {path.name: _sha256(path.read_bytes()) for path in _files(sources, ".cpp", ".h")},
        "flags": _FLAGS,
        "torch": [str(torch.__version__), torch.version.git_version, torch.version.cuda, torch.version.hip],
        "python": [sys.implementation.cache_tag, platform.python_version(), sysconfig.get_config_var("SOABI")],
        "platform": [sysconfig.get_platform(), _c_library()],
    }
    version = re.sub(r"[^\w.+]", "-", str(torch.__version__))
    digest = _sha256(store.canonical(identity))
    return f"torch-{version}-{sys.implementation.cache_tag}-{digest[:32]}.so"


def _files(sources: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in sources.iterdir() if path.suffix in suffixes)


def _c_library() -> str:
    """The C library: what one version has linked may not load with an older one, on a machine with the same home."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError, AttributeError):  # another C library
        return "-".join(platform.libc_ver())


def _sha256(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


def _seal(name: str, library: bytes) -> bytes:
    """The end of a file, by which a damaged or renamed one is recognized; the dynamic loader ignores it."""
    return hashlib.sha256(name.encode() + library).digest()


def find(sources: Path = SOURCES) -> Path | None:
    """The file of the module, if it is there and can be trusted; if it cannot, a line of the log says why."""
    name = name_of(sources)
    try:
        path = folder_of_environment() / name
        folder = private_folders.open_private(path.parent, make=False)
    except UnsafeFolderError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise _unusable(error) from error
    try:
        contents = store.read(name, folder)
        if contents is None:
            return None
        if contents[-32:] != _seal(name, contents[:-32]):
            raise BadPlanFileError("it is damaged, or another module")
    except (BadPlanFileError, OSError) as error:
        _log.warning("ignoring the native module %s: %s", path, error)
        return None
    finally:
        os.close(folder)
    return path


def compile_module(sources: Path = SOURCES, *, in_background: bool = False) -> Path:
    """Compiles the module and saves it; returns its file.

    Raises:
        CompileError: It cannot be compiled or saved; the message says why.
    """
    name = name_of(sources)
    try:
        path = folder_of_environment() / name
        folder = private_folders.open_private(path.parent)
        try:
            library = _compile(sources, path.parent, in_background)
            store.write(name, folder, library + _seal(name, library))
        finally:
            os.close(folder)
    except (OSError, UnsafeFolderError) as error:
        raise _unusable(error) from error
    return path


def _unusable(error: OSError | UnsafeFolderError) -> CompileError:
    why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    is_expected = not isinstance(error, OpenFolderError)
    return CompileError(f"{why}; {FOLDER_VARIABLE} can name another folder", is_expected=is_expected)


def _compile(sources: Path, folder: Path, in_background: bool) -> bytes:
    compiler = check()
    for left in folder.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):
            if abs(time.time() - left.stat().st_mtime) > _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    # A forked child that ends would remove a `TemporaryDirectory`, too.
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder))
    try:
        output = scratch / "module.so"
        includes = [argument for path in include_folders() for argument in ("-isystem", str(path))]
        linked = [*map(str, _files(sources, ".cpp")), "-o", str(output), f"-L{torch_folder() / 'lib'}", *_LIBRARIES]
        _run([*compiler, *_FLAGS, *includes, *linked], scratch, in_background)
        return output.read_bytes()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


#: The compilers of this process, each the leader of a process group.
_running: list[subprocess.Popen[bytes]] = []
is_ending = threading.Event()


def _run(command: list[str], scratch: Path, in_background: bool) -> None:
    process = subprocess.Popen(
        [*(_IN_BACKGROUND if in_background else ()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=scratch,
        env={**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C"},
        start_new_session=True,  # an interrupt of the terminal is for the program alone
    )
    _running.append(process)
    try:
        if is_ending.is_set():
            raise CompileError("the interpreter is ending")
        printed = process.communicate(timeout=_TIMEOUT_SECONDS)[0].decode(errors="replace").strip()
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{command[0]} has not ended in {_TIMEOUT_SECONDS:g} s") from error
    finally:
        _kill(process)
        process.wait()
        _running.remove(process)
    if printed:
        _log.debug("%s printed: %s", command[0], printed)
    if process.returncode:
        lines = printed.splitlines()
        errors = [line for line in lines if re.search(r"\berror: ", line)] or lines[-1:]
        how = exit_reason(process.returncode)
        raise CompileError(printable(shortened(": ".join([f"{command[0]} {how}", *errors[:1]]))))


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


def end() -> None:
    is_ending.set()
    for process in _running[:]:
        _kill(process)


os.register_at_fork(after_in_child=_running.clear)  # they are the parent's


def check() -> list[str]:
    """Checks what compiling needs, and returns the compiler's command."""
    if sys.platform != "linux":
        raise CompileError(f"it is for Linux only, not for {sys.platform}", is_expected=True)
    if sysconfig.get_config_var("Py_GIL_DISABLED"):  # even where the import of some module has enabled the GIL
        raise CompileError("this is a free-threaded Python, and the GIL guards what it does", is_expected=True)
    command = find_compiler()
    if command is None:
        why = "none of $CXX, c++, g++ and clang++ is on the PATH; install one (on Debian: apt-get install g++)"
        raise CompileError(f"there is no C++ compiler: {why}", is_expected=True)
    for header, package in (("Python.h", "python3-dev"), ("torch/csrc/autograd/python_variable.h", "")):
        if not any((folder / header).is_file() for folder in include_folders()):
            cure = f"; install Python's headers (on Debian: apt-get install {package})" * bool(package)
            raise CompileError(f"{header} is missing{cure}", is_expected=True)
    return command


def find_compiler() -> list[str] | None:
    """The system's C++ compiler: $CXX, which may have arguments, or c++, g++ or clang++."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quotation mark without its partner
        named = []
    for command in (named, ["c++"], ["g++"], ["clang++"]):
        if command and (path := shutil.which(command[0])):
            return [path, *command[1:]]
    return None


def torch_folder() -> Path:
    return Path(torch.__file__).parent


def include_folders() -> list[Path]:
    """The folders of Python's and PyTorch's headers.

    They are those of `torch.utils.cpp_extension`, whose import needs setuptools.
    """
    of_torch = torch_folder() / "include"
    of_python = [Path(sysconfig.get_path(name)) for name in ("include", "platinclude")]
    return list(dict.fromkeys([of_torch, of_torch / "torch/csrc/api/include", *of_python]))
