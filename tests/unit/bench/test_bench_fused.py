"""`benchmarks fused` measures only what agrees with float64, of both providers and of peers."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import fused, fused_peers
from benchmarks.tools import candidates, cases


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch, times_by_place):
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(candidates, "device_times", times_by_place)
    monkeypatch.setattr(fused, "compiled", lambda function: function)
    monkeypatch.setattr(fused_peers, "NORMS", [(5, 64)])
    monkeypatch.setattr(fused_peers, "GATES", [(3, 48)])
    monkeypatch.setattr(fused_peers, "FEW_ROWS", [(1, 64)])
    monkeypatch.setattr(fused_peers, "ROTATIONS", [(2, 5, 3, 1, 16)])


@pytest.mark.parametrize(("part", "count"), [("norms", 3), ("gates", 2), ("rotations", 4), ("few_rows", 1)])
def test_each_call_is_measured_by_each(part, count):
    rows = getattr(fused_peers, part)()
    assert len(rows) == count
    for row in rows:
        assert {row[f"{name} µs"] for name in ("cudnn_sdpa", "own", "cudnn", "compiled", "copy")} <= {1.0, 2, 3, 4, 5}
        assert row["best of peers / ours"] == row["compiled µs"] / row["cudnn_sdpa µs"]
        assert "quack: " in row["why not"]
        assert "liger: " in row["why not"]


def test_what_is_wrong_has_no_time(monkeypatch):
    monkeypatch.setattr(fused_peers, "_norm", lambda x, weight: x * weight)
    rows = fused_peers.norms()
    assert rows[0]["cudnn_sdpa µs"] == rows[0]["own µs"] == "–"
    assert "own" in rows[0]["why not"]
    assert isinstance(rows[1]["own µs"], float)
    assert torch.is_grad_enabled()


def quack_rmsnorm(
    x,
    weight=None,
    bias=None,
    residual=None,
    out_dtype=None,
    residual_dtype=None,
    eps=1e-6,
    prenorm=False,
    weight_offset=0,
):
    """With the signature, and the results, of quack's `rmsnorm`."""
    assert bias is out_dtype is residual_dtype is None
    total = x if residual is None else x + residual
    out = torch.nn.functional.rms_norm(total, total.shape[-1:], weight + weight_offset, eps)
    return (out, total) if prenorm and residual is not None else out


def test_quack_has_times_where_it_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", SimpleNamespace(rmsnorm=quack_rmsnorm))
    for row in fused_peers.norms():
        assert row["quack µs"] == 5, "behind ours, own, cudnn and compiled"
        assert "quack" not in row["why not"]
    (row, *_) = fused_peers.gates()
    assert row["quack µs"] == "–"
    assert "quack: not measured on this call" in row["why not"]


@pytest.mark.parametrize("error", [ImportError("no module cutlass"), TypeError("prenorm"), RuntimeError("no kernel")])
def test_a_peer_that_fails_does_not_end_the_run(error, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", SimpleNamespace(rmsnorm=fail))
    for row in fused_peers.norms():
        assert row["quack µs"] == "–"
        assert f"quack: {type(error).__name__}: {error}" in row["why not"]
        assert isinstance(row["cudnn_sdpa µs"], float)
