"""Writes the tree of the package in docs/design.md: one line for each file, from its docstring.

    python scripts/package_tree.py            # write it
    python scripts/package_tree.py --check    # exit with 1 if the page is out of date

It stands between the comments <!-- tree --> and <!-- end of tree -->.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

import pages
from pages import ROOT

PAGE = ROOT / "docs" / "design.md"
PACKAGE = ROOT / "cudnn_sdpa"
MARKS = re.compile(r"(<!-- tree -->\n).*?(<!-- end of tree -->)", re.DOTALL)

#: The rooms in the order of their imports, what imports nothing first. Others follow by name.
ROOMS = [
    *("graph", "plans", "offline", "engine", "attention", "distributed", "kernels", "fused"),
    *("serving", "nn", "integrations"),
    *("compat", "planning", "doctor"),
    *("support", "dense", "varlen", "paged", "fp8", "paged_varlen"),
]


#: Sources in C++ and CUDA begin with comments.
OTHERS = {".cu", ".cuh", ".h", ".cpp"}


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, or of the comment at the head of another source, at most a line."""
    if path.suffix in OTHERS:
        text = path.read_text().split("\n", 1)[0].lstrip("/* ")
    else:
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.split("\n", 1)[0].split(". ", 1)[0].removesuffix(".")


@functools.cache
def column() -> int:
    """Where the texts begin: behind the longest name."""
    paths = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.suffix in {".py", *OTHERS}]
    return 1 + max(2 * len(path.parts) + len(path.name) for path in paths)


def lines(folder: Path, indent: int) -> list[str]:
    """A folder's files, then its folders."""
    sources = [path for path in folder.iterdir() if path.suffix in {".py", *OTHERS}]
    names = sorted(path for path in sources if path.name != "__init__.py" or folder == PACKAGE)
    width = column() - indent
    found = [f"{' ' * indent}{path.name:{width}}{summary(path)}" for path in names]
    inner = [path.parent for path in folder.glob("*/__init__.py")]
    for room in sorted(
        inner, key=lambda path: (ROOMS.index(path.name) if path.name in ROOMS else len(ROOMS), path.name)
    ):
        found += ["", f"{' ' * indent}{room.name + '/':{width}}{summary(room / '__init__.py')}"]
        found += lines(room, indent + 2)
    return found


def render(text: str) -> str:
    """`text` with the tree made anew."""
    tree = "\n".join(["```text", "cudnn_sdpa/", *lines(PACKAGE, 2), "```"])
    return MARKS.sub(lambda found: f"{found[1]}{tree}\n{found[2]}", text)


if __name__ == "__main__":
    sys.exit(pages.main(__file__, render, PAGE))
