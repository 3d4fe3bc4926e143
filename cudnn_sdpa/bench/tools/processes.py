"""Measurements that need a Python process of their own."""

from __future__ import annotations

import json
import os
import subprocess

from cudnn_sdpa._json import JsonObject
from cudnn_sdpa.offline import interpreter

#: A process takes a few seconds, or half a minute if it builds hundreds of plans.
TIMEOUT_SECONDS = 600.0


def run_module(name: str, *arguments: str, store: str) -> JsonObject:
    """The JSON that `python -m name` prints as its last line.

    Args:
        name: A module of this package.
        *arguments: Its command line arguments.
        store: The plan store of the process: a folder, or "off".

    Raises:
        RuntimeError: The process failed; the message has the end of its standard error.
    """
    return _run(interpreter.module_command(name, arguments), " ".join([name, *arguments]), store)


def run_code(code: str, label: str, *, store: str) -> JsonObject:
    """The JSON that code prints as its last line; errors name it `label`."""
    return _run(interpreter.command(code), label, store)


def run_command(*arguments: str) -> int:
    """Runs this package's command line with its output passed on; returns the exit status."""
    return subprocess.run(interpreter.module_command("cudnn_sdpa", arguments), check=False).returncode


def run_ranks(name: str, count: int, *arguments: str) -> JsonObject:
    """The JSON that rank 0 of `torchrun -m name` prints as its last line, of that many processes on this machine."""
    launched = ("--standalone", "--nproc-per-node", str(count), "-m", name, *arguments)
    return _run(interpreter.module_command("torch.distributed.run", launched), f"{count} ranks of {name}", "off")


def _run(command: list[str], label: str, store: str) -> JsonObject:
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
        output = result.stderr.strip()[-4000:]
        raise RuntimeError(f"{label} ended with exit code {result.returncode}; standard error:\n{output}")
    values: JsonObject = json.loads(lines[-1])
    return values
