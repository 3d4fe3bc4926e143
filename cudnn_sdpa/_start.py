"""Detects how this process was started; imports nothing slow."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

#: The script that the package installs.
SCRIPT = "cudnn-sdpa"


class _Use:
    """Whether code in the command line's process has used the package as a library."""

    as_library = False


def import_lazily(package: str) -> None:
    """Makes a package import its public names on the first access to one of them.

    In the command line's process too, `sitecustomize` or a PyTorch plug-in may use them.
    """
    module: Any = sys.modules[package]

    def import_all(name: str) -> object:
        if name not in getattr(module, "__all__", ()):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        del module.__getattr__
        _Use.as_library = True
        return getattr(importlib.reload(module), name)

    module.__getattr__ = import_all


def is_command_line() -> bool:
    """Whether this process is `cudnn-sdpa` or `python -m cudnn_sdpa`, not a program that imports the package."""
    if _Use.as_library:
        return False
    arguments = getattr(sys, "argv", None) or [""]
    if arguments[0] != "-m":
        return Path(arguments[0]).name == SCRIPT
    # argv[0] is "-m" while Python searches for the module, whose name precedes the module's arguments.
    module = sys.orig_argv[-len(arguments)] if len(arguments) <= len(sys.orig_argv) else ""
    return module.removeprefix("-m") == __package__
