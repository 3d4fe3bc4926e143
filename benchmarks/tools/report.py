"""Results as JSON, with the versions they were measured with, and as tables."""

from __future__ import annotations

import datetime as dt
import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.tools import flash_attention
from benchmarks.tools.output import Row
from cudnn_sdpa._version import __version__
from cudnn_sdpa.graph import backend

#: Distributions that are measured beside this library.
PEERS = (*flash_attention.DISTRIBUTIONS, "quack-kernels", "liger-kernel")

#: A table with more columns does not fit on a page.
MAX_COLUMNS = 12


def environment() -> dict[str, str]:
    """The GPU and the versions of a measurement; a benchmark of small sizes may have run without a GPU."""
    has_gpu = torch.cuda.is_available()
    return {
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if has_gpu else "none",
        "cpu": cpu_name(),
        "cudnn_sdpa": __version__,
        "cudnn": backend.version_string(backend.cudnn_version()),
        "nvidia-cudnn-frontend": backend.frontend_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        **peer_versions(),
    }


def peer_versions() -> dict[str, str]:
    """The versions of the installed peers."""
    installed = {each.name.lower().replace("_", "-"): each.version for each in metadata.distributions()}
    return {name: installed[name] for name in PEERS if name in installed}


def cpu_name() -> str:
    """As Linux has it, which host times depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def write(path: Path, name: str, results: Mapping[str, list[Row]]) -> None:
    """Writes the results of one benchmark command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"benchmark": name, "environment": environment(), **results}
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def upright(rows: list[Row]) -> list[Row]:
    """Rows in the form that fits on a page: a wide table with few rows is transposed."""
    label, *keys = columns_of(rows)
    if len(keys) < MAX_COLUMNS or len(rows) > len(keys):
        return rows
    return [{label: key, **{str(row[label]): row[key] for row in rows if key in row}} for key in keys]


def show(title: str, rows: list[Row], console: Console | None = None) -> None:
    """Prints rows as a table; a dash stands for what was not measured."""
    rows = upright(rows)
    table = Table(title=title, title_justify="left")
    columns = columns_of(rows)
    for column in columns:
        is_text = any(isinstance(row.get(column), str) for row in rows)
        table.add_column(column, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    (console or Console()).print(table)


def columns_of(rows: list[Row]) -> list[str]:
    """The keys of all rows, in the order in which they first appear."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
