"""`bench distributed` on two processes without GPUs: its rows, its command line and JSON."""

from __future__ import annotations

import json
import math
import time

import pytest
from typer.testing import CliRunner

from benchmarks import cli
from benchmarks.distributed import attention, models, times
from benchmarks.distributed.times import Candidate
from benchmarks.tools import report
from benchmarks.tools.parts import DistributedPart

SMALL = attention.SMALL


def check(rows, tokens):
    """Those of context parallelism on two ranks."""
    names = ["one GPU", "all_gather", "ulysses", "ring"]
    found = {row["call"]: row for row in rows}
    for label in (f"causal, S={tokens}", f"packed, {tokens} tokens"):
        for name in names:
            check_row(found[f"{label}: {name}"])
    assert math.isclose(found[f"packed, {tokens} tokens: one GPU"]["of linear scaling"], 1.0)


def check_row(row):
    assert row["ms"] > 0
    assert row["GPUs"] == (1 if "one GPU" in row["call"] else 2)
    assert 0 < row["of linear scaling"] < 50


def test_meshes_have_all_ranks_and_no_more_tensor_parallelism_than_key_heads():
    assert models.meshes(1, max_tensor=8) == [(1, 1, 1)]
    assert len(models.meshes(4, max_tensor=8)) == 6
    assert len(models.meshes(8, max_tensor=8)) == 10
    assert len(models.meshes(8, max_tensor=2)) == 7
    for shape in models.meshes(8, max_tensor=4):
        assert math.prod(shape) == 8
        assert shape[2] <= 4


def scaling_of_sequences():
    step = lambda: time.sleep(0.02)  # noqa: E731
    candidates = {"one GPU": Candidate(step), "both": Candidate(step, sequences=8)}
    return times.compared("a step", times.SMALL, candidates)


def test_sequences_of_replicas_count(ranks):
    """Two ranks take as long for eight sequences as one GPU for one: four times linear. Uncounted, it is half."""
    for alone, both in ranks(scaling_of_sequences):
        assert alone["of linear scaling"] == 1.0
        assert 1 < both["of linear scaling"] < 16


def strict(constant):
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.slow
def test_the_command_starts_its_ranks(monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(report, "show", lambda title, rows: shown.append((title, rows)))
    path = tmp_path / "d.json"
    done = CliRunner().invoke(cli.app, ["distributed", "--small", "--ranks", "2", "--json", str(path)])
    assert done.exit_code == 0, done.output
    data = json.loads(path.read_text(), parse_constant=strict)
    assert [rows for _, rows in shown] == [data[part.value] for part in DistributedPart]
    check(data["weak"], 2 * SMALL.tokens_each)
    check(data["strong"], SMALL.tokens)
    for row in data["tensor"] + data["model"]:
        check_row(row)
