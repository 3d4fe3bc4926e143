"""Hooks of mkdocs: notebooks of samples/ become pages, and links lead to the same place on GitHub and on the site."""

from __future__ import annotations

import html
import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

log = logging.getLogger("mkdocs.hooks.site")
ROOT = Path(__file__).parent.parent


@event_priority(100)  # before mkdocs-jupyter, which makes pages of them
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files of samples/, a neighbor of docs/ in the repository and within it on the site."""
    for path in sorted((ROOT / "samples").rglob("*")):
        if path.suffix in (".ipynb", ".py", ".cu"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """A page links to `../samples/…` in the repository, which on the site is next to it."""
    markdown = markdown.replace("](../samples/", "](samples/").replace("](../CHANGELOG.md", "](changelog.md")
    return markdown.replace("](docs/", "](")  # of the changelog, which is above docs/


def on_page_content(content: str, page: Page, files: Files, **_: object) -> str:
    """Makes a notebook a page like others: the theme's style instead of its own, and its links those of the site."""
    if not page.file.src_uri.endswith(".ipynb"):
        return content
    content = re.sub(r"<(style|script)\b.*?</\1>", "", content, flags=re.DOTALL)  # 600 KB, and MathJax from elsewhere
    content = re.sub(
        r'<div class="zeroclipboard-container">.*?</clipboard-copy>\s*</div>', "", content, flags=re.DOTALL
    )
    content = re.sub(r"<div [^>]*clipboard-copy-txt[^>]*>.*?</div>", "", content, flags=re.DOTALL)
    content = re.sub(
        r'<div class="highlight-ipynb hl-python">\s*<pre>(.*?)</pre>\s*</div>',
        r'<div class="language-python highlight"><pre><code>\1</code></pre></div>',
        content,
        flags=re.DOTALL,
    )
    content = content.replace('class="anchor-link"', 'class="headerlink"').replace("<img ", '<img loading="lazy" ')
    content = re.sub(r'href="(#[^"]*)"', lambda link: link[0].lower(), content)  # GitHub's anchors have capitals
    return re.sub(r'href="([^"#:]+)(#[^"]*)?"', lambda link: _link(link[1], link[2] or "", page, files), content)


def _link(target: str, anchor: str, page: Page, files: Files) -> str:
    """A link of a notebook, which is as in the repository, as it has to be on the site."""
    path = posixpath.normpath(posixpath.join("samples", html.unescape(target)))
    file = files.get_file_from_path(path.removeprefix("docs/"))
    if file is None:
        log.warning("%s links to %s, which is not there", page.file.src_uri, target)
        return f'href="{target}{anchor}"'
    return f'href="{get_relative_url(file.url, page.url)}{anchor}"'
