"""Where commands write their results: whether they can is found out before anything is measured or planned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from cudnn_sdpa.errors import OptionError


def writable(path: Path | None) -> Path | None:
    """The path of a file, if one can be written there: to find out at the end would be late."""
    if path is None:
        return None
    _make_folder(path.parent, path)
    if path.is_dir():
        raise OptionError("--json", repr(str(path)), "the path of a file, not of a folder")
    place = path if path.exists() else path.parent
    if not os.access(place, os.W_OK):
        raise OptionError("--json", f"{str(path)!r}", f"a path that can be written; {str(place)!r} cannot")
    return path


def folder(path: Path | None) -> Path | None:
    """The path of a folder, which is made if it is not there."""
    if path is not None:
        _make_folder(path, path)
    return path


def _make_folder(folder: Path, path: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{str(path)!r}, for which no folder can be made ({error.strerror})"
        raise OptionError("--json", why, "a path that can be written") from None


Output = Annotated[
    Path | None,
    typer.Option("--output", "--json", "-o", callback=writable, help="Write the results to this JSON file."),
]
