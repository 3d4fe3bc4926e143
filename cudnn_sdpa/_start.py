"""Detects how this process was started; imports nothing slow."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

#: The script that the package installs.
SCRIPT = "cudnn-sdpa"


class _Asked:
    """Set once code in the command line's process uses the package as a library."""

    so_far = False


def import_when_asked(package: str) -> None:
    """Makes a package import its public names when one of them is first accessed.

    `sitecustomize` or a PyTorch plug-in may use them in the command line's process too.
    """
    module: Any = sys.modules[package]

    def find(name: str) -> Any:
        if name not in getattr(module, "__all__", ()):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        del module.__getattr__
        _Asked.so_far = True
        return getattr(importlib.reload(module), name)

    module.__getattr__ = find


def is_command_line() -> bool:
    """Whether this process is `cudnn-sdpa` or `python -m cudnn_sdpa`, and no program that imports the package."""
    if _Asked.so_far:
        return False
    arguments = getattr(sys, "argv", None) or [""]
    if arguments[0] != "-m":
        return Path(arguments[0]).name == SCRIPT
    # So it stands there as long as Python looks for the module, whose name comes before the module's own arguments.
    module = sys.orig_argv[-len(arguments)] if len(arguments) <= len(sys.orig_argv) else ""
    return module.removeprefix("-m") == __package__
