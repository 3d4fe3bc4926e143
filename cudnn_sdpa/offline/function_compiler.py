"""Helper processes that compile functions: the shared library of a function, and the answer of a process."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def why_no_compiler() -> str:
    """Why there is no C compiler, which links functions, and the cure behind a semicolon; empty if there is one."""
    if shutil.which(_compiler()):
        return ""
    cure = "install a C compiler (on Debian: apt-get install gcc libc6-dev), or name one in CC"
    return f"the C compiler {_compiler()!r}, which links functions, is not found; {cure}"


def _compiler() -> str:
    return os.environ.get("CC") or "cc"


def library_of(function: Any) -> bytes:
    """A function that CuTe's DSL compiled as a shared library, whose one symbol for callers is `__tvm_ffi_func`."""
    if why := why_no_compiler():
        raise OSError(why)
    with tempfile.TemporaryDirectory() as folder:
        compiled, linked = Path(folder, "function.o"), Path(folder, "function.so")
        function.export_to_c(object_file_path=str(compiled), function_name="func")
        command = [_compiler(), "-shared", "-Wl,-z,noexecstack", "-o", str(linked), str(compiled)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr[-400:]}")
        return linked.read_bytes()


def answer(compile_kind: Callable[[list[Any]], Mapping[str, bytes]]) -> None:
    """Reads a kind as a JSON list, and prints a JSON object.

    "functions" has libraries by name, "error" a reason instead.
    """
    with _stdout_for_the_answer() as file:
        kind = json.load(sys.stdin)
        try:
            made = {name: base64.b64encode(x).decode() for name, x in compile_kind(kind).items()}
            found: dict[str, object] = {"functions": made}
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the answer
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(os.dup(file), "w") as output:
            json.dump(found, output)


@contextmanager
def _stdout_for_the_answer() -> Iterator[int]:
    """A file descriptor for the answer; what else prints, prints to stderr."""
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        yield answer
    finally:
        os.close(answer)
