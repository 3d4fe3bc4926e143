"""The notebooks of samples/ at their real sizes: each as one script, without Jupyter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parent.parent.parent / "samples"
#: Checks that the notebook used the GPU.
ENDING = """
import torch
assert torch.cuda.max_memory_allocated() > 0, "nothing ran on the GPU"
"""


def script(path: Path) -> str:
    code = [cell["source"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return "\n\n".join("".join(source) for source in code) + "\n" + ENDING


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_matches_pytorch(path, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    if "transformers" in path.read_text():
        pytest.importorskip("transformers")
    if "no_plan_builds" in path.read_text():  # FlashAttention-4's kernels serve new lengths without a build
        monkeypatch.delenv("CUDNN_SDPA_PROVIDERS", raising=False)
    file = tmp_path / f"{path.stem}.py"
    file.write_text(script(path))
    search_path = os.pathsep.join(filter(None, [str(SAMPLES.parent), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, str(file)],
        cwd=SAMPLES,
        env=os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
