"""The soak: it runs on the fake GPU, and would notice memory that grows and results that are wrong."""

from __future__ import annotations

import json
import mmap
import threading

import pytest
import soak
import torch
from contract.operations import OPERATIONS


@pytest.mark.slow
@pytest.mark.parametrize("way", [(), ("--python",)], ids=["native", "python"])
def test_a_short_one_finds_nothing(way, tmp_path):
    file, names = tmp_path / "soak.json", ("sdpa, lengths", "rms_norm")
    chosen = [part for name in names for part in ("--only", name)]
    short = ["--calls", "20", "--seconds", "1", "--threads", "3", "--device", "cpu"]
    assert soak.main([*short, *chosen, *way, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    jobs = {f"{name}, {kind}" for name in names for kind in ("inference", "training")}
    assert set(report["memory"]) == set(report["threads"]["calls"]) == jobs
    assert report["native"] is not bool(way)
    assert report["faults"] == []


@pytest.mark.slow
def test_memory_that_grows_is_noticed():
    kept, shared = [], bytearray(1)

    def grow():
        pages = mmap.mmap(-1, 64 << 10)  # fresh pages: a heap may still hold memory that earlier tests have freed
        pages.write(bytes(len(pages)))
        kept.append(pages)

    assert soak.growth(grow, 200, "cpu")["grows"] is True
    assert soak.growth(lambda: bytes(shared), 20_000, "cpu")["grows"] is False


def test_wrong_results_and_errors_are_noticed():
    with soak.on("cpu", OPERATIONS["rms_norm"]):
        right, trained = soak.calls_of("rms_norm", "cpu")
        assert right.is_right()
        assert trained.is_right()
        wrong = soak.Call("wrong", right.run, [1.1 * x for x in right.exact], right.precision)
        nan = soak.Call("nan", lambda: [torch.full_like(x, torch.nan) for x in right.exact], right.exact, 1.0)
        raises = soak.Call("raises", lambda: torch.empty(1).fail(), [], 0.0)
        found = soak.Soak("cpu")
        found.run([wrong, nan, raises], 2, 0.3)
    assert {fault.partition(":")[0] for fault in found.faults} == {"wrong", "nan", "raises"}
    assert not found.counts["raises"]


def test_a_call_that_does_not_end_is_noticed(monkeypatch, capfd):
    monkeypatch.setattr(soak, "PATIENCE", 0.3)
    over, found = threading.Event(), soak.Soak("cpu")

    def wait():
        over.wait()
        return []

    found.run([soak.Call("endless", wait, [], 0.0)], 2, 60.0)
    over.set()
    assert len(found.faults) == 1
    assert found.faults[0].startswith("endless: has not ended")
    assert "in wait" in capfd.readouterr().err  # where the threads are
