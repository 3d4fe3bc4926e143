"""What `autotune` has measured decides who serves a call under `providers("fastest")`, in all processes."""

from __future__ import annotations

import dataclasses

import flash4_stand_in as stand_in
import pytest
import torch

from cudnn_sdpa import autotune, explain, providers, sdpa
from cudnn_sdpa.attention.flash4 import checks
from cudnn_sdpa.attention.flash4.programs import Kind
from cudnn_sdpa.attention.providers import choices, choosing
from cudnn_sdpa.attention.providers.choices import Choices, _Choice
from cudnn_sdpa.engine.explain import TARGET_VARIABLE
from cudnn_sdpa.errors import ExecutionError, LibraryError
from cudnn_sdpa.plans import default_store
from cudnn_sdpa.plans.default_store import open_store


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, "h100")
    stand_in.write(tmp_path)
    with stand_in.on_the_search_path(tmp_path):
        yield


@pytest.fixture
def _store(tmp_path, monkeypatch):
    folder = tmp_path / "plans"
    folder.mkdir(mode=0o700)
    opened = open_store(folder, "folder")
    monkeypatch.setattr(default_store, "active", lambda: opened)


def described(length=300):
    q, k, v = (torch.empty(2, 8, length, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    with providers("fastest"):
        return explain(sdpa, q, k, v, is_causal=True)


def other_process(monkeypatch):
    monkeypatch.setattr(choosing, "choices", Choices())


def offered_by(monkeypatch):
    """The keys whose plans `autotune` would compare for `described()`: cuDNN's, and the others' by their providers."""
    offered = []
    monkeypatch.setattr(choosing.choices, "offer", lambda *keys: offered.append(keys))
    with autotune():
        assert described().provider == "cudnn"
    of_cudnn, keys = offered[0]
    assert of_cudnn.provider is None
    return of_cudnn, {key.provider: key for key in keys}


def settle(made, keys, fastest, discarded=None):
    """What `autotune` says once it has compared plans of these keys."""
    choice = _Choice(tuple(key.without_device() for key in keys.values()))
    for provider in sorted(keys, key=lambda provider: provider == fastest):
        reason = (discarded or {}).get(provider, "")
        made._settled(choice, keys[provider], provider == fastest, reason)


@pytest.mark.usefixtures("_store")
@pytest.mark.parametrize("fastest", ["fa4", "own", "cudnn"])
def test_a_choice_is_in_the_plan_store(monkeypatch, fastest):
    other_process(monkeypatch)
    assert "autotune" not in described().choice
    _, keys = offered_by(monkeypatch)
    assert list(keys) == ["fa4", "own"]
    settle(choosing.choices, keys, fastest)
    for _ in range(2):
        found = described()
        assert found.provider == fastest
        assert "as autotune measured" in found.choice
        other_process(monkeypatch)
    assert "autotune" not in described(length=301).choice


@pytest.mark.usefixtures("_store")
def test_a_kind_that_was_discarded_serves_no_call(monkeypatch):
    """A wrong result is no slower one: other shapes of the kind are refused, too."""
    other_process(monkeypatch)
    _, keys = offered_by(monkeypatch)
    refused = []
    monkeypatch.setattr(choices.functions, "refuse", lambda *why: refused.append(why))
    settle(choosing.choices, keys, "cudnn", {"fa4": "its results differ", "own": "it cannot be launched"})
    assert [why for _, why in refused] == ["in a comparison, its results differ"]
    assert "autotune" not in described().choice
    settle(choosing.choices, keys, "cudnn", {"fa4": "its results differ"})
    assert "as autotune measured" in described().choice


def test_a_store_that_is_set_later_has_its_say(monkeypatch, tmp_path):
    other_process(monkeypatch)
    monkeypatch.setattr(default_store, "active", lambda: None)
    _, keys = offered_by(monkeypatch)
    folder = tmp_path / "plans"
    folder.mkdir(mode=0o700)
    opened = open_store(folder, "folder")
    monkeypatch.setattr(default_store, "active", lambda: opened)
    settle(Choices(), keys, "fa4")
    assert described().provider == "fa4"


@pytest.mark.parametrize("error", [ExecutionError("no launch"), torch.OutOfMemoryError("full"), LibraryError("no cc")])
def test_what_cannot_be_compared_is_cudnns(monkeypatch, error):
    other_process(monkeypatch)
    of_cudnn, keys = offered_by(monkeypatch)
    monkeypatch.undo()

    def fault(*_):
        raise error

    monkeypatch.setattr(checks, "fault", fault)
    monkeypatch.setattr(checks.functions, "refuse", lambda *_: None)
    found = Choices()
    found.offer(of_cudnn, (dataclasses.replace(keys["fa4"], device=0),))
    if isinstance(error, ExecutionError):
        monkeypatch.setattr(checks.functions, "failure", lambda _: "refused")
    assert choices.autotune.offered.pop(of_cudnn)() == []


def test_a_kind_without_a_fixed_case_is_not_compared():
    kind = Kind(True, "bfloat16", 64, 64, 1, True, False, False, True, False, False, False, True, False)
    assert not checks.is_right(kind, 0)
    full = kind._replace(is_causal=False)
    assert checks._lengths(full) == [(137, 125)]


def test_without_a_store_a_choice_is_of_the_process(monkeypatch):
    monkeypatch.setattr(default_store, "active", lambda: None)
    other_process(monkeypatch)
    _, keys = offered_by(monkeypatch)
    settle(choosing.choices, keys, "fa4")
    assert described().provider == "fa4"
    other_process(monkeypatch)
    assert described().provider == "cudnn"
