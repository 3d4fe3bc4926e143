"""The type of objects of JSON files and messages, and how their files are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

#: Whoever reads a value checks it.
JsonObject: TypeAlias = dict[str, Any]


def read_text(path: str | Path) -> str:
    """The text of a file; of a pipe, what its writer gives, and nothing at once if it has no writer.

    Raises:
        OSError: It cannot be read.
        UnicodeDecodeError: It is no text.
    """
    with open(path, encoding="utf-8", opener=_without_waiting) as file:
        os.set_blocking(file.fileno(), True)
        return file.read()


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file; a pipe without waiting for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)
