"""The type of JSON objects in files and messages, and reading of their files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

#: Values are checked where they are read.
JsonObject: TypeAlias = dict[str, Any]


def read_text(path: str | Path) -> str:
    """The text of a file; of a pipe, the text of its writer, empty if it has none.

    Raises:
        OSError: The file cannot be read.
        UnicodeDecodeError: The file is no text.
    """
    with open(path, encoding="utf-8", opener=_without_waiting) as file:
        os.set_blocking(file.fileno(), True)
        return file.read()


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file; a pipe without waiting for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)
