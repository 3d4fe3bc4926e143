"""`bench coldstart` without a GPU: the measurements of one process, and the report of many."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks import coldstart
from benchmarks.programs import first_call
from benchmarks.tools import processes
from benchmarks.tools.cases import Shape

# Answers of the benchmark's processes.


class Processes:
    """Fake processes: records how each was started; the n-th takes n milliseconds."""

    def __init__(self, **changes):
        self.started: list[tuple[str, str]] = []
        self.files: list[list[str]] = []
        self.changes = changes

    def run(self, module, name, *_, store):
        assert module == "benchmarks.programs.first_call"
        self.started.append((name, store))
        if store != "off":
            folder = Path(store)
            folder.mkdir(exist_ok=True)
            self.files.append(sorted(path.name for path in folder.iterdir()))
            (folder / "a.plan").touch()
        time = float(len(self.started))
        loaded = store != "off" and self.files[-1] != []
        call = {"returned_ms": time, "done_ms": 10 * time, "builds": int(not loaded), "loads": int(loaded)}
        answers = {
            "sdpa": {"calls": [call, {**call, "returned_ms": time / 2}]},
            "pytorch": {"calls": [{**call, "builds": 0}] * 2},
            "record": {"plans": 200},
            "warmup": {"seconds": time / 10, "loaded": 200, "built": 0, "held": 0},
        }
        return {**answers[name], **self.changes.get(name, {})}


@pytest.fixture
def answering(monkeypatch):
    def make(**changes):
        stand_in = Processes(**changes)
        monkeypatch.setattr(processes, "run_module", stand_in.run)
        return stand_in

    return make


def test_calls_are_measured_without_a_store_with_an_empty_and_with_a_warm_one(answering):
    started = answering()
    rows = coldstart.calls(3)
    names = [name for name, _ in started.started]
    assert names == ["sdpa", *["sdpa", "sdpa", "sdpa", "pytorch"] * 3]  # the first is a warm-up
    folders = [store for name, store in started.started if store != "off"]
    assert [folders[0::2], len(set(folders))] == [folders[1::2], 3]  # each pair shares a new one
    assert started.files == [[], ["a.plan"]] * 3
    assert not any(Path(folder).exists() for folder in folders)
    assert [row["call"] for row in rows] == [
        f"{name}: {call}"
        for name in ("sdpa, no store", "sdpa, empty store", "sdpa, warm store", "pytorch cudnn")
        for call in ("first call", "another shape")
    ]
    # "no store" was the second, sixth and tenth process
    assert rows[0] == {
        "call": "sdpa, no store: first call",
        "returns, ms": 6.0,
        "returns, worst": 10.0,
        "GPU done, ms": 60.0,
        "GPU done, worst": 100.0,
        "processes": 3,
    }
    assert (rows[1]["returns, ms"], rows[1]["returns, worst"], rows[1]["GPU done, ms"]) == (3.0, 5.0, 60.0)
    assert (rows[4]["returns, ms"], rows[4]["returns, worst"]) == (8.0, 12.0)
    assert (rows[7]["returns, ms"], rows[7]["GPU done, worst"]) == (9.0, 130.0)


@pytest.mark.parametrize(("builds", "loads"), [(0, 0), (1, 1), (0, 1)])
def test_a_call_with_a_plan_from_elsewhere_is_not_reported(answering, builds, loads):
    call = {"returned_ms": 1.0, "done_ms": 1.0, "builds": builds, "loads": loads}
    answering(sdpa={"calls": [{**call, "builds": 1, "loads": 0}, call]})
    with pytest.raises(RuntimeError, match=rf"no store, another shape: {builds} plans were built and {loads} loaded"):
        coldstart.calls(1)


def test_a_warmup_that_builds_is_not_reported(answering):
    answering(warmup={"seconds": 1.0, "loaded": 199, "built": 1, "held": 0})
    with pytest.raises(RuntimeError, match=r"not all of 200 stored plans were loaded: .*'built': 1"):
        coldstart.warmup(2)


def test_a_process_gets_its_store_and_the_packages_of_the_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    code = """
import json, os, sys
print("what a library says")
print(json.dumps([os.environ["CUDNN_SDPA_PLAN_DIR"], os.environ["PYTHONPATH"], sys.path]))
"""
    store, search, path = processes.run_code(code, "it", store=str(tmp_path))
    root = str(Path(__file__).parents[3])
    assert (store, search) == (str(tmp_path), f"{root}:/elsewhere")
    assert root in path
    assert os.environ["CUDNN_SDPA_PLAN_DIR"] == "off"


# Measurements of one process.


@pytest.fixture
def on_cpu(monkeypatch, cases_on_cpu):  # noqa: ARG001
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(first_call, "start_library", lambda: None)
    monkeypatch.setattr(first_call, "SHAPES", (Shape(1, 2, 2, 8, 16, True), Shape(1, 2, 2, 12, 16, True)))
    monkeypatch.setattr(first_call, "LENGTHS", range(64, 67))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("error", [0.03, float("nan")])
def test_wrong_results_are_not_timed(monkeypatch, error):
    right = first_call.sdpa
    monkeypatch.setattr(first_call, "sdpa", lambda *qkv, **options: right(*qkv, **options) * (1 + error))
    with pytest.raises(RuntimeError, match="out differs from PyTorch's"):
        first_call.first_calls_of_sdpa()


# The command.
