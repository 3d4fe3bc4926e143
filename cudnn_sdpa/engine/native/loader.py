"""Loads the native module: at once if it is compiled, otherwise when a compiler in the background has finished.

Until then, and wherever there can be none, every call goes through Python. A failure is one line of the log.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from cudnn_sdpa.engine.native import build, compiler
from cudnn_sdpa.engine.native.build import Built, ModuleSources
from cudnn_sdpa.engine.native.compiler import Compilation, CompileError
from cudnn_sdpa.errors import LibraryError, OptionError
from cudnn_sdpa.graph.backend import mapped_files
from cudnn_sdpa.graph.diagnostics import printable
from cudnn_sdpa.settings import renewed_in_children

_log = logging.getLogger("cudnn_sdpa")

#: Environment variable that says whether the native module is used.
VARIABLE = "CUDNN_SDPA_NATIVE"
OFF, AUTO, ON = "off", "auto", "on"
MODES = (OFF, AUTO, ON)

#: The module's name: its last part is that of its initialization function.
NAME = "cudnn_sdpa.engine.native._native"

#: Seconds to wait at exit for the thread that compiles: it removes what the killed compiler has written.
_EXIT_SECONDS = 2.0

# The states of the native way.
NOT_STARTED, COMPILING, LOADED, FAILED = "not started", "compiling", "loaded", "failed"


@dataclass(frozen=True)
class Status:
    """Whether calls are repeated in C++, and why not.

    Attributes:
        state: "off", "not started", "compiling", "loaded" or "failed".
        reason: Why it is so.
        path: The module's file; empty if there is none.
    """

    state: str
    reason: str
    path: str = ""

    def __str__(self) -> str:
        way = "C++" if self.state == LOADED else "Python"
        return f"{way}: {self.reason}" + f" ({self.path})" * bool(self.path)


_BEFORE = Status(NOT_STARTED, "no plan of this process has been launched")


class _Native:
    """The native way of this process."""

    module: ModuleType | None = None
    status = _BEFORE
    compilation: Compilation | None = None
    thread: threading.Thread | None = None
    is_ending = False


_callbacks: list[Callable[[ModuleType], None]] = []
_lock = renewed_in_children(threading.Lock())


def module() -> ModuleType | None:
    """The native module, once it is loaded."""
    return _Native.module


def status() -> Status:
    """The state of the native way in this process."""
    if _Native.status is _BEFORE and mode() == OFF:
        return Status(OFF, f"{VARIABLE}={OFF}")
    return _Native.status


def mode() -> str:
    """The mode that the environment names: "off", "auto" or "on".

    Raises:
        OptionError: It names another one.
    """
    name = os.environ.get(VARIABLE, "").strip().lower() or AUTO
    if name not in MODES:
        raise OptionError(VARIABLE, repr(os.environ[VARIABLE]), f"one of {', '.join(MODES)}")
    return name


def when_loaded(callback: Callable[[ModuleType], None]) -> None:
    """Calls `callback` with the module, once: now, or on the thread that loads it."""
    with _lock:
        loaded = _Native.module
        if loaded is None:
            _callbacks.append(callback)
    if loaded is not None:
        callback(loaded)


def start() -> None:
    """Loads the module if it is compiled, otherwise starts compiling it. Further calls cost little.

    With "auto", nothing waits, and a failure is a line of the log.

    Raises:
        OptionError: The environment names an unknown mode.
        LibraryError: The mode is "on", and the module cannot be compiled or loaded.
    """
    if _Native.status.state == LOADED:
        return
    chosen = mode()
    if chosen != OFF:
        _start(ModuleSources(), in_background=chosen == AUTO)
        if chosen == ON:
            _wait()


def _start(sources: ModuleSources, *, in_background: bool) -> None:
    """Loads the module or starts the thread that compiles it, unless that has been done."""
    if _Native.status.state != NOT_STARTED:
        return
    with _lock:
        if _Native.status.state != NOT_STARTED or _Native.is_ending:
            return
        try:
            built = build.find(sources)
        except CompileError:
            built = None  # `build` says why
        if built is None:
            _compile(sources, in_background=in_background)
        else:
            _load(built)
    _call_back()


def _compile(sources: ModuleSources, *, in_background: bool) -> None:
    """Starts the thread that compiles; the caller has the lock."""
    compilation = Compilation()
    arguments = {"sources": sources, "compilation": compilation, "in_background": in_background}
    thread = threading.Thread(target=_work, kwargs=arguments, name="cudnn_sdpa native", daemon=True)
    _Native.status = Status(COMPILING, "the native module is being compiled")
    _Native.compilation, _Native.thread = compilation, thread
    try:
        thread.start()
    except RuntimeError as error:  # too many threads, or the interpreter is shutting down
        _fail(error)


def _work(sources: ModuleSources, compilation: Compilation, *, in_background: bool) -> None:
    try:
        built = build.build(sources, in_background=in_background, compilation=compilation)
    except Exception as error:  # noqa: BLE001 - whatever it is, Python serves the calls
        with _lock:
            _fail(error)
        return
    with _lock:
        if not _Native.is_ending:
            _load(built)
    _call_back()


def _wait() -> None:
    """Waits for the module.

    Raises:
        LibraryError: It cannot be compiled or loaded.
    """
    thread = _Native.thread
    if thread is not None and thread is not threading.current_thread():
        thread.join()
    if _Native.status.state == FAILED:
        raise LibraryError(f"{VARIABLE}={ON}, and the native module cannot be used: {_Native.status.reason}")


def _load(built: Built) -> None:
    """Loads a module; the caller has the lock."""
    try:
        loaded = load(built.path)
    except Exception as error:  # noqa: BLE001 - whatever it is, Python serves the calls
        _fail(error)
        return
    how = "compiled before" if built.seconds is None else f"compiled in {built.seconds:.0f} s"
    _Native.status = Status(LOADED, how, str(built.path))
    _Native.module = loaded
    _log.info("calls go through C++: the native module is %s: %s", how, built.path)


def _fail(error: Exception) -> None:
    """Keeps the reason, and logs it; the caller has the lock."""
    if _Native.is_ending:
        return
    reason = printable(" ".join(str(error).split())) or type(error).__name__
    is_expected = isinstance(error, CompileError) and error.is_expected
    text = "calls go through Python, not C++: %s; %s=%s silences this"
    _log.log(logging.INFO if is_expected else logging.WARNING, text, reason, VARIABLE, OFF)
    _Native.status = Status(FAILED, reason)  # after the line: a program that waits for the state may end at once


def _call_back() -> None:
    """Calls those who wait for the module, if it is loaded, each once."""
    with _lock:
        loaded = _Native.module
        waiting = [] if loaded is None else _callbacks[:]
        if waiting:
            _callbacks.clear()
    for callback in waiting:
        _call(callback, loaded)


def _call(callback: Callable[[ModuleType], None], loaded: ModuleType | None) -> None:
    assert loaded is not None
    try:
        callback(loaded)
    except Exception as error:  # noqa: BLE001 - Python serves the calls
        _log.warning("the native module is loaded, but cannot be used: %s: %s", type(error).__name__, error)


def load(path: Path) -> ModuleType:
    """Loads the module in a file that `build` has found or made for this process.

    Raises:
        ImportError: It cannot be loaded.
    """
    if "address" in build.sanitizer_of_environment() and not any("libasan" in path for path in mapped_files()):
        raise ImportError("start Python with LD_PRELOAD=$(g++ -print-file-name=libasan.so)")  # loading would end it
    file_loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=file_loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    file_loader.exec_module(loaded)
    sys.modules[NAME] = loaded
    return loaded


def forecast() -> str:
    """Which way a program with this environment would take, and why, as a line; nothing is compiled or loaded."""
    try:
        if mode() == OFF:
            return f"Python: {VARIABLE}={OFF}"
        sources = ModuleSources()
        built = build.find(sources)
        if built is not None:
            return f"C++: compiled before ({built.path})"
        return f"C++, when {compiler.check()[0]} has compiled it in the background; before that Python"
    except OptionError as error:  # which calls raise
        return f"none: {error}"
    except CompileError as error:
        return f"Python: {' '.join(str(error).split())}"


def _end() -> None:
    """Ends the compiler with the interpreter."""
    _Native.is_ending = True
    if _Native.compilation is not None:
        _Native.compilation.cancel()
    if _Native.thread is not None:
        _Native.thread.join(_EXIT_SECONDS)


def _start_afresh() -> None:
    """In a forked child, which lacks the thread that compiles: the parent goes on, and the child may start again."""
    if _Native.compilation is not None:
        _Native.compilation.forget()
    _Native.compilation = _Native.thread = None
    if _Native.status.state == COMPILING:
        _Native.status = _BEFORE


atexit.register(_end)
os.register_at_fork(after_in_child=_start_afresh)
