"""Python processes for tests, forked from one that has imported PyTorch: an import costs 2 to 4 seconds, a fork 20 ms.

`run` takes what `python` takes (`-c` code, `-m` module, or a file) and gives what `subprocess.run` gives. The child
imports `cudnn_sdpa` anew, under its own environment, folder and search path, and ends as every interpreter does. What
tests the start of an interpreter, or an import of PyTorch, needs a real one: that is `subprocess.run`. Where variables
are changed that are only read at such a start, `run` takes a real one by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Prefixes of variables that PyTorch, the loader or the interpreter read when they start.
READ_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "TORCH", "CUDA")

_servers: dict[int, subprocess.Popen[str]] = {}


def run(
    arguments: list[str],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 200,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs Python with `arguments` and returns its status and output."""
    variables = dict(os.environ if env is None else env)
    command = [sys.executable, *arguments]
    if not hasattr(os, "fork") or _read_at_start(variables) != _read_at_start(os.environ):
        return subprocess.run(
            command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout, check=check
        )
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "arguments": arguments,
            "cwd": str(cwd or Path.cwd()),
            "env": variables,
            "timeout": timeout,
            "folder": folder,
        }
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status = json.loads(server.stdout.readline())
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    if status is None:
        raise subprocess.TimeoutExpired(command, timeout, out, err)
    result = subprocess.CompletedProcess(command, status, out, err)
    if check:
        result.check_returncode()
    return result


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(READ_AT_START) and name != "PYTHONPATH"}


def _server() -> subprocess.Popen[str]:
    """This process's server, started on first use."""
    server = _servers.get(os.getpid())
    if server is None or server.poll() is not None:
        server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        _servers[os.getpid()] = server
        atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.communicate()


# The server's side.


def _serve() -> dict[str, Any] | None:
    """Forks a child for each request. Returns the request in the child, and None in the server when it ends."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            return request
        print(json.dumps(_status_of(child, request["timeout"])), flush=True)
    return None


def _status_of(child: int, timeout: float) -> int | None:
    """The child's exit status, negative for a signal; None if it took too long and was killed."""

    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        status = os.waitpid(child, 0)[1]
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return os.waitstatus_to_exitcode(status)


def _become(request: dict[str, Any]) -> list[str]:
    """Sets the environment, folder, files and search path that a new interpreter would have."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number, (name, flags) in enumerate(
        [("/dev/null", os.O_RDONLY), ("out", os.O_WRONLY | os.O_CREAT), ("err", os.O_WRONLY | os.O_CREAT)]
    ):
        file = os.open(Path(request["folder"], name), flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    with contextlib.suppress(OSError):
        os.setsid()
    search = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    arguments: list[str] = request["arguments"]
    first = "" if arguments[0] in ("-c", "-m") else str(Path(arguments[0]).resolve().parent)
    new = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *new, *[path for path in sys.path[1:] if path not in search]]
    return arguments


def _execute(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        code = compile(arguments[1], "<string>", "exec")
    else:
        sys.argv = arguments
        main.__file__ = arguments[0]
        code = compile(Path(arguments[0]).read_bytes(), arguments[0], "exec")
    exec(code, main.__dict__)  # noqa: S102


if __name__ == "__main__":
    import gc
    import warnings

    import torch

    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)  # threads do not survive a fork
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._dynamo
    gc.freeze()  # a garbage collection in a child would copy shared pages
    if any(metaclass.__module__ == "nanobind" for metaclass in type.__subclasses__(type)):
        # At exit nanobind (in Triton 3.9) reports as leaked what the last garbage collection leaves alive. Frozen
        # objects are left. Collecting them takes 0.8 s in a child, so it is done only where it is needed.
        atexit.register(gc.unfreeze)
    if (asked := _serve()) is not None:
        _execute(_become(asked))
