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
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # which does not wait for a writer
    with os.fdopen(descriptor, encoding="utf-8") as file:
        os.set_blocking(descriptor, True)
        return file.read()
