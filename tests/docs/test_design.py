"""What the pages for contributors say of the code: places, layers and settings."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.unit.test_package import LAYERS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cudnn_sdpa"
DESIGN = (ROOT / "docs" / "design.md").read_text()
ROWS = re.findall(r"^\| (Wh[^|]*\?) \| (.*) \|$", DESIGN, re.MULTILINE)
#: Set for the library's own helper processes.
PRIVATE = {"CUDNN_SDPA_IN_HELPER"}


def files(path: str) -> list[Path]:
    """The files that a path of the page can mean; a bare name is in the folder that was named before."""
    return [file for folder in (PACKAGE, ROOT) for file in folder.glob(path)] or list(PACKAGE.rglob(path))


def test_there_are_rows():
    assert len(ROWS) > 30


@pytest.mark.parametrize("answer", [answer for _, answer in ROWS], ids=[question for question, _ in ROWS])
def test_places_exist(answer):
    paths = re.findall(r"`([\w/*]+\.(?:py|cu|h|cpp))`", answer)
    assert paths or "grep" in answer
    for path in paths:
        assert files(path), path
    for name, path in re.findall(r"`(?:\w+\.)?(\w+)` in `([\w/]+\.(?:py|cu|h|cpp))`", answer):
        assert any(re.search(rf"\b{name}\b", file.read_text()) for file in files(path)), f"{name} is not in {path}"


def test_layers_are_those_that_imports_are_held_to():
    block = re.search(r"^## Layers.*?```text\n(.*?)```", DESIGN, re.DOTALL | re.MULTILINE)[1]
    listed = [line.split("  ")[0].split(", ") for line in reversed(block.splitlines())]
    heights = {name: height for height, layer in enumerate(LAYERS) for name in layer}
    for lower, upper in itertools.pairwise(listed):
        assert max(heights[name] for name in lower) < min(heights[name] for name in upper), (lower, upper)
    assert {name for name in heights if (PACKAGE / name).is_dir()} <= {name for line in listed for name in line}


def test_every_setting_is_listed():
    files = *PACKAGE.rglob("*.py"), ROOT / "cudnn_sdpa_autoload.py"
    used = {name for file in files for name in re.findall(r"\bCUDNN_SDPA_[A-Z_]+\b", file.read_text())}
    listed = set(re.findall(r"^\| `(CUDNN_SDPA_\w+)` \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE))
    assert used - PRIVATE == listed
