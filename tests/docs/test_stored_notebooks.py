"""The notebooks are stored as `make notebooks` leaves them, open in Colab, and check their results.

They are executed by nbmake: `make test` runs `pytest --nbmake samples` beside the other tests.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "samples").glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def test_notebooks_are_stored_as_the_script_leaves_them():
    command = [sys.executable, "scripts/notebooks.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_plots_of_older_measurements_are_detected(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = importlib.import_module("notebooks")
    drawing = next(path for path in NOTEBOOKS if "host-h200.json" in path.read_text())
    notebook = script.nbformat.reads(drawing.read_text(), as_version=4)
    assert list(notebook.metadata.drawn_from) == ["host-h200.json"]
    assert script.complaints(notebook) == []
    notebook.metadata.drawn_from["host-h200.json"] = "0" * 12
    assert script.complaints(notebook) == ["shows other measurements than those in docs/benchmarks: execute it again"]


def test_notebooks_are_numbered_pages_of_the_site():
    assert [int(path.name[:2]) for path in NOTEBOOKS] == list(range(len(NOTEBOOKS)))
    assert len(NOTEBOOKS) >= 10
    configuration, overview = (ROOT / "mkdocs.yml").read_text(), (ROOT / "docs" / "samples.md").read_text()
    for path in NOTEBOOKS:
        assert f"      - samples/{path.name}\n" in configuration
        assert f"](../samples/{path.name})" in overview


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_plain_python_and_check_their_results(path):
    trees = [ast.parse(code) for code in cells(path, "code")]
    assert sum(isinstance(node, ast.Assert) for tree in trees for node in ast.walk(tree)) >= 1
    assert not any(re.search(r"^\s*[%!]", code, re.MULTILINE) for code in cells(path, "code"))
    imported = {
        name.split(".")[0]
        for tree in trees
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= set(sys.stdlib_module_names) | {"cudnn_sdpa", "matplotlib", "torch", "transformers"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_installs_what_the_others_import(path):
    first, *others = cells(path, "code")
    needs = {"cudnn_sdpa"} | {"transformers"} & set(re.findall(r"^import (\w+)", "\n".join(others), re.MULTILINE))
    assert set(re.findall(r'"(\w+)"', first.splitlines()[4])) == needs
    assert ("transformers]" in first) == ("transformers" in needs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_in_notebooks_are_valid(path):
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", "\n".join(cells(path, "markdown"))):
        assert (path.parent / target).exists(), target
