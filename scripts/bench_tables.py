"""Writes the tables of measured numbers in README.md and docs/benchmarks.md, out of the JSON in docs/benchmarks.

    python scripts/bench_tables.py            # write them
    python scripts/bench_tables.py --check    # exit with 1 if a page is out of date

A page names its table in a pair of comments, <!-- bench:host --> and <!-- /bench -->, after the file and part.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
MARKS = re.compile(r"<!-- bench:(?P<part>\w+) -->\n.*?<!-- /bench -->", re.DOTALL)


def table(part: str) -> str:
    """The rows of one part of `bench host`, as Markdown, and what they were measured with."""
    data = json.loads((ROOT / "docs" / "benchmarks" / "host-h200.json").read_text())
    rows, versions = data[part], data["environment"]
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join(cell(value) for value in row.values()) + " |" for row in rows]
    measured = (
        f"{versions['gpu']}, cuDNN {versions['cudnn']}, frontend {versions['nvidia-cudnn-frontend']}, "
        f"PyTorch {versions['torch']}, Python {versions['python']}, {versions['date']}"
    )
    return "\n".join([*lines, "", f"<small>{measured}</small>"])


def cell(value: object) -> str:
    """A number with the digits that a measurement has, or a text."""
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("  ", "&nbsp; ")


def render(text: str) -> str:
    """`text` with every table made anew."""
    return MARKS.sub(lambda found: f"<!-- bench:{found['part']} -->\n{table(found['part'])}\n<!-- /bench -->", text)


def main() -> int:
    """Writes the pages, or with --check only compares them."""
    stale = [page for page in PAGES if page.read_text() != render(page.read_text())]
    for page in stale:
        print(f"{page.relative_to(ROOT)} is out of date; run: python scripts/bench_tables.py")
        if "--check" not in sys.argv:
            page.write_text(render(page.read_text()))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
