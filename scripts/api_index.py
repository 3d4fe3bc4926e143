"""Writes the list of public names in docs/api/index.md: one line for each, from its docstring.

    python scripts/api_index.py            # write it
    python scripts/api_index.py --check    # exit with 1 if the page is out of date

It stands between the comments <!-- names --> and <!-- end of names -->. The names are those that the other pages
of docs/api document, and the pages come in the order of mkdocs.yml.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from pathlib import Path

import pages
from pages import ROOT

FOLDER = ROOT / "docs" / "api"
INDEX = FOLDER / "index.md"
MARKS = re.compile(r"(<!-- names -->\n).*?(<!-- end of names -->)", re.DOTALL)


def reference_pages() -> list[Path]:
    """The pages of the reference in the order of the site's navigation, without the index."""
    names = re.findall(r"\bapi/(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    return [FOLDER / name for name in names if name != INDEX.name]


def summary(path: str) -> str:
    """The first paragraph of an object's docstring, as one line."""
    found = pkgutil.resolve_name(path)
    if not (inspect.isclass(found) or callable(found)):
        return f"The one `{type(found).__name__}` of this process."
    text = inspect.getdoc(found) or ""
    return " ".join(text.split("\n\n", 1)[0].split()).replace("|", "\\|")


def section(page: Path) -> str:
    """A page's heading and its names."""
    text = page.read_text()
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    assert title, f"{page} has no title"
    lines = [f"## [{title[1]}]({page.name})", "", "| name | meaning |", "|---|---|"]
    for path in re.findall(r"^::: (\S+)", text, re.MULTILINE):
        name = path.rpartition(".")[2]
        folder = path.removeprefix("cudnn_sdpa.").partition(".")[0]
        is_nested = folder in ("nn", "integrations", "compat", "distributed", "kernels")
        shown = path.removeprefix("cudnn_sdpa.") if is_nested else name
        lines.append(f"| [`{shown}`]({page.name}#{path}) | {summary(path)} |")
    return "\n".join(lines)


def render(text: str) -> str:
    """`text` with the list written again."""
    sections = "\n\n".join(section(page) for page in reference_pages())
    return MARKS.sub(lambda found: f"{found[1]}\n{sections}\n\n{found[2]}", text)


if __name__ == "__main__":
    sys.exit(pages.main(__file__, render, INDEX))
