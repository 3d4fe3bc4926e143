"""Rows of results, and the output option of `all`."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from cudnn_sdpa.cli import make_folder

#: A row of a table: a label and measurements, by column.
Row: TypeAlias = dict[str, object]


def folder(path: Path | None) -> Path | None:
    """The path of a folder, created if it is missing."""
    if path is not None:
        make_folder(path, path)
    return path
