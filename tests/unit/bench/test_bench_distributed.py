"""`bench distributed` on two processes without GPUs: its rows, its command line and JSON."""

from __future__ import annotations

import json
import math
from unittest import mock

import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

from cudnn_sdpa.bench import cli
from cudnn_sdpa.bench.programs import many_gpus
from cudnn_sdpa.bench.tools import processes, report
from cudnn_sdpa.integrations.pytorch import register, unregister

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
    json.dumps(first, allow_nan=False)
    assert [row["call"] for row in first] == [row["call"] for row in second]


def measured_beside_pytorch(takes_groups):
    """With an attention for PyTorch's context that runs without a GPU: its cuDNN operator on this library."""
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention

    def scaled_dot_product_attention(q, k, v, *, is_causal, enable_gqa):
        if enable_gqa and not takes_groups:
            raise NotImplementedError("no groups")
        assert (q.shape[1] == k.shape[1]) is not enable_gqa
        return forward(q, k, v, None, True, 0.0, is_causal)[0]

    register(device="cpu")
    try:
        with mock.patch.object(functional, "scaled_dot_product_attention", scaled_dot_product_attention):
            return many_gpus.measure(many_gpus.SMALL)
    finally:
        unregister()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("takes_groups", "name"), [(True, "pytorch"), (False, "pytorch, repeated keys")])
def test_pytorchs_context_has_a_row(ranks, takes_groups, name):
    pytest.importorskip(
        "torch.distributed.tensor.experimental._context_parallel",
        reason="PyTorch 2.9's context parallelism adds a dimension to the cuDNN operator's log-sum-exp, which has it",
    )
    for rows in ranks(measured_beside_pytorch, takes_groups):
        (row,) = [row for row in rows if "pytorch" in row["call"]]
        assert row["call"] == f"causal, S={SMALL.lengths[0]}: {name}"
        assert row["ms"] > 0
        check(rows)


def strict(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_rows_and_the_machine_are_written_without_a_gpu(monkeypatch, tmp_path):
    """A number that was not measured is absent, and a candidate that did not run says why."""
    ours = {"call": "causal: one GPU", "GPUs": 1, "ms": 1.5, "of linear scaling": 1.0}
    theirs = {"call": "causal: pytorch", "GPUs": 2, "not run": "NotImplementedError: no rule"}
    monkeypatch.setattr(processes, "run_ranks", lambda *_: {"rows": [ours, theirs]})
    path = tmp_path / "distributed.json"
    done = CliRunner().invoke(cli.bench_app, ["distributed", "--small", "--ranks", "2", "--json", str(path)])
    assert done.exit_code == 0, done.output
    data = json.loads(path.read_text(), parse_constant=strict)
    assert data["training"] == [ours, theirs]
    assert data["environment"]["gpu"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
    (line,) = (line for line in done.output.splitlines() if "causal: pytorch" in line)
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells[2:4] == ["–", "–"]
    assert cells[4].startswith("NotImpl")


@pytest.mark.slow
def test_the_command_starts_its_ranks(monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(report, "show", lambda title, rows: shown.append((title, rows)))
    done = CliRunner().invoke(
        cli.bench_app, ["distributed", "--small", "--ranks", "2", "--json", str(tmp_path / "d.json")]
    )
    assert done.exit_code == 0, done.output
    ((title, rows),) = shown
    assert "2 ranks" in title
    check(rows)
    check(json.loads((tmp_path / "d.json").read_text(), parse_constant=strict)["training"])
