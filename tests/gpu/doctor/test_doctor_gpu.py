"""The doctor on a machine with a GPU: it finds no problems, and names the variable that hides the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def doctor(**environment: str) -> tuple[int, dict]:
    root = Path(__file__).parents[3]
    search = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    result = subprocess.run(
        [sys.executable, "-m", "cudnn_sdpa", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": search, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


@pytest.mark.usefixtures("default_providers")
def test_this_machine_has_no_problems():
    code, found = doctor()
    assert (code, found["ok"]) == (0, True), found["findings"]
    facts = found["facts"]
    assert facts["torch_cudnn"] == facts["cudnn"]
    assert [(gpu["major"], gpu["minor"]) for gpu in facts["gpus"]] == [
        torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())
    ]
    assert float(facts["difference"]) < 1e-2
    assert facts["gpu_nodes"] >= torch.cuda.device_count()


def test_a_hidden_gpu_is_an_error_that_names_the_variable():
    code, found = doctor(CUDA_VISIBLE_DEVICES="")
    assert code == 1
    (error,) = [finding for finding in found["findings"] if finding["level"] == "error"]
    assert error["check"] == "gpus"
    assert "CUDA_VISIBLE_DEVICES=''" in error["found"]
    assert "Unset CUDA_VISIBLE_DEVICES" in error["cure"]
