"""Detects how this process was started, and imports PyTorch; imports nothing slow before."""

from __future__ import annotations

import sys
from pathlib import Path

#: The script that the package installs.
SCRIPT = "cudnn-sdpa"


def is_command_line() -> bool:
    arguments = getattr(sys, "argv", None) or [""]
    if arguments[0] != "-m":
        return Path(arguments[0]).name == SCRIPT
    # argv[0] is "-m" while Python searches for the module, whose name precedes the module's arguments.
    module = sys.orig_argv[-len(arguments)] if len(arguments) <= len(sys.orig_argv) else ""
    return module.removeprefix("-m") == __package__


def import_pytorch() -> None:
    """Imports PyTorch; if that fails, the error names the fix."""
    try:
        import torch  # noqa: F401
    except Exception as error:
        from cudnn_sdpa.doctor.checks import cure_of

        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        cure = (
            "Install it: pip install torch." if missing else "Reinstall PyTorch: pip install --force-reinstall torch."
        )
        raise ImportError(
            f"cudnn_sdpa needs PyTorch, and `import torch` fails: {str(error).rstrip('.')}. {cure_of(str(error), cure)}"
        ) from error
