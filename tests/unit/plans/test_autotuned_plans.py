"""Tuned plans in CUDA graphs, in threads, and in the plan store."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import Engine, Machine, halve, key, launch, operands

import cudnn_sdpa
from cudnn_sdpa import UnsupportedError, autotune, plan_cache
from cudnn_sdpa.graph import handles, heuristics
from cudnn_sdpa.graph.key import Operand
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.plans import cache as cache_module
from cudnn_sdpa.plans import plan
from cudnn_sdpa.plans import store as stores
from cudnn_sdpa.plans.cache import CallTable, build_plan, load_plan, next_use
from cudnn_sdpa.plans.plan import Plan, captured_plans
from cudnn_sdpa.plans.store import StoredPlan
from tests.threads import in_threads


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.fixture
def captured():
    """Records the plans captured from here on, and forgets them afterwards."""
    before = list(captured_plans)
    captured_plans.clear()
    yield captured_plans
    captured_plans[:] = before


def test_a_captured_launch_is_not_tuned_and_the_next_one_is(machine, captured):
    engines = Engine("eng1", 30), Engine("eng2", 1)
    machine.proposes(*engines)
    with autotune():
        made = build_plan(halve, key())
        x, out = operands()
        machine.stream, machine.capturing = 5, True
        for _ in range(2):
            launch(made, x, out)
        assert (made.fastest, engines[1].launches) == (None, 0)
        machine.capturing = False
        launch(made, x, out)
    assert (type(made.fastest), made.fastest.engine, made.fastest.tuned) == (Plan, "eng2", True)
    assert [each.built for each in captured] == [engines[0]]  # the kernels of the graph live on
    assert torch.equal(out, x * 0.5)


def test_a_capture_after_tuning_uses_the_winner(machine, captured):
    machine.proposes(Engine("eng1", 30), winner := Engine("eng2", 1))
    with autotune():
        made = build_plan(halve, key())
        launch(made, *operands())
        machine.stream, machine.capturing = 5, True
        launch(made, *operands())
    assert [each.built for each in captured] == [winner]


@pytest.fixture
def cache():
    """The process's cache, empty before and afterwards."""
    plan_cache.clear()
    yield plan_cache
    plan_cache.clear()


def get(of):
    return plan_cache.get(of, lambda wanted: build_plan(halve, wanted))


def test_the_fastest_plan_replaces_the_first_in_the_cache(machine, cache):
    machine.proposes(first := Engine("eng1", 30), Engine("eng2", 10, workspace=64))
    table = CallTable()
    with autotune():
        made = get(key())
        made.last_used = next_use()
        bound = SimpleNamespace(plan=made)
        table.add("signature", bound)
        assert table.get("signature") is bound
        launch(made, *operands())
    found = cache.peek(key())
    assert found is made.fastest
    assert (type(found), found.engine, found.held, made.held) == (Plan, "eng2", True, False)
    assert (found.last_used, found.added_at) == (made.last_used, made.added_at)
    assert table.get("signature") is None  # the next call is bound to the fastest plan
    info = cache.info()
    assert (info.plans, info.builds, info.loads, info.evictions) == (1, 1, 0, 0)
    launches = first.launches
    for each in (made, found):  # calls bound to the first plan keep it
        x, out = operands()
        launch(each, x, out)
        assert torch.equal(out, x * 0.5)
    assert first.launches == launches


def test_an_evicted_plan_is_not_reinserted(machine, cache):
    machine.proposes(Engine("eng1", 30), Engine("eng2", 10))
    with autotune() as report:
        made = get(key())
        cache.clear()
        x, out = operands()
        launch(made, x, out)
    assert torch.equal(out, x * 0.5)
    assert (made.fastest.engine, len(report.entries)) == ("eng2", 1)
    assert (cache.info().plans, made.fastest.held) == (0, False)


def test_uses_of_a_replaced_plan_are_recorded(machine, cache):
    machine.proposes(Engine("eng1", 30), Engine("eng2", 10))
    with autotune(), cache.watch_uses() as used:
        made = get(key())
        made.last_used = next_use()
        launch(made, *operands())
    assert used == [key()]


def test_concurrent_lookups_build_once(machine, cache):
    machine.proposes(Engine("eng1", 30), Engine("eng2", 10))

    def work(_):
        handles.thread.slots = machine.slots
        for _ in range(20):
            x, out = operands()
            launch(get(key()), x, out)
            assert torch.equal(out, x * 0.5)

    with autotune() as report:
        in_threads(work, 8)
    assert len(report.entries) == len(machine.timed) == cache.info().builds == 1
    assert cache.peek(key()).engine == "eng2"


@pytest.fixture
def store(tmp_path):
    with cudnn_sdpa.use_plan_store(tmp_path / "plans") as store:
        yield store


def stored(of, **changes):
    return StoredPlan(of.identity(), "eng9", {"KNOB": 3}, 256, 0.25, b"data" * 100, **changes)


@pytest.mark.parametrize("tuned", [False, True])
def test_files_record_whether_a_plan_was_tuned(store, tuned):
    store.save(key(), stored(key(), tuned=tuned))
    assert store.load(key()) == stored(key(), tuned=tuned)
    assert store.load(key()).tuned is tuned
    loads = store.info().loads
    assert (store.load(key(), only_tuned=True) is not None) is tuned
    assert store.info().loads == loads + tuned


def test_older_files_count_as_untuned(store):
    magic, _, line, data = stored(key()).encode().split(b"\n", 3)
    older = line.replace(b',"tuned":false', b"")
    assert older != line
    digest = stores._digest(older, data).encode()
    store.path(key()).write_bytes(b"\n".join([magic, digest, older, data]))
    assert store.load(key()) == stored(key())
    assert store.load(key(), only_tuned=True) is None
    assert (store.info().plans, store.info().rejected) == (1, 0)


def test_untuned_stored_plans_are_not_loaded_under_autotune(store, monkeypatch):
    monkeypatch.setattr(cache_module, "plan_of", lambda _, stored: stored)
    store.save(key(), stored(key()))
    assert load_plan(key()) is not None
    with autotune():
        assert load_plan(key()) is None
        assert store.info().plans == 1
        store.save(key(), stored(key(), tuned=True))
        assert load_plan(key()).tuned
    assert load_plan(key()).tuned


def test_untunable_stored_plans_are_loaded_under_autotune(store, monkeypatch):
    monkeypatch.setattr(cache_module, "plan_of", lambda _, stored: stored)
    of = key(inputs=[Operand("lengths", TensorLayout.contiguous((2,), torch.int32))])
    store.save(of, stored(of))
    with autotune():
        assert load_plan(of) is not None


def test_the_winner_is_stored(store, machine, caplog):
    machine.proposes(Engine("eng1", 30), Engine("eng2", 10, workspace=64))
    with caplog.at_level(logging.WARNING), autotune():
        made = build_plan(halve, key())
        kept = store.load(key())
        assert (kept.engine, kept.tuned) == ("eng1", False)
        launch(made, *operands())
    kept = store.load(key())
    assert (kept.engine, kept.knobs, kept.workspace, kept.tuned) == ("eng2", {"TILE": 10}, 64, True)
    assert kept.data == b"eng2" * 100
    assert not caplog.records


def test_a_plan_that_was_not_compared_is_stored_as_untuned(store, machine):
    machine.proposes(Engine("eng1", 30), Engine("eng2", 10))
    with autotune():
        made = build_plan(halve, key())
        x, out = operands()
        launch(made, torch.zeros_like(x), out)
    assert store.load(key()).tuned is False


@pytest.mark.parametrize("tuned", [False, True])
def test_a_loaded_plan_knows_whether_it_was_tuned(machine, monkeypatch, tuned):
    made = Engine("eng9", workspace=256)
    monkeypatch.setattr(plan.backend, "load_graph", lambda *_: made)
    machine.proposes(made)
    loaded = cache_module.plan_of(key(), stored(key(), tuned=tuned))
    assert (type(loaded), loaded.loaded, loaded.tuned) == (Plan, True, tuned)


def test_earlier_failed_proposals_are_not_tried_again(monkeypatch):
    known = tuple((f"eng{n}", {}) for n in range(4))
    built = []

    class Asked:
        proposals = known

        def __init__(self, **_):
            pass

    class Operation:
        def compile(self, _, g):
            if isinstance(g, Asked):
                return None
            built.append(g)
            if g == known[2]:
                raise UnsupportedError("halve", ["too large", "too wide"])
            return g

    monkeypatch.setattr(heuristics, "ProposalsBuilder", Asked)
    monkeypatch.setattr(heuristics, "ConfigurationBuilder", lambda configuration, **_: configuration)
    others = heuristics.build_others(Operation(), key(), known[1], 7, handle=None)
    assert others == [known[3]]
    assert built == [known[2], known[3]]
    assert heuristics.build_others(Operation(), key(), known[0], 1, handle=None) == [known[1]]
