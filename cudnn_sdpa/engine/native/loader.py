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
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from cudnn_sdpa.engine.native import build
from cudnn_sdpa.engine.native.build import CompileError
from cudnn_sdpa.errors import LibraryError, OptionError
from cudnn_sdpa.graph.diagnostics import printable
from cudnn_sdpa.settings import renewed_in_children

_log = logging.getLogger("cudnn_sdpa")

#: Environment variable that says whether the native module is used.
VARIABLE = "CUDNN_SDPA_NATIVE"
OFF, AUTO, ON, VERIFY = "off", "auto", "on", "verify"
MODES = (OFF, AUTO, ON)

#: Environment variable that says whether the native module records what plans launch: see `engine/recorded`.
RECORDED_VARIABLE = "CUDNN_SDPA_RECORDED"
RECORDED_MODES = (OFF, ON, VERIFY)

#: The module's name: its last part is that of its initialization function.
NAME = "cudnn_sdpa.engine.native._native"

#: Seconds to wait at exit for the thread that compiles: it removes what the killed compiler has written.
_EXIT_SECONDS = 2.0

_NOT_STARTED = "Python: no plan of this process has been launched"
_COMPILING = "Python: the native module is being compiled"


class Native:
    is_started = False  #: further calls of `start` would change nothing
    module: ModuleType | None = None
    status = _NOT_STARTED
    failure = ""
    thread: threading.Thread | None = None


_callbacks: list[Callable[[ModuleType], None]] = []
_lock = renewed_in_children(threading.RLock())


def module() -> ModuleType | None:
    return Native.module


def status() -> str:
    if Native.status == _NOT_STARTED and mode() == OFF:
        return f"Python: {VARIABLE}={OFF}"
    return Native.status


def mode() -> str:
    """The mode that the environment names: "off", "auto" or "on"."""
    return _of_environment(VARIABLE, MODES, AUTO)


def recorded_mode() -> str:
    """The mode of recorded launches that the environment names: "off", "on" or "verify"."""
    return _of_environment(RECORDED_VARIABLE, RECORDED_MODES, ON)


def _of_environment(variable: str, modes: tuple[str, ...], default: str) -> str:
    name = os.environ.get(variable, "").strip().lower() or default
    if name not in modes:
        raise OptionError(variable, repr(os.environ[variable]), f"one of {', '.join(modes)}")
    return name


def when_loaded(callback: Callable[[ModuleType], None]) -> None:
    """Calls `callback` with the module, once: now, or on the thread that loads it."""
    with _lock:
        loaded = Native.module
        if loaded is None:
            _callbacks.append(callback)
    if loaded is not None:
        callback(loaded)


def start() -> None:
    """Loads the module if it is compiled, otherwise starts compiling it.

    With "auto", nothing waits, and a failure is a line of the log.

    Raises:
        OptionError: The environment names an unknown mode.
        LibraryError: The mode is "on", and the module cannot be compiled or loaded.
    """
    chosen, _ = mode(), recorded_mode()
    if chosen == OFF or Native.module is not None:
        Native.is_started = True
        return
    with _lock:
        is_first = Native.status == _NOT_STARTED
        if is_first:
            Native.status = _COMPILING
            _find(in_background=chosen == AUTO)
    if is_first:
        _call_back()
    if chosen == ON:
        wait()
        if Native.failure:
            raise LibraryError(f"{VARIABLE}={ON}, and the native module cannot be used: {Native.failure}")
    Native.is_started = True


def wait(seconds: float | None = None) -> None:
    """Waits, after `start`, for the thread that compiles the module, if there is one."""
    thread = Native.thread
    if thread is not None and thread is not threading.current_thread():
        thread.join(seconds)


def _find(*, in_background: bool) -> None:
    try:
        path = build.find()
        if path is not None:
            _load(path, "compiled before")
            return
        thread = threading.Thread(target=_compile, args=(in_background,), name="cudnn_sdpa native", daemon=True)
        thread.start()
        Native.thread = thread
    except Exception as error:  # noqa: BLE001 - whatever it is, Python serves the calls
        _fail(error)


def _compile(in_background: bool) -> None:
    begin = time.perf_counter()
    try:
        path = build.compile_module(in_background=in_background)
        with _lock:
            _load(path, f"compiled in {time.perf_counter() - begin:.0f} s")
    except Exception as error:  # noqa: BLE001 - whatever it is, Python serves the calls
        with _lock:
            _fail(error)
        return
    _call_back()


def _load(path: Path, how: str) -> None:
    Native.module = load(path)
    Native.status = f"C++: {how} ({path})"
    _log.info("calls go through C++: the native module is %s: %s", how, path)


def _fail(error: Exception) -> None:
    if build.is_ending.is_set():
        return
    reason = printable(" ".join(str(error).split())) or type(error).__name__
    is_expected = isinstance(error, CompileError) and error.is_expected
    text = "calls go through Python, not C++: %s; %s=%s silences this"
    _log.log(logging.INFO if is_expected else logging.WARNING, text, reason, VARIABLE, OFF)
    Native.status, Native.failure = f"Python: {reason}", reason


def _call_back() -> None:
    with _lock:
        loaded = Native.module
        waiting = [] if loaded is None else _callbacks[:]
        if waiting:
            _callbacks.clear()
    for callback in waiting:
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
    file_loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=file_loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    file_loader.exec_module(loaded)
    sys.modules[NAME] = loaded
    return loaded


def forecast() -> str:
    """The way of a program's calls with this environment, and the reason, as a line; nothing is compiled or loaded."""
    try:
        if mode() == OFF:
            return f"Python: {VARIABLE}={OFF}"
        path = build.find()
        if path is not None:
            return f"C++: compiled before ({path})"
        return f"C++, when {build.check()[0]} has compiled it in the background; before that Python"
    except OptionError as error:  # which calls raise
        return f"none: {error}"
    except CompileError as error:
        return f"Python: {' '.join(str(error).split())}"


def _end() -> None:
    build.end()
    wait(_EXIT_SECONDS)


def _start_afresh() -> None:
    """In a forked child, which lacks the thread that compiles: the parent goes on, and the child may start again."""
    Native.thread = None
    if Native.status == _COMPILING:
        Native.status, Native.is_started = _NOT_STARTED, False


atexit.register(_end)
os.register_at_fork(after_in_child=_start_afresh)
