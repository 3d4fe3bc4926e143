"""`bench distributed` on two processes without GPUs: its rows, its command line and JSON."""

from __future__ import annotations

import math

import pytest
from typer.testing import CliRunner

from cudnn_sdpa.bench import cli
from cudnn_sdpa.bench.programs import many_gpus
from cudnn_sdpa.bench.tools import report

SMALL = many_gpus.SMALL


def measured():
    return many_gpus.measure(many_gpus.SMALL)


def check(rows):
    names = ["one GPU", "all_gather", "ulysses", "ring"]
    found = {row["call"]: row for row in rows}
    for label in (f"causal, S={SMALL.lengths[0]}", f"packed, {SMALL.tokens} tokens"):
        for name in names:
            row = found[f"{label}: {name}"]
            assert row["ms"] > 0
            assert row["GPUs"] == (1 if name == "one GPU" else 2)
            assert 0 < row["of linear scaling"] < 50
    assert math.isclose(found[f"packed, {SMALL.tokens} tokens: one GPU"]["of linear scaling"], 1.0)


def test_each_method_has_a_row(ranks):
    first, second = ranks(measured)
    check(first)
    assert [row["call"] for row in first] == [row["call"] for row in second]


@pytest.mark.slow
def test_the_command_starts_its_ranks(monkeypatch):
    shown = []
    monkeypatch.setattr(report, "show", lambda title, rows: shown.append((title, rows)))
    done = CliRunner().invoke(cli.bench_app, ["distributed", "--small", "--ranks", "2"])
    assert done.exit_code == 0, done.output
    ((title, rows),) = shown
    assert "2 ranks" in title
    check(rows)
