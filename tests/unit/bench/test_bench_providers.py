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
    for name in ("FORWARD", "TRAINING", "LENGTHS"):
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
    assert (narrow.configuration.mask, narrow.configuration.has_sinks) == ("window", True)
    assert (capped.configuration.mask, capped.configuration.is_capped, capped.configuration.is_grouped) == (
        "full",
        True,
        False,
    )
    assert (packed.configuration.is_packed, packed.queries, packed.tokens) == (True, 16, 32)


def test_calls_whose_kernels_are_short_show_the_host(monkeypatch, times_by_place):
    monkeypatch.setattr(providers, "host_times", times_by_place)
    monkeypatch.setattr(providers, "wait_for_native_calls", lambda: True)
    monkeypatch.setattr(providers, "SMALL", Shape(batch=1, heads_q=4, heads_kv=2, length=16, dim=8, causal=True))
    rows = providers.host()
    assert [row["call"] for row in rows] == ["forward", "forward and backward"]
    assert all(row["fa4 / cudnn"] == 1 for row in rows)
