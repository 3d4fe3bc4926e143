"""How this process was started; imports nothing that takes time."""

from __future__ import annotations

import sys
from pathlib import Path

#: The script that the package installs.
SCRIPT = "cudnn-sdpa"


def is_command_line() -> bool:
    """Whether this process is `cudnn-sdpa` or `python -m cudnn_sdpa`, and no program that imports the package."""
    arguments = getattr(sys, "argv", None) or [""]
    if arguments[0] != "-m":
        return Path(arguments[0]).name == SCRIPT
    # So it stands there as long as Python looks for the module, whose name comes before the module's own arguments.
    module = sys.orig_argv[-len(arguments)] if len(arguments) <= len(sys.orig_argv) else ""
    return module.removeprefix("-m") == __package__
