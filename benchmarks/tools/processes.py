"""Measurements that need a Python process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from cudnn_sdpa.graph.layouts import JsonObject
from cudnn_sdpa.plans.default_store import VARIABLE

#: Processes import the benchmarks and the library from here, whether or not the library is installed.
ROOT = Path(__file__).parents[2]

#: A process takes a few seconds, or half a minute if it builds hundreds of plans.
TIMEOUT_SECONDS = 600.0


def run_module(name: str, *arguments: str, store: str) -> JsonObject:
    """The JSON that `python -m name` prints as its last line.

    Args:
        name: A module.
        *arguments: Its command line arguments.
        store: The plan store of the process: a folder, or "off".

    Raises:
        RuntimeError: The process failed; the message has the end of its standard error.
    """
    return _run(["-m", name, *arguments], " ".join([name, *arguments]), store)


def run_code(code: str, label: str, *, store: str) -> JsonObject:
    """The JSON that code prints as its last line; errors name it `label`."""
    return _run(["-c", code], label, store)


def run_command(*arguments: str) -> int:
    """Runs a command of this command line with its output passed on; returns the exit status."""
    return subprocess.run([sys.executable, "-m", "benchmarks", *arguments], env=_environment(), check=False).returncode


def run_ranks(name: str, count: int, *arguments: str) -> JsonObject:
    """The JSON that rank 0 of `torchrun -m name` prints as its last line, of that many processes on this machine."""
    launched = ("--standalone", "--nproc-per-node", str(count), "-m", name, *arguments)
    return _run(["-m", "torch.distributed.run", *launched], f"{count} ranks of {name}", "off")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def _run(command: list[str], label: str, store: str) -> JsonObject:
    result = subprocess.run(
        [sys.executable, *command],
        env={**_environment(), VARIABLE: store},
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
