"""`bench providers` on CPU tensors, with a fake clock, and the rows of measurements that are made of it."""

from __future__ import annotations

import importlib
import json

import pytest

from benchmarks import peers, providers
from benchmarks.peers import Configuration
from benchmarks.tools import candidates, cases
from benchmarks.tools.cases import Shape
from cudnn_sdpa.attention.flash4 import preferences
from cudnn_sdpa.plans import providers as in_force

#: Before calls on a CPU take their place.
BOTH_PASSES = providers.FORWARD, providers.BACKWARD

pytestmark = pytest.mark.usefixtures("reference_alone")

CALLS = (
    Configuration("plain", (4, 2), (40, 40), dim=16),
    Configuration("narrow", (4, 2), (33,), dim=16, left=7, sinks=True),
    Configuration("capped", (2, 2), (33,), dim=16, softcap=5.0, causal=False),
    Configuration("packed", (4, 2), (20, 12), dim=16, packed=True),
)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch, times_by_place):
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(candidates, "device_times", times_by_place)
    monkeypatch.setattr(peers, "ROWS", 7)
    for name in ("FORWARD", "BACKWARD", "TRAINING", "LENGTHS"):
        monkeypatch.setattr(providers, name, CALLS)


@pytest.mark.parametrize("part", ["forward", "training", "backward", "lengths", "backward_lengths"])
def test_each_call_is_measured_by_each(part, monkeypatch):
    named = []
    real = providers.served_by
    monkeypatch.setattr(providers, "served_by", lambda provider, call: named.append(provider) or real(provider, call))
    rows = getattr(providers, part)()
    assert [row["call"] for row in rows] == [call.name for call in CALLS]
    for row in rows:
        assert {row["cudnn µs"], row["fa4 µs"], row["fastest µs"]} <= {1.0, 2.0, 3.0}
        assert row["fastest / best"] == row["fastest µs"] / min(row["cudnn µs"], row["fa4 µs"])
        assert row["why not"] == "–"
    assert set(named) == {"cudnn", "fa4", "fastest"}


def test_large_head_dims_are_measured_by_the_frontend(monkeypatch):
    monkeypatch.setattr(providers, "LARGE", CALLS[:1])
    (row,) = providers.large()
    assert set(row) == {"call", "cudnn µs", "frontend µs", "frontend / cudnn", "why not"}
    assert row["frontend / cudnn"] == row["frontend µs"] / row["cudnn µs"]
    assert row["why not"] == "–"


def test_a_provider_is_in_force_for_its_calls_alone():
    seen = providers.served_by("fa4", lambda: (in_force.active(),))
    assert seen == (("fa4",),)
    assert in_force.active() == ("default",)


def test_rows_of_measurements_are_made_of_it(monkeypatch, repository):
    monkeypatch.syspath_prepend(repository / "scripts")
    script = importlib.import_module("preferences")
    monkeypatch.setattr(script, "PARTS", {"forward": (False, CALLS), "backward": (True, CALLS), "lengths": (False, ())})
    measured = {"forward": providers.forward(), "backward": providers.backward()}
    measured["forward"][0] |= {"cudnn µs": 7.25, "fa4 µs": 3.125}
    measured["backward"][1]["fa4 µs"] = "–"  # was not measured, or wrong
    table = json.loads(json.dumps(list(script.rows(measured).values())))
    sections = {"sdpa": [{**row, "dims": tuple(row["dims"])} for row in table], "sdpa_h200": []}
    monkeypatch.setattr(preferences, "rows_of", lambda section: [dict(row) for row in sections[section]])
    preferences.preferences.cache_clear()
    try:
        found = [row for rows in preferences.preferences().values() for row in rows]
    finally:
        preferences.preferences.cache_clear()
    assert [row.of for row in found if row.configuration.is_backward] == ["plain", "capped", "packed"]
    plain, narrow, capped, packed = (row for row in found if not row.configuration.is_backward)
    assert plain == preferences.Preference(
        preferences.Configuration(90, False, (16, 16), "causal", False, False, True, False),
        40,
        40,
        80,
        3.1,
        7.2,
        "plain",
    )
    assert (narrow.configuration.mask, narrow.left, narrow.configuration.has_sinks) == ("window", 7, True)
    assert (capped.configuration.mask, capped.configuration.is_capped, capped.configuration.is_grouped) == (
        "full",
        True,
        False,
    )
    assert (packed.configuration.is_packed, packed.queries, packed.tokens) == (True, 16, 32)


def test_calls_with_as_many_key_heads_as_query_heads_are_measured():
    for calls in BOTH_PASSES:
        found = [call for call in calls if call.heads[0] == call.heads[1] and call.causal and not call.dim_v]
        assert {(call.heads, call.dim) for call in found} == {((32, 32), 64), ((32, 32), 128), ((16, 16), 256)}
        assert {call.lengths for call in found} == {(n,) * (16384 // n) for n in (512, 2048, 8192, 16384)}
        assert len({call.name for call in calls}) == len(calls)


def test_calls_whose_kernels_are_short_show_the_host(monkeypatch, times_by_place):
    monkeypatch.setattr(providers, "host_times", times_by_place)
    monkeypatch.setattr(providers, "wait_for_native_calls", lambda: True)
    for name, length in (("SMALL", 16), ("LONGER", 32)):
        monkeypatch.setattr(providers, name, Shape(1, heads_q=4, heads_kv=2, length=length, dim=8, causal=True))
    rows = providers.host()
    calls = ["forward", "forward and backward"]
    assert [row["call"] for row in rows] == [*calls, *(f"{call}, 1 × 32" for call in calls)]
    assert all(row["fa4 / cudnn"] == 1 for row in rows)
