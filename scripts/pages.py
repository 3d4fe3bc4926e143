"""What the scripts that write tables into pages share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main(script: str, render: Callable[[str], str], *pages: Path) -> int:
    """Writes pages as `render` makes them of what they are, or with --check only compares; 1 if one was out of date."""
    stale = [page for page in pages if page.read_text() != render(page.read_text())]
    for page in stale:
        if "--check" in sys.argv:
            print(f"{page.relative_to(ROOT)} is out of date; run: python scripts/{Path(script).name}")
        else:
            page.write_text(render(page.read_text()))
    return 1 if stale and "--check" in sys.argv else 0
