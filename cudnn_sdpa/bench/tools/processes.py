"""Measurements that need a Python process of their own."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from cudnn_sdpa.offline import interpreter

#: A process takes some seconds; one that builds hundreds of plans, half a minute.
TIMEOUT_SECONDS = 600.0


def run_module(name: str, *arguments: str, store: str) -> dict[str, Any]:
    """What `python -m name` prints as its last line, which is JSON.

    Args:
        name: A module of this package.
        *arguments: What it is given.
        store: The plan store that it uses: a folder, or "off".

    Raises:
        RuntimeError: The process failed; what it said is in the message.
    """
    return _run(interpreter.module_command(name, arguments), " ".join([name, *arguments]), store)


def run_code(code: str, what: str, *, store: str) -> dict[str, Any]:
    """The same of a piece of code; `what` says in the message what it is."""
    return _run(interpreter.command(code), what, store)


def run_command(*arguments: str) -> int:
    """The exit status of the command line with these arguments; what it prints is printed."""
    return subprocess.run(interpreter.module_command("cudnn_sdpa", arguments), check=False).returncode


def _run(command: list[str], what: str, store: str) -> dict[str, Any]:
    from cudnn_sdpa.plans.default_store import VARIABLE

    result = subprocess.run(
        command,
        env={**os.environ, VARIABLE: store},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )
    lines = result.stdout.splitlines()
    if result.returncode != 0 or not lines:
        said = result.stderr.strip()[-4000:]
        raise RuntimeError(f"{what} ended with exit code {result.returncode} and said:\n{said}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer
