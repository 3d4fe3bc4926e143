"""`scripts/first_call.py` on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "scripts" / "first_call.py"


@pytest.fixture
def first_call():
    spec = importlib.util.spec_from_file_location("first_call", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_imports_are_measured_without_a_gpu(first_call, monkeypatch, capsys, tmp_path):
    """In this process, which has imported it all: the shape of the results, not the times."""
    parts = {**first_call.PARTS, "versions": first_call.versions}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(first_call, "in_a_new_process", lambda part, *_, **__: json.loads(json.dumps(parts[part]())))
    monkeypatch.setattr(sys, "argv", ["first_call.py", "--repeats", "2", "--json", str(tmp_path / "found.json")])
    first_call.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {"versions", "repeats", "imports"}
    assert found["imports"].keys() == {"import torch", "import cudnn_sdpa", "cudnn_sdpa.sdpa"}
    assert all(len(times) == 2 for times in found["imports"].values())
    assert found["versions"]["gpu"] is None
    printed = capsys.readouterr()
    assert "import cudnn_sdpa" in printed.out
    assert "No GPU" in printed.err


def test_medians_are_of_each_stage_and_errors_are_kept(first_call):
    runs = [{"a": [1.0, 2.0]}, {"a": [3.0, 9.0]}, {"a": [2.0, 5.0]}]
    assert first_call.medians(runs) == {"a": [2.0, 5.0]}
    assert first_call.medians([runs[0], {"error": "no kernel"}]) == {"error": "no kernel"}


def test_a_process_of_its_own_needs_no_installation(first_call, tmp_path):
    found = first_call.in_a_new_process("imports", str(tmp_path), "off")
    assert found.keys() == {"import torch", "import cudnn_sdpa", "cudnn_sdpa.sdpa"}
    assert "error" in first_call.in_a_new_process("nonsense", str(tmp_path), "off")
