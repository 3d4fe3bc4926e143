"""`bench provider` without a GPU: its rows, its processes, its command line and JSON."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import cli, provider
from benchmarks.cli import app
from benchmarks.programs import many_lengths, new_shapes
from benchmarks.tools import providers, report
from benchmarks.tools.cases import Shape

SHAPE = Shape(batch=2, heads_q=4, heads_kv=4, length=16, dim=8, causal=True)


@pytest.fixture
def on_cpu(monkeypatch, times_by_place, cases_on_cpu, peers_on_cpu):  # noqa: ARG001
    """The measurements on the CPU, small, each of them one microsecond."""
    monkeypatch.setattr(provider, "host_times", times_by_place)
    monkeypatch.setattr(provider, "device_times", times_by_place)
    monkeypatch.setattr(provider, "SMALL", SHAPE)
    monkeypatch.setattr(provider, "SHAPES", (SHAPE, SHAPE._replace(causal=False)))
    monkeypatch.setattr(provider, "wait_for_native_calls", lambda: True)


@pytest.fixture
def used(monkeypatch):
    """The providers that are used, in order; the frontend's is missing."""
    names = []

    @contextlib.contextmanager
    def provided_by(name):
        names.append(name)
        if name == providers.FRONTENDS:
            raise ImportError("no module of that name\nand more")
        yield

    monkeypatch.setattr(providers, "provided_by", provided_by)
    return names


def test_every_provider_takes_its_turn(on_cpu, used):  # noqa: ARG001
    rows = provider.host()
    assert used[:5] == ["pytorch", "cudnn_sdpa", "cudnn-frontend", "pytorch", "cudnn_sdpa"]
    assert [row["call"] for row in rows][:2] == ["forward", "forward and backward"]
    assert all(list(row) == list(rows[0]) for row in rows)
    first = rows[0]
    assert (first["cudnn_sdpa µs"], first["pytorch µs"], first["cudnn-frontend µs"]) == (1.0, 1.0, "–")
    assert first["cudnn_sdpa / pytorch"] == 1.0
    assert first["why not"] == "cudnn-frontend: no module of that name"


def test_different_results_stop_the_benchmark(on_cpu, used, monkeypatch):  # noqa: ARG001
    attend = provider._attend
    monkeypatch.setattr(provider, "_attend", lambda *given: attend(*given) * (1 if used[-1] == "pytorch" else 1.1))
    with pytest.raises(RuntimeError, match="forward differs from that of the first provider"):
        provider.host()


def test_every_provider_has_processes_for_new_shapes(monkeypatch):
    started = []

    def run_module(module, *arguments, store):
        assert (module, store) == ("benchmarks.programs.new_shapes", "off")
        started.append(arguments)
        if arguments[0] == "cudnn-frontend":
            return {"why": "it is not there"}
        return {"seconds": float(len(started)), "first_ms": 9.0, "longest_wait_ms": 5.0, "why": None}

    monkeypatch.setattr(provider, "run_module", run_module)
    rows = provider.new_shapes(repeats=3)
    assert started[::3] == [
        ("cudnn_sdpa", "exact"),
        ("cudnn_sdpa", "bucketed"),
        ("cudnn-frontend", ""),
        ("pytorch", ""),
    ]
    assert [row["provider"] for row in rows] == [
        "cudnn_sdpa, exact",
        "cudnn_sdpa, bucketed",
        "cudnn-frontend",
        "pytorch",
    ]
    assert rows[0]["200 lengths up to 8192, s"] == 2.0
    assert rows[0]["first call, ms"] == 9.0
    assert rows[2]["longest wait, ms"] == "–"
    assert rows[2]["why not"] == "it is not there"


def test_a_process_measures_one_provider(monkeypatch, cases_on_cpu, peers_on_cpu):  # noqa: ARG001
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(many_lengths, "_prepare_process", lambda: None)
    monkeypatch.setattr(many_lengths, "MAX_LENGTH", 40)
    monkeypatch.setattr(many_lengths, "COUNT", 6)
    found = new_shapes.measure("cudnn_sdpa", "bucketed")
    assert found["why"] is None
    assert 0 < found["longest_wait_ms"] / 1e3 <= found["seconds"]
    monkeypatch.setattr(providers, "_MODULE", "cudnn_sdpa.no_such_module")
    assert "no_such_module" in new_shapes.measure("cudnn-frontend", "")["why"]


def test_the_command_writes_json(monkeypatch, tmp_path, on_cpu, used):  # noqa: ARG001
    monkeypatch.setattr(cli, "require_gpu", lambda *_: None)
    monkeypatch.setattr(report, "environment", lambda: {"gpu": "none"})
    path = tmp_path / "provider.json"
    result = CliRunner().invoke(app, ["provider", "--part", "host", "--json", str(path)])
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    assert written["benchmark"] == "provider"
    assert written["host"][0]["call"] == "forward"
