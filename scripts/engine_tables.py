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
    """One GPU's table as Markdown."""
    cells: dict[str, dict[str, str]] = {}
    for call in data["calls"]:
        engines = [engine.removeprefix("eng") or "none" for engine in call.get("engines", {"forward": ""}).values()]
        cells.setdefault(call["option"], {})[call["operation"]] = " / ".join(engines)
    operations = dict.fromkeys(call["operation"] for call in data["calls"])
    of = data["environment"]
    lines = [f"{of['gpu']}; cuDNN {of['cudnn']}, frontend {of['nvidia-cudnn-frontend']}.", ""]
    lines += ["| | " + " | ".join(operations) + " |", "|---" * (1 + len(operations)) + "|"]
    lines += [
        f"| {option} | " + " | ".join(found.get(operation, "–") for operation in operations) + " |"
        for option, found in cells.items()
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
