"""The output option of commands: the path is checked before anything is measured or planned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from cudnn_sdpa.errors import OptionError

#: A row of a table: a label and measurements, by column.
Row: TypeAlias = dict[str, object]


def writable(path: Path | None) -> Path | None:
    """The path of a file, checked to be writable before a long command starts."""
    if path is None:
        return None
    _make_folder(path.parent, path)
    if path.is_dir():
        raise OptionError("--json", repr(str(path)), "the path of a file, not of a folder")
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK):
        raise OptionError("--json", f"{str(path)!r}", f"a path that can be written; {str(target)!r} cannot")
    return path


def folder(path: Path | None) -> Path | None:
    """The path of a folder, created if it is missing."""
    if path is not None:
        _make_folder(path, path)
    return path


def _make_folder(folder: Path, path: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        actual = f"{str(path)!r}, whose folder cannot be created ({error.strerror})"
        raise OptionError("--json", actual, "a path that can be written") from None


Output = Annotated[
    Path | None,
    typer.Option("--output", "--json", "-o", callback=writable, help="Write the results to this JSON file."),
]
