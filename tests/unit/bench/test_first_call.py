"""`scripts/first_call.py` on a machine without a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "first_call.py"


@pytest.fixture
def first_call():
    spec = importlib.util.spec_from_file_location("first_call", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_medians_are_of_each_stage_and_errors_are_kept(first_call):
    runs = [{"a": [1.0, 2.0]}, {"a": [3.0, 9.0]}, {"a": [2.0, 5.0]}]
    assert first_call.medians(runs) == {"a": [2.0, 5.0]}
    assert first_call.medians([runs[0], {"error": "no kernel"}]) == {"error": "no kernel"}


@pytest.mark.slow
def test_a_process_of_its_own_needs_no_installation(first_call, tmp_path):
    found = first_call.in_a_new_process("imports", str(tmp_path), "off")
    assert found.keys() == {"import torch", "import cudnn_sdpa", "cudnn_sdpa.sdpa"}
    assert "error" in first_call.in_a_new_process("nonsense", str(tmp_path), "off")
