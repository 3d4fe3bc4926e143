"""`bench replacements` without a GPU: its rows, its processes, its command line and JSON."""

from __future__ import annotations

import contextlib

import pytest
import torch

from benchmarks import replacements
from benchmarks.programs import many_lengths, new_shapes
from benchmarks.tools import replacements as installed
from benchmarks.tools.cases import Shape

SHAPE = Shape(batch=2, heads_q=4, heads_kv=4, length=16, dim=8, causal=True)


@pytest.fixture
def on_cpu(monkeypatch, times_by_place, cases_on_cpu, peers_on_cpu):  # noqa: ARG001
    """The measurements on the CPU, small, each of them one microsecond."""
    monkeypatch.setattr(replacements, "host_times", times_by_place)
    monkeypatch.setattr(replacements, "SMALL", SHAPE)
    monkeypatch.setattr(replacements, "wait_for_native_calls", lambda: True)


@pytest.fixture
def used(monkeypatch):
    """The replacements that are used, in order; the frontend's is missing."""
    names = []

    @contextlib.contextmanager
    def replaced_by(name):
        names.append(name)
        if name == installed.FRONTENDS:
            raise ImportError("no module of that name\nand more")
        yield

    monkeypatch.setattr(installed, "replaced_by", replaced_by)
    return names


def test_different_results_stop_the_benchmark(on_cpu, used, monkeypatch):  # noqa: ARG001
    attend = replacements._attend
    monkeypatch.setattr(replacements, "_attend", lambda *given: attend(*given) * (1 if used[-1] == "pytorch" else 1.1))
    with pytest.raises(RuntimeError, match="forward differs from that of the first"):
        replacements.host()


def test_a_process_measures_one_replacement(monkeypatch, cases_on_cpu, peers_on_cpu):  # noqa: ARG001
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(many_lengths, "_prepare_process", lambda: None)
    monkeypatch.setattr(many_lengths, "MAX_LENGTH", 40)
    monkeypatch.setattr(many_lengths, "COUNT", 6)
    found = new_shapes.measure("cudnn_sdpa", "bucketed")
    assert found["why"] is None
    assert 0 < found["longest_wait_ms"] / 1e3 <= found["seconds"]
    monkeypatch.setattr(installed, "_MODULE", "cudnn_sdpa.no_such_module")
    assert "no_such_module" in new_shapes.measure("cudnn-frontend", "")["why"]
