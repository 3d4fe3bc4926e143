"""`bench shapes` without a GPU: the measurements of one process, and the report of many."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.programs import many_lengths
from cudnn_sdpa.plans import shape_policy as setting


@pytest.fixture
def on_cpu(monkeypatch, cases_on_cpu, peers_on_cpu):  # noqa: ARG001
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(many_lengths, "start_library", lambda: None)
    monkeypatch.setattr(many_lengths, "gc", SimpleNamespace(collect=lambda: None, disable=lambda: None))
    monkeypatch.setattr(many_lengths, "MAX_LENGTH", 40)
    monkeypatch.setattr(many_lengths, "COUNT", 8)
    monkeypatch.setattr(many_lengths, "RETURNING", 3)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("policy", ["exact", "bucketed", "tiered"])
def test_a_process_makes_two_passes_of_different_lengths(monkeypatch, policy):
    right, lengths = many_lengths.sdpa, []

    def attend(q, k, v, **options):
        lengths.append(q.shape[2])
        assert setting.active() == policy
        return right(q, k, v, **options)

    monkeypatch.setattr(many_lengths, "sdpa", attend)
    found = many_lengths.passes(policy)
    assert set(found) == {"cold", "other lengths"}
    assert len(set(lengths[:16])) == 16
    assert lengths[16:] == [*lengths[:5], *lengths[8:13]]  # to check the results


@pytest.mark.usefixtures("on_cpu")
def test_wrong_results_are_not_timed(monkeypatch):
    right = many_lengths.sdpa
    monkeypatch.setattr(many_lengths, "sdpa", lambda *qkv, **options: right(*qkv, **options) * 1.03)
    with pytest.raises(RuntimeError, match="out differs from PyTorch's at length"):
        many_lengths.passes("exact")


@pytest.mark.usefixtures("on_cpu")
def test_missing_plans_are_not_reported(monkeypatch):
    clock = iter(range(0, 100_000, 100))
    monkeypatch.setattr(many_lengths, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    with pytest.raises(RuntimeError, match="0 of 3 exact plans were ready within"):
        many_lengths.takeover()
