"""Measured times that choose whose kernels serve a call: the rows of `preferences.json`.

`scripts/preferences.py` writes them out of the JSON of the benchmarks; each function's rows have their source there.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_suffix(".json")


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(_FILE.read_text())
    return found


def gpu_of(function: str) -> str:
    """The GPU on which the rows of a function were measured; they decide for others of its compute capability, too."""
    measured: str = _table()[function]["measured"]
    return measured.partition(",")[0]


def source_of(function: str) -> str:
    """The file that the rows of a function were made of, in the repository."""
    source: str = _table()[function]["source"]
    return source


def rows_of(function: str) -> list[dict[str, Any]]:
    """The rows of a function, whose lists are tuples."""
    rows = _table()[function]["rows"]
    return [{name: tuple(x) if isinstance(x, list) else x for name, x in row.items()} for row in rows]
