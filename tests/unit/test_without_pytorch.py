"""If PyTorch cannot be imported, the package and its command line say so, with a remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FAULTS = {
    "missing": ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "pip install torch"),
    "no cuDNN": (
        "raise ImportError('libcudnn.so.9: cannot open shared object file: No such file or directory')",
        "pip install 'cudnn-sdpa[cu12]' or 'cudnn-sdpa[cu13]'",
    ),
    "mixed": ("raise OSError('libcublas.so.12: undefined symbol: cublasLtCreate')", "LD_LIBRARY_PATH"),
    "something else": ("raise RuntimeError('out of luck.')", "fails: out of luck. Reinstall PyTorch"),
}


@pytest.mark.parametrize("command", [["-c", "import cudnn_sdpa.plans.cache"], ["-m", "cudnn_sdpa", "doctor"]])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_pytorch_is_named_with_a_remedy(tmp_path, fault, command):
    code, cure = FAULTS[fault]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(code)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    result = subprocess.run(
        [sys.executable, *command], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1].removeprefix("ImportError: ")
    assert last.startswith("cudnn_sdpa needs PyTorch, and `import torch` fails: ")
    assert cure in last
    assert ("Traceback" in result.stderr) is (command[0] == "-c")
