"""Writes the tables of docs/support.md out of the rules in cudnn_sdpa/attention/support/rules.py.

    python scripts/support_tables.py            # write them
    python scripts/support_tables.py --check    # exit with 1 if the page is out of date

The page names a table in a pair of comments: <!-- support:sdpa/9.28 --> and <!-- /support --> is `sdpa` with that
version of cuDNN. It needs no GPU and no cuDNN.
"""

from __future__ import annotations

import re
import sys

import pages
from pages import ROOT

sys.path.insert(0, str(ROOT))

from cudnn_sdpa.planning.support import ROWS, cell

PAGE = ROOT / "docs" / "support.md"
MARKS = re.compile(r"(<!-- support:(?P<operation>\w+)/(?P<cudnn>[\d.]+) -->\n).*?<!-- /support -->", re.DOTALL)
GPUS = {80: "SM 80", 89: "SM 89", 90: "SM 90", 100: "SM 100", 120: "SM 120"}


def table(operation: str, cudnn: str) -> str:
    """One table as Markdown, and under it the reasons for all that is not there."""
    lines = [f"| | {' | '.join(GPUS.values())} |", "|---" * (1 + len(GPUS)) + "|"]
    notes: dict[str, int] = {}
    for row in ROWS:
        cells = []
        for sm in GPUS:
            found = cell(operation, row, sm=sm, cudnn=cudnn)
            numbers = sorted(notes.setdefault(of_row(reason), 1 + len(notes)) for reason in found.reasons)
            cells.append(found.supported + (f" <sup>{','.join(map(str, numbers))}</sup>" if numbers else ""))
        if set(cells) != {"–"}:
            lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in notes.items())])


def of_row(reason: str) -> str:
    """A reason without what the table's row and column say."""
    return re.sub(r"head dims \d+ and \d+", "these head dims", re.sub(r" ?\bon SM \d+\b", "", reason)).strip()


def render(text: str) -> str:
    """`text` with every table made anew."""

    def renew(found: re.Match[str]) -> str:
        return f"{found[1]}\n{table(found['operation'], found['cudnn'])}\n\n<!-- /support -->"

    return MARKS.sub(renew, text)


if __name__ == "__main__":
    sys.exit(pages.main(__file__, render, PAGE))
