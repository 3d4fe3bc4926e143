"""Finds the native module in the user's cache folder, or compiles it into that folder.

A module is code: the folder, its files and the folders above must be the user's or root's, as those of the plan store.
A file is written under a temporary name and renamed. Processes that need the same module compile it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cudnn_sdpa.engine.native import compiler
from cudnn_sdpa.engine.native.compiler import Compilation, CompileError
from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.plans import file_format, private_folders, store_files
from cudnn_sdpa.plans.file_format import BadPlanFileError, canonical
from cudnn_sdpa.plans.private_folders import OpenFolderError, UnsafeFolderError

_log = logging.getLogger("cudnn_sdpa")

#: Environment variable that names the folder of compiled modules; unset or empty, it is in the user's cache folder.
FOLDER_VARIABLE = "CUDNN_SDPA_NATIVE_DIR"

#: Environment variable with a sanitizer that the module is compiled with, for tests.
SANITIZE_VARIABLE = "CUDNN_SDPA_NATIVE_SANITIZE"

#: The folder of the module's sources.
SOURCES = Path(__file__).parent

#: Seconds to wait for a process that compiles the same module; a stopped process keeps its lock.
_LOCK_SECONDS = 300.0

#: Seconds between two looks at whether this process is ending, while it waits.
_PAUSE_SECONDS = 0.2

#: Seconds for which processes do not try again in the background what a compiler has refused.
_REFUSAL_SECONDS = 3600.0

#: Number of modules kept in the folder, those of other versions among them.
_KEPT = 16

#: Begins the names of folders in which a compiler works, and the age at which one is left over from a killed process.
_SCRATCH = "compiling-"
_ABANDONED_SECONDS = 3600.0

#: What ends the file of a module; the bytes for its description's length and for its digest, which come before that.
_MAGIC = b"\ncudnn_sdpa native, format 1\n"
_LENGTH, _DIGEST = 8, 32


def sanitizer_of_environment() -> str:
    """The sanitizer that the environment names; usually empty.

    Raises:
        OptionError: There is no such sanitizer.
    """
    name = os.environ.get(SANITIZE_VARIABLE, "")
    if name not in compiler.SANITIZERS:
        raise OptionError(SANITIZE_VARIABLE, repr(name), "address, undefined, or both with a comma")
    return name


@dataclass(frozen=True)
class ModuleSources:
    """What a module is made from and for.

    Attributes:
        sources: The folder with its `*.cpp` and `*.h` files.
        sanitize: One of `compiler.SANITIZERS`; usually empty.
    """

    sources: Path = SOURCES
    sanitize: str = field(default_factory=sanitizer_of_environment)

    def files(self, *suffixes: str) -> list[Path]:
        """Its files with one of these suffixes, in the order of their names."""
        return sorted(path for path in self.sources.iterdir() if path.suffix in suffixes)

    def identity(self) -> dict[str, object]:
        """Everything that the module depends on, JSON-ready.

        The compiler is not part of it: a machine without one loads what another has compiled.
        """
        return {
            "sources": {path.name: _sha256(path.read_bytes()) for path in self.files(".cpp", ".h")},
            "flags": compiler.flags(self.sanitize),
            "torch": [str(torch.__version__), torch.version.git_version, torch.version.cuda, torch.version.hip],
            "python": [sys.implementation.cache_tag, platform.python_version(), sysconfig.get_config_var("SOABI")],
            "platform": [sysconfig.get_platform(), _c_library()],
        }


class BadModuleError(Exception):
    """A file that is not a module, or not the expected one; the message says why."""


@dataclass(frozen=True)
class ModuleFile:
    """The file of a compiled module: the library as the linker wrote it, and behind it its description and a digest.

    The dynamic loader ignores what follows a library. With one file, renamed into place, there is never a library
    without its description, or one that does not belong to it.

    Attributes:
        identity: What it was made from and for; see `ModuleSources.identity`.
        compiler: The command that compiled it.
        library: The shared library.
    """

    identity: dict[str, object]
    compiler: list[str]
    library: bytes

    def encode(self) -> bytes:
        """The contents of a file."""
        line = canonical({"identity": self.identity, "compiler": self.compiler})
        contents = self.library + line + len(line).to_bytes(_LENGTH, "little")
        return contents + hashlib.sha256(contents).digest() + _MAGIC

    @classmethod
    def decode(cls, contents: bytes) -> ModuleFile:
        """The module in a file's contents.

        Raises:
            BadModuleError: They are not a module, or damaged.
        """
        if not contents.endswith(_MAGIC):
            raise BadModuleError("it is incomplete, or not a module in this version's format")
        rest, digest = _split(contents[: -len(_MAGIC)], _DIGEST)
        if hashlib.sha256(rest).digest() != digest:
            raise BadModuleError("its contents do not match its digest")
        rest, length = _split(rest, _LENGTH)
        library, line = _split(rest, int.from_bytes(length, "little"))
        try:
            description = json.loads(line)
            return cls(description["identity"], description["compiler"], library)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadModuleError("its description cannot be read") from error


def _split(contents: bytes, length: int) -> tuple[bytes, bytes]:
    """The contents before the last `length` bytes, and these."""
    at = max(0, len(contents) - length)
    return contents[:at], contents[at:]


#: What `name_of` returns, and the names beside it of what a compiler has refused.
_OWN_NAME = re.compile(r"torch-\S+-[0-9a-f]{32}\.(so|refused)")


def name_of(identity: dict[str, object]) -> str:
    """The name of the file of the module with this identity; its beginning is for people."""
    version = re.sub(r"[^\w.+]", "-", str(torch.__version__))
    return f"torch-{version}-{sys.implementation.cache_tag}-{_sha256(canonical(identity))[:32]}.so"


def _sha256(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


def _c_library() -> str:
    """The C library: what one version has linked may not load with an older one, on a machine with the same home."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError, AttributeError):  # another C library
        return "-".join(platform.libc_ver())


def folder_of_environment() -> Path:
    """The folder of modules, existing or not.

    Raises:
        UnsafeFolderError: The environment names none, and the user has no cache folder.
    """
    named = os.environ.get(FOLDER_VARIABLE, "")
    try:
        return Path(named).expanduser().absolute() if named else private_folders.in_users_cache("native")
    except RuntimeError as error:  # the home of an unknown user
        raise UnsafeFolderError(f"{named} cannot be used: {error}") from error


@dataclass(frozen=True)
class Built:
    """A module on disk.

    Attributes:
        path: Its file.
        compiler: The command that compiled it.
        seconds: Time that this process took to compile it; None if it was there.
    """

    path: Path
    compiler: list[str]
    seconds: float | None = None


class _Folder:
    """An open folder of modules, and what its modules are made from."""

    def __init__(self, path: Path, descriptor: int, made_from: ModuleSources) -> None:
        self.path = path
        self.descriptor = descriptor
        self.made_from = made_from
        self.identity = made_from.identity()
        self.name = name_of(self.identity)

    @classmethod
    @contextlib.contextmanager
    def opened(cls, made_from: ModuleSources, folder: Path | None, *, make: bool) -> Iterator[_Folder]:
        path = folder_of_environment() if folder is None else folder
        descriptor = private_folders.open_private(path, make=make)
        try:
            yield cls(path, descriptor, made_from)
        finally:
            os.close(descriptor)

    def find(self, log_level: int) -> Built | None:
        """The module, if it is there and can be trusted; if it cannot, a line of the log says why."""
        try:
            contents = file_format.read(self.name, self.descriptor)
            if contents is None:
                return None
            module = ModuleFile.decode(contents)
            if canonical(module.identity) != canonical(self.identity):
                raise BadModuleError("it was made for another PyTorch or Python, or from other sources")
        except (BadModuleError, BadPlanFileError, OSError) as error:
            _log.log(log_level, "ignoring the native module %s: %s", self.path / self.name, error)
            return None
        with contextlib.suppress(OSError):
            store_files.touch(self.name, self.descriptor)  # those of the last use are kept
        return Built(self.path / self.name, module.compiler)

    def compile(self, compilation: Compilation, *, in_background: bool) -> Built:
        """Compiles the module and saves it."""
        command = compiler.check()
        if in_background and (reason := self._refusal(command)):
            raise CompileError(f"{reason} (another process has tried it; `build-native` tries it again)")
        start = time.perf_counter()
        with self._scratch() as scratch:
            output = scratch / self.name
            niceness = compiler.NICENESS if in_background else 0
            try:
                printed = compilation.run(
                    command,
                    self.made_from.files(".cpp"),
                    sanitize=self.made_from.sanitize,
                    output=output,
                    niceness=niceness,
                )
            except CompileError as error:
                if error.is_final:
                    self._note_refusal(command, str(error))
                raise
            module = ModuleFile(self.identity, command, output.read_bytes())
        if printed:
            _log.debug("%s printed: %s", command[0], printed)
        store_files.try_write(self.descriptor, self.name, module.encode(), or_raise=True)
        self._sweep()
        return Built(self.path / self.name, command, time.perf_counter() - start)

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A folder for the compiler. `TemporaryDirectory` would also be removed by a forked child that ends."""
        scratch = Path(tempfile.mkdtemp(prefix=self._scratch_prefix, dir=self.path))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    @property
    def _refusal_name(self) -> str:
        return self.name.removesuffix(".so") + ".refused"

    def _refusal(self, command: list[str]) -> str:
        """Why the same compiler has refused the same sources lately; empty if it has not."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, BadPlanFileError):
            contents = file_format.read(self._refusal_name, self.descriptor)
            if contents is not None:
                noted = json.loads(contents)
                age = time.time() - noted["time"]
                if noted["compiler"] == _version_of(command) and 0 <= age < _REFUSAL_SECONDS:
                    return str(noted["reason"])
        return ""

    def _note_refusal(self, command: list[str], reason: str) -> None:
        noted = {"compiler": _version_of(command), "reason": reason, "time": time.time()}
        with contextlib.suppress(OSError):
            store_files.try_write(self.descriptor, self._refusal_name, canonical(noted), or_raise=False)

    @contextlib.contextmanager
    def locked(self, compilation: Compilation) -> Iterator[None]:
        """While a process is in this context, others that would compile the same module wait, then load it."""
        with contextlib.ExitStack() as stack:
            try:
                locks = store_files.folder_of_locks(self.descriptor)
                stack.callback(os.close, locks)
                if self._lock(locks, stack, compilation):
                    self._remove_scratch(f"{self._scratch_prefix}*", 0.0)
            except OSError as error:  # a file system without locks, or a folder of somebody else
                _log.debug("the native module is compiled without a lock: %s", error)
            yield

    def _lock(self, locks: int, stack: contextlib.ExitStack, compilation: Compilation) -> bool:
        """Waits for the lock of the module's name; returns whether it was free in time."""
        end = time.monotonic() + _LOCK_SECONDS
        while time.monotonic() < end:
            with contextlib.ExitStack() as attempt:
                if attempt.enter_context(store_files.locked(locks, self.name + ".lock", _PAUSE_SECONDS)):
                    stack.push(attempt.pop_all())
                    return True
            if compilation.is_cancelled:
                raise CompileError("the interpreter is ending")
        return False

    @property
    def _scratch_prefix(self) -> str:
        return f"{_SCRATCH}{self.name.removesuffix('.so')}-"

    def _remove_scratch(self, pattern: str, min_age: float) -> None:
        """Removes folders that killed processes left."""
        for scratch in self.path.glob(pattern):
            with contextlib.suppress(OSError):
                if time.time() - scratch.stat().st_mtime >= min_age:
                    shutil.rmtree(scratch, ignore_errors=True)

    def _sweep(self) -> None:
        """Removes the modules that were not used for the longest time, and what killed processes left."""
        store_files.sweep(self.descriptor)
        self._remove_scratch(f"{_SCRATCH}*", _ABANDONED_SECONDS)
        with contextlib.suppress(OSError):
            # Files with other names are somebody else's.
            files = [path for path in self.path.iterdir() if _OWN_NAME.fullmatch(path.name)]
            for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)[_KEPT:]:
                path.unlink(missing_ok=True)


def _version_of(command: list[str]) -> list[object]:
    """A compiler's command and file; another one may accept what it refuses."""
    status = Path(command[0]).stat()
    return [command, os.path.realpath(command[0]), status.st_size, status.st_mtime_ns]


def find(made_from: ModuleSources, folder: Path | None = None) -> Built | None:
    """The module of these sources, if a process has compiled it; it is not compiled.

    Args:
        made_from: What it is made from.
        folder: The folder of modules; None is that of the environment.

    Raises:
        CompileError: The folder is unsafe or cannot be read.
    """
    try:
        with _Folder.opened(made_from, folder, make=False) as opened:
            return opened.find(logging.DEBUG)  # `build` says more
    except (OSError, UnsafeFolderError) as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise _unusable(error) from error


def build(
    made_from: ModuleSources,
    folder: Path | None = None,
    *,
    again: bool = False,
    in_background: bool = False,
    compilation: Compilation | None = None,
) -> Built:
    """The module of these sources, compiled unless it is there.

    Args:
        made_from: What it is made from.
        folder: The folder of modules; None is that of the environment.
        again: Whether to compile it even if it is there.
        in_background: Whether the compiler runs at a low priority, and what it has lately refused is not tried again.
        compilation: The run of the compiler, for another thread to cancel it.

    Raises:
        CompileError: It cannot be compiled or saved; the message says why.
    """
    compilation = compilation or Compilation()
    try:
        with _Folder.opened(made_from, folder, make=True) as opened:
            built = None if again else opened.find(logging.WARNING)
            if built is not None:
                return built
            with opened.locked(compilation):
                built = None if again else opened.find(logging.DEBUG)  # another process may have compiled it
                return built or opened.compile(compilation, in_background=in_background)
    except (OSError, UnsafeFolderError) as error:
        raise _unusable(error) from error


def _unusable(error: OSError | UnsafeFolderError) -> CompileError:
    """The error of a folder, or of a process that cannot be started."""
    why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    is_expected = not isinstance(error, OpenFolderError)
    return CompileError(f"{why}; {FOLDER_VARIABLE} can name another folder", is_expected=is_expected)
