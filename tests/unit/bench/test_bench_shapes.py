"""`bench shapes` without a GPU: the measurements of one process, and the report of many."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks import shapes
from benchmarks.programs import many_lengths
from cudnn_sdpa.plans import shape_policy as setting


class Answers:
    """Fake processes: the n-th takes n seconds."""

    def __init__(self, **takeover):
        self.started = []
        self.takeover = takeover

    def run(self, module, *arguments, store):
        assert (module, store) == ("benchmarks.programs.many_lengths", "off")
        self.started.append(arguments)
        number = float(len(self.started))
        if arguments[0] == "takeover":
            return {
                "plans": 12,
                "seconds": number,
                "longest_wait_before_ms": 1.0,
                "longest_wait_meanwhile_ms": 5.0,
                "exact_us": 100.0,
                "tiered_us": 101.0,
            }
        of_pass = {"seconds": number, "longest_wait_ms": 10 * number, "builds": int(number)}
        return {"cold": of_pass, "other lengths": {**of_pass, "seconds": number / 2, "builds": 0}}


@pytest.fixture
def answers(monkeypatch):
    stand_in = Answers()
    monkeypatch.setattr(shapes, "run_module", stand_in.run)
    return stand_in


def test_every_policy_has_its_own_processes(answers):
    rows = shapes.passes(3)
    assert answers.started == [("pass", name) for name in ("exact", "bucketed", "tiered", "pytorch")] * 3
    assert [row["policy"] for row in rows] == ["exact", "bucketed", "tiered", "PyTorch's cuDNN backend"]
    assert rows[1] == {  # the second, sixth and tenth process
        "policy": "bucketed",
        "first 200, s": 6.0,
        "first 200: longest wait, ms": 60.0,
        "first 200: builds": "2",
        "200 others, s": 3.0,
        "200 others: longest wait, ms": 60.0,
        "200 others: builds": "0",
    }
    assert rows[3]["first 200: builds"] == "–"


def test_every_takeover_process_has_a_row(answers):
    rows = shapes.takeover(2)
    assert answers.started == [("takeover",)] * 2
    assert [row["in, s"] for row in rows] == [1.0, 2.0]
    assert rows[0]["tiered / exact"] == pytest.approx(1.01)
    assert rows[0]["longest wait meanwhile, ms"] == 5.0


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
