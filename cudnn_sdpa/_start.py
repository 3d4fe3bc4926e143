"""Detects how this process was started; imports nothing slow."""

from __future__ import annotations

import sys
from pathlib import Path

#: The script that the package installs.
SCRIPT = "cudnn-sdpa"


def is_command_line() -> bool:
    """Whether this process is `cudnn-sdpa` or `python -m cudnn_sdpa`, not a program that imports the package."""
    arguments = getattr(sys, "argv", None) or [""]
    if arguments[0] != "-m":
        return Path(arguments[0]).name == SCRIPT
    # argv[0] is "-m" while Python searches for the module, whose name precedes the module's arguments.
    module = sys.orig_argv[-len(arguments)] if len(arguments) <= len(sys.orig_argv) else ""
    return module.removeprefix("-m") == __package__
