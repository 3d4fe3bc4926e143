"""PyTorch's DTensor rules, ring attention and context parallelism over this library's kernels, in several processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ring = pytest.importorskip(
    "torch.distributed.tensor.experimental._context_parallel._attention",
    reason="this PyTorch's context parallelism has another interface",
)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_agree_with_one(ranks):
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parent.with_name("pytorch_ring.py")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        [sys.executable, str(script), str(port), str(ranks)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    agreed = [line.removesuffix(": agree") for line in result.stdout.splitlines() if line.endswith(": agree")]
    assert sum(name.startswith("DTensor") for name in agreed) == 3
    assert sum(name.startswith("ring") for name in agreed) == 8
    assert agreed[-1] == "context_parallel"
