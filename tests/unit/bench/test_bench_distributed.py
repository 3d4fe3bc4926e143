"""`bench distributed` on two processes without GPUs: its rows, its command line and JSON."""

from __future__ import annotations

import json
import math
import time
from unittest import mock

import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

from benchmarks import cli
from benchmarks.distributed import attention, models, times
from benchmarks.distributed.times import Candidate
from benchmarks.programs import many_gpus
from benchmarks.tools import processes, report
from benchmarks.tools.parts import DistributedPart
from cudnn_sdpa.integrations.pytorch import register, unregister

SMALL = attention.SMALL


def measured(*parts):
    return {part: many_gpus.measure(part, small=True) for part in parts}


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
            return many_gpus.measure(DistributedPart.STRONG, small=True)
    finally:
        unregister()


@pytest.mark.slow
@pytest.mark.parametrize(("takes_groups", "name"), [(True, "pytorch"), (False, "pytorch, repeated keys")])
def test_pytorchs_context_has_a_row(ranks, takes_groups, name):
    pytest.importorskip(
        "torch.distributed.tensor.experimental._context_parallel",
        reason="PyTorch 2.9's context parallelism adds a dimension to the cuDNN operator's log-sum-exp, which has it",
    )
    for rows in ranks(measured_beside_pytorch, takes_groups):
        (row,) = [row for row in rows if "pytorch" in row["call"]]
        assert row["call"] == f"causal, S={SMALL.tokens}: {name}"
        assert row["ms"] > 0
        check(rows, SMALL.tokens)


def strict(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_rows_and_the_machine_are_written_without_a_gpu(monkeypatch, tmp_path):
    """A number that was not measured is absent, and a candidate that did not run says why."""
    ours = {"call": "causal: one GPU", "GPUs": 1, "ms": 1.5, "of linear scaling": 1.0}
    theirs = {"call": "causal: pytorch", "GPUs": 2, "not run": "NotImplementedError: no rule"}
    started = []

    def run_ranks(_, count, *arguments):
        started.append((count, arguments))
        return {"weak": [ours, theirs], "tensor": [ours]}

    monkeypatch.setattr(processes, "run_ranks", run_ranks)
    path = tmp_path / "distributed.json"
    arguments = ["distributed", "--small", "--ranks", "5", "--part", "weak", "--part", "tensor", "--json", str(path)]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert started == [(count, (part, "small")) for part in ("weak", "tensor") for count in (2, 4)]
    data = json.loads(path.read_text(), parse_constant=strict)
    assert data["weak"] == [ours, theirs] * 2
    assert data["tensor"] == [ours] * 2
    assert data["environment"]["gpu"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
    (line, _) = (line for line in done.output.splitlines() if "causal: pytorch" in line)
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells[2:4] == ["–", "–"]
    assert cells[4].startswith("NotImpl")


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
