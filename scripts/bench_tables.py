"""Writes the tables of measured numbers in pages of docs, out of the JSON in docs/benchmarks.

    python scripts/bench_tables.py            # write them
    python scripts/bench_tables.py --check    # exit with 1 if a page is out of date

A page names its table in a pair of comments: <!-- bench:attention/kernels --> and <!-- /bench --> is the part
"kernels" of attention-h200.json, or of attention.json; attention-h100/kernels is that of attention-h100.json. Without a
file's name it is a part of host's. Names of columns may follow, each after a bar: <!-- bench:peers-h100/forward | call
| FlashAttention-3 / ours --> shows only these. The part "machine" of a file is what it was measured with. What stands
between the comments stays as it is while that file, or the part in it, is missing.

A column "why not" becomes notes below the table.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pages
from pages import ROOT

from benchmarks.tools.report import columns_of, upright

NAMES = ("benchmarks", "context_parallel", "index", "kernels", "many_gpus", "providers", "pytorch_backend", "when_not")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in NAMES))
MARKS = re.compile(
    r"(<!-- bench:(?:(?P<file>[\w-]+)/)?(?P<part>\w+)(?P<columns>(?: \| [^|\n]+?)*) -->\n).*?<!-- /bench -->", re.DOTALL
)
WHY_NOT = "why not"
PEERS = {
    "tokenspeed-fa3": "FlashAttention-3",
    "flash-attn-4": "FlashAttention-4",
    "quack-kernels": "quack",
    "liger-kernel": "Liger",
}


def measured(file: str) -> dict[str, Any]:
    """What a benchmark's file holds; nothing if it has not been written yet."""
    paths = (ROOT / "docs" / "benchmarks" / name for name in (f"{file}-h200.json", f"{file}.json"))
    return next((json.loads(path.read_text()) for path in paths if path.exists()), {})


def table(rows: list[dict[str, Any]], versions: dict[str, str], columns: list[str] | None = None) -> str:
    """The rows of one part of a benchmark, as Markdown, and what they were measured with."""
    rows = upright(rows) if columns is None else rows
    columns = columns_of(rows) if columns is None else columns
    notes: dict[str, int] = {}
    if WHY_NOT in columns:
        columns = [name for name in columns if name != WHY_NOT] + ["notes"]
        rows = [{**row, "notes": note(str(row.get(WHY_NOT) or "–"), notes)} for row in rows]
        columns = columns if notes else columns[:-1]
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in rows]
    lines += ["", *(f"{number}. {reason}" for reason, number in notes.items())] if notes else []
    return "\n".join([*lines, "", machine(versions)])


def note(reasons: str, notes: dict[str, int]) -> str:
    """The numbers of reasons, without the kind of error and its place in a source file."""
    found = [] if reasons == "–" else re.split(r"; (?=[\w ,+-]+: )", reasons)
    texts = [re.sub(r"\b\w+Error: (?:\w+, \S+:\d+, )?", "", reason) for reason in found]
    return ", ".join(str(notes.setdefault(text, 1 + len(notes))) for text in texts) or "–"


def machine(versions: dict[str, str]) -> str:
    """What a benchmark was measured with."""
    packages = [f"{PEERS[name]} ({name} {versions[name]})" for name in PEERS if name in versions]
    parts = [
        versions["gpu"],
        *filter(None, [versions.get("cpu")]),
        f"cuDNN {versions['cudnn']}",
        f"frontend {versions['nvidia-cudnn-frontend']}",
        f"PyTorch {versions['torch']}",
        f"Python {versions['python']}",
        *packages,
        versions["date"],
    ]
    return f"<small>{', '.join(parts)}</small>"


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
        if found["part"] == "machine" and data:
            return f"{found[1]}{machine(data['environment'])}\n<!-- /bench -->"
        if found["part"] not in data:
            return found[0]
        columns = found["columns"].removeprefix(" | ").split(" | ") if found["columns"] else None
        return f"{found[1]}{table(data[found['part']], data['environment'], columns)}\n<!-- /bench -->"

    return MARKS.sub(renew, text)


if __name__ == "__main__":
    sys.exit(pages.main(__file__, render, *PAGES))
