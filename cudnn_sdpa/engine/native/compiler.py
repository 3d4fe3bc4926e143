"""Compiles the native module: a C++ compiler, Python's and PyTorch's headers, and nothing of CUDA."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from cudnn_sdpa.engine.native import guard
from cudnn_sdpa.graph.diagnostics import printable, shortened
from cudnn_sdpa.offline import interpreter

_log = logging.getLogger("cudnn_sdpa")

SANITIZERS = ("", "address", "undefined", "address,undefined")

#: Seconds after which a compiler counts as hanging: it takes 15 to 40.
TIMEOUT_SECONDS = 600.0

#: In the background the compiler has a low CPU priority.
NICENESS = 10

#: PyTorch 2.9's headers are C++17 and those of 2.15 are C++20, which both accept.
_FLAGS = (
    *("-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
    *("-Wall", "-Wextra", "-Wno-missing-field-initializers"),
    "-Wl,-z,now",  # a symbol that is missing fails when the module is loaded, not in a call
)
_OPTIMIZED = ("-O2", "-DNDEBUG")
_SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")

#: PyTorch's libraries, which its import has loaded: no path to them is kept in the module.
_LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10")


class CompileError(Exception):
    """The module cannot be compiled here; the message says why.

    Attributes:
        is_expected: Whether a machine may well be without what is missing, such as a compiler.
        is_final: Whether the same compiler will fail again.
    """

    def __init__(self, why: str, *, is_expected: bool = False, is_final: bool = False) -> None:
        super().__init__(why)
        self.is_expected = is_expected
        self.is_final = is_final


def flags(sanitize: str = "") -> list[str]:
    """The compiler's flags without paths.

    Args:
        sanitize: One of `SANITIZERS`.
    """
    of_kind = [*_SANITIZED, f"-fsanitize={sanitize}"] if sanitize else _OPTIMIZED
    return [*_FLAGS, *of_kind, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]


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
    """PyTorch's folder, with its headers and libraries."""
    return Path(torch.__file__).parent


def include_folders() -> list[Path]:
    """The folders of Python's and PyTorch's headers.

    They are those of `torch.utils.cpp_extension`, whose import needs setuptools.
    """
    of_torch = torch_folder() / "include"
    of_python = [Path(sysconfig.get_path(name)) for name in ("include", "platinclude")]
    return list(dict.fromkeys([of_torch, of_torch / "torch/csrc/api/include", *of_python]))


def check() -> list[str]:
    """Checks what compiling needs, and returns the compiler's command.

    Raises:
        CompileError: It is missing.
    """
    if sys.platform != "linux":
        raise CompileError(f"it is for Linux only, not for {sys.platform}", is_expected=True)
    command = find_compiler()
    if command is None:
        why = "none of $CXX, c++, g++ and clang++ is on the PATH; install one (on Debian: apt-get install g++)"
        raise CompileError(f"there is no C++ compiler: {why}", is_expected=True)
    for header, package in (("Python.h", "python3-dev"), ("torch/csrc/autograd/python_variable.h", "")):
        if not any((folder / header).is_file() for folder in include_folders()):
            cure = f"; install Python's headers (on Debian: apt-get install {package})" * bool(package)
            raise CompileError(f"{header} is missing{cure}", is_expected=True)
    reason = interpreter.why_no_python()
    if reason:
        raise CompileError(f"no process can be started for the compiler: {reason}", is_expected=True)
    return command


class Compilation:
    """One run of the compiler, in a process group of its own, which ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.is_cancelled = False

    def run(self, compiler: Sequence[str], sources: Sequence[Path], sanitize: str, output: Path, niceness: int) -> str:
        """Compiles and links `sources` into the file `output`, and returns what the compiler printed.

        Raises:
            CompileError: It fails, or it is cancelled.
            OSError: No process can be started.
        """
        command = [*compiler, *flags(sanitize)]
        for folder in include_folders():
            command += ["-isystem", str(folder)]
        command += [*map(str, sources), "-o", str(output), f"-L{torch_folder() / 'lib'}", *_LIBRARIES]
        request = {"command": command, "niceness": niceness, "seconds": TIMEOUT_SECONDS}
        environment = {**os.environ, "TMPDIR": str(output.parent), "LC_ALL": "C"}
        if sanitize:
            environment.pop("LD_PRELOAD", None)  # the sanitizer is for this process
        with self._lock:
            if self.is_cancelled:
                raise CompileError("the interpreter is ending")
            self._process = subprocess.Popen(
                interpreter.bare_command(Path(guard.__file__).read_text(), json.dumps(request)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=output.parent,
                env=environment,
                start_new_session=True,
            )
        return self._result(self._process, compiler[0])

    def _result(self, process: subprocess.Popen[bytes], compiler: str) -> str:
        assert process.stdout is not None
        try:
            text = process.stdout.read().decode(errors="replace")
        finally:
            self._end(process)
        printed, _, status = text.rpartition(guard.MARK)
        if self.is_cancelled:
            raise CompileError("the interpreter is ending")
        if not status or not text.endswith("\n"):
            raise CompileError(f"the process that runs {compiler} was killed")
        if status.strip() != "0":
            lines = printed.strip().splitlines()
            errors = [line for line in lines if re.search(r"\berror: ", line)] or lines[-1:]
            why = printable(shortened(": ".join([f"{compiler} fails ({status.strip()})", *errors[:1]])))
            _log.debug("%s printed: %s", compiler, printed)
            was_killed = "terminated program" in printed  # as without memory; GCC's driver itself ends as usual
            raise CompileError(why, is_final=status.strip().isdigit() and not was_killed)
        return printed.strip()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Closes the pipes, which ends what still runs, and waits for it."""
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        with self._lock:
            process.wait()
            self._process = None

    def cancel(self) -> None:
        """Ends the compiler; the thread that runs it gets an error."""
        with self._lock:
            self.is_cancelled = True
            if self._process is not None:
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def forget(self) -> None:
        """Closes a forked child's end of the pipe, so that the compiler ends with the parent."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                os.close(process.stdin.fileno())
