"""Writes the table of known issues in docs/troubleshooting.md, from cudnn_sdpa/graph/known_issues.py.

    python scripts/known_issues.py            # write it
    python scripts/known_issues.py --check    # exit with 1 if the page is out of date

It stands between the comments <!-- known-issues --> and <!-- /known-issues -->.
"""

from __future__ import annotations

import re
import sys

import pages
from pages import ROOT

from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.backend import version_string
from cudnn_sdpa.graph.known_issues import NEVER_FIXED, KnownIssue

PAGE = ROOT / "docs" / "troubleshooting.md"
MARKS = re.compile(r"(<!-- known-issues -->\n).*?(<!-- /known-issues -->)", re.DOTALL)
REPOSITORIES = {
    "pytorch": "pytorch/pytorch",
    "cudnn-frontend": "NVIDIA/cudnn-frontend",
    "TransformerEngine": "NVIDIA/TransformerEngine",
    "flashinfer": "flashinfer-ai/flashinfer",
}


def versions(issue: KnownIssue) -> str:
    """The versions of cuDNN on which the fault is kept away."""
    first = f"from {version_string(issue.first)}" if issue.first else ""
    fixed = f"before {version_string(issue.fixed)}" if issue.fixed != NEVER_FIXED else ""
    return " ".join(filter(None, (first, fixed))) or "all versions"


def source(issue: KnownIssue) -> str:
    """Where the fault was met, reports as links."""

    def link(found: re.Match[str]) -> str:
        name, number = found.groups()
        return f"[{name}#{number}](https://github.com/{REPOSITORIES[name]}/issues/{number})"

    return re.sub(r"([\w-]+)#(\d+)", link, issue.source)


def table() -> str:
    """The issues as Markdown."""
    lines = ["| what goes wrong in cuDNN | avoided on | known from | how |", "|---|---|---|---|"]
    lines += [
        "| " + " | ".join((issue.bug, versions(issue), source(issue), issue.treatment)).replace("\n", " ") + " |"
        for issue in (*known_issues.ATTENTION_ISSUES, *known_issues.FUSED_ISSUES)
    ]
    return "\n".join(lines)


def render(text: str) -> str:
    """`text` with the table written again."""
    return MARKS.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", text)


if __name__ == "__main__":
    sys.exit(pages.main(__file__, render, PAGE))
