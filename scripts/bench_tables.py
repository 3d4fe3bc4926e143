"""Writes the tables of measured numbers in pages of docs, out of the JSON in docs/benchmarks.

    python scripts/bench_tables.py            # write them
    python scripts/bench_tables.py --check    # exit with 1 if a page is out of date

A page names its table in a pair of comments: <!-- bench:attention/kernels --> and <!-- /bench --> is the part
"kernels" of attention-h200.json, or of attention.json; attention-h100/kernels is that of attention-h100.json. Without a
file's name it is a part of host's. What stands between them stays as it is while that file, or the part in it, is
missing.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pages
from pages import ROOT

from cudnn_sdpa.bench.tools.report import columns_of, upright

PAGES = tuple(
    ROOT / "docs" / name
    for name in ("benchmarks.md", "context_parallel.md", "kernels.md", "many_gpus.md", "pytorch_backend.md")
)
MARKS = re.compile(r"(<!-- bench:(?:(?P<file>[\w-]+)/)?(?P<part>\w+) -->\n).*?<!-- /bench -->", re.DOTALL)


def measured(file: str) -> dict[str, Any]:
    """What a benchmark's file holds; nothing if it has not been written yet."""
    paths = (ROOT / "docs" / "benchmarks" / name for name in (f"{file}-h200.json", f"{file}.json"))
    return next((json.loads(path.read_text()) for path in paths if path.exists()), {})


def table(rows: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """The rows of one part of a benchmark, as Markdown, and what they were measured with."""
    rows = upright(rows)
    columns = columns_of(rows)
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in rows]
    machine = (
        f"{versions['gpu']}, cuDNN {versions['cudnn']}, frontend {versions['nvidia-cudnn-frontend']}, "
        f"PyTorch {versions['torch']}, Python {versions['python']}, {versions['date']}"
    )
    return "\n".join([*lines, "", f"<small>{machine}</small>"])


def cell(value: object) -> str:
    """A number with the digits that a measurement has, or a text."""
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("  ", "&nbsp; ").replace("|", "\\|")


def render(text: str) -> str:
    """`text` with every table made anew."""

    def renew(found: re.Match[str]) -> str:
        data = measured(found["file"] or "host")
        if found["part"] not in data:
            return found[0]
        return f"{found[1]}{table(data[found['part']], data['environment'])}\n<!-- /bench -->"

    return MARKS.sub(renew, text)


if __name__ == "__main__":
    sys.exit(pages.main(__file__, render, *PAGES))
