"""Small native modules, which a real compiler compiles in half a second, and one whose compilation can be held."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cudnn_sdpa.engine.native.build import FOLDER_VARIABLE

#: A module with the number `answer`, linked like the real one.
SMALL = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native"};
PyMODINIT_FUNC PyInit__native() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", ANSWER);
  return module;
}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of modules, which does not exist yet, in this process and those that the test starts."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "modules"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "modules"


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """Writes the sources of a module whose `answer` is a number, or of another one, and returns their folder."""

    def write(answer: int = 42, source: str = SMALL, **headers: str) -> Path:
        sources = tmp_path / "sources"
        sources.mkdir(exist_ok=True)
        (sources / "small.cpp").write_text(source.replace("ANSWER", str(answer)))
        for name, text in headers.items():
            (sources / f"{name}.h").write_text(text)
        return sources

    return write


class Held:
    """A module whose compiler waits in the middle of its work: it reads a pipe as if it were a header."""

    def __init__(self, sources: Path) -> None:
        self.sources = sources
        self.pipe = sources / "answer.inc"
        os.mkfifo(self.pipe)

    def processes(self) -> list[str]:
        """The commands of the processes that compile it: the compiler's driver and the compiler."""
        commands = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended
                commands.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        return [command for command in commands if str(self.sources) in command]

    def is_compiling(self) -> bool:
        return any("cc1plus" in command or "-cc1" in command for command in self.processes())

    def go_on(self, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                writer = os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                time.sleep(0.01)
                continue
            os.write(writer, b"7")
            os.close(writer)
            return
        raise TimeoutError("no compiler reads the pipe")


@pytest.fixture
def held(recipe: Callable[..., Path]) -> Held:
    return Held(recipe(source=SMALL.replace("ANSWER", '\n#include "answer.inc"\n')))


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that every compiler waits for before it begins."""
    gate, compiler = tmp_path / "gate", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nwhile [ ! -e "{gate}" ]; do sleep 0.02; done\nexec c++ "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    return gate


@pytest.fixture
def wait_until() -> Callable[..., None]:
    def wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it does not happen"
            time.sleep(0.02)

    return wait
