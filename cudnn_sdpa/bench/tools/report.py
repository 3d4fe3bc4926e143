"""Results as JSON, with the versions they were measured with, and as tables."""

from __future__ import annotations

import datetime as dt
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from cudnn_sdpa._version import __version__
from cudnn_sdpa.bench.tools.output import Row
from cudnn_sdpa.graph import backend

#: A table with more columns does not fit on a page.
MAX_COLUMNS = 12


def environment() -> dict[str, str]:
    """The GPU and the versions of a measurement."""
    return {
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "cudnn_sdpa": __version__,
        "cudnn": backend.version_string(backend.cudnn_version()),
        "nvidia-cudnn-frontend": backend.frontend_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


def write(path: Path, name: str, results: Mapping[str, list[Row]]) -> None:
    """Writes the results of one benchmark command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"benchmark": name, "environment": environment(), **results}
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def upright(rows: list[Row]) -> list[Row]:
    """Rows in the form that fits on a page: a wide table with few rows is transposed."""
    label, *keys = rows[0]
    if len(rows[0]) <= MAX_COLUMNS or len(rows) >= len(rows[0]):
        return rows
    return [{label: key, **{str(row[label]): row[key] for row in rows}} for key in keys]


def show(title: str, rows: list[Row], console: Console | None = None) -> None:
    """Prints rows with the same keys as a table."""
    rows = upright(rows)
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    (console or Console()).print(table)
