"""Writes the tables of docs/engines.md out of the JSON in docs/engines, which `cudnn_sdpa support --target` writes.

    python scripts/engine_tables.py            # write them
    python scripts/engine_tables.py --check    # exit with 1 if the page is out of date

The page names a table in a pair of comments: <!-- engines:b200 --> and <!-- /engines --> is docs/engines/b200.json.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pages
from pages import ROOT

PAGE = ROOT / "docs" / "engines.md"
MARKS = re.compile(r"(<!-- engines:(?P<target>\w+) -->\n).*?<!-- /engines -->", re.DOTALL)


def table(data: dict[str, Any]) -> str:
    """One GPU's table as Markdown: every option at head dim 128, and the other head dims without options."""
    cells: dict[str, dict[tuple[str, str], set[str]]] = {}
    for call in data["calls"]:
        dims, option = (call["head_dim"], call["head_dim_v"]), call["option"]
        if dims != (128, 128) and option != "no option":
            continue
        row = option if dims == (128, 128) else f"head dims {dims[0]} and {dims[1]}"
        found = call["engine"].removeprefix("eng") or "none"
        cells.setdefault(row, {}).setdefault((call["operation"], call["direction"]), set()).add(found)
    operations = dict.fromkeys(call["operation"] for call in data["calls"])
    columns = [(operation, direction) for operation in operations for direction in ("forward", "backward")]
    of = data["environment"]
    lines = [f"{of['gpu']}; cuDNN {of['cudnn']}, frontend {of['nvidia-cudnn-frontend']}.", ""]
    lines += ["| with | " + " | ".join(f"{o} {d}" for o, d in columns) + " |", "|---" * (1 + len(columns)) + "|"]
    lines += [
        f"| {row} | " + " | ".join(" or ".join(sorted(found.get(column, {"–"}))) for column in columns) + " |"
        for row, found in cells.items()
    ]
    return "\n".join(lines)


def render(text: str) -> str:
    """`text` with every table made anew."""

    def renew(found: re.Match[str]) -> str:
        data = json.loads((ROOT / "docs" / "engines" / f"{found['target']}.json").read_text())
        return f"{found[1]}\n{table(data)}\n\n<!-- /engines -->"

    return MARKS.sub(renew, text)


if __name__ == "__main__":
    sys.exit(pages.main(__file__, render, PAGE))
