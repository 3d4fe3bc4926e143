"""What `autotune` has measured decides who serves a call under `providers("fastest")`, in all processes."""

from __future__ import annotations

import dataclasses

import flash4_stand_in as stand_in
import pytest
import torch

from cudnn_sdpa import autotune, explain, providers, sdpa
from cudnn_sdpa.attention.flash4 import checks, serving
from cudnn_sdpa.attention.flash4.choices import Choices
from cudnn_sdpa.attention.flash4.programs import Kind
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
    monkeypatch.setattr(serving, "choices", Choices())


@pytest.mark.sample(1)
@pytest.mark.usefixtures("_store")
@pytest.mark.parametrize(("is_fastest", "provider"), [(True, "fa4"), (False, "cudnn")])
def test_a_choice_is_in_the_plan_store(monkeypatch, is_fastest, provider):
    other_process(monkeypatch)
    assert "autotune" not in described().choice
    offered = []
    monkeypatch.setattr(serving.choices, "offer", lambda *keys: offered.append(keys))
    with autotune():
        assert described().provider == "cudnn"
    of_cudnn, key = offered[0]
    assert (of_cudnn.provider, key.provider) == (None, "fa4")
    serving.choices._settled(key.without_device(), is_fastest)
    for _ in range(2):
        found = described()
        assert found.provider == provider
        assert "as autotune measured" in found.choice
        other_process(monkeypatch)
    assert "autotune" not in described(length=301).choice


def test_a_store_that_is_set_later_has_its_say(monkeypatch, tmp_path):
    other_process(monkeypatch)
    monkeypatch.setattr(default_store, "active", lambda: None)
    offered = []
    monkeypatch.setattr(serving.choices, "offer", lambda *keys: offered.append(keys))
    with autotune():
        assert "autotune" not in described().choice.replace("until autotune", "")
    folder = tmp_path / "plans"
    folder.mkdir(mode=0o700)
    opened = open_store(folder, "folder")
    monkeypatch.setattr(default_store, "active", lambda: opened)
    Choices()._settled(offered[0][1].without_device(), True)
    assert described().provider == "fa4"


@pytest.mark.parametrize("error", [ExecutionError("no launch"), torch.OutOfMemoryError("full"), LibraryError("no cc")])
def test_what_cannot_be_compared_is_cudnns(monkeypatch, error):
    other_process(monkeypatch)
    offered = []
    monkeypatch.setattr(serving.choices, "offer", lambda *keys: offered.append(keys))
    with autotune():
        described()
    of_cudnn, key = offered[0]
    monkeypatch.undo()

    def fault(*_):
        raise error

    monkeypatch.setattr(checks, "fault", fault)
    monkeypatch.setattr(checks.functions, "refuse", lambda *_: None)
    found = Choices()
    found.offer(of_cudnn, dataclasses.replace(key, device=0))
    if isinstance(error, ExecutionError):
        monkeypatch.setattr(checks.functions, "failure", lambda _: "refused")
    assert found.alternatives_of(of_cudnn) == []


def test_a_kind_without_a_fixed_case_is_not_compared():
    kind = Kind(True, "bfloat16", 64, 64, 1, True, False, False, True, False, False, False, True, False)
    assert not checks.is_right(kind, 0)
    full = kind._replace(is_causal=False)
    assert checks._lengths(full) == [(137, 125)]


def test_without_a_store_a_choice_is_of_the_process(monkeypatch):
    monkeypatch.setattr(default_store, "active", lambda: None)
    other_process(monkeypatch)
    offered = []
    monkeypatch.setattr(serving.choices, "offer", lambda *keys: offered.append(keys))
    with autotune():
        described()
    serving.choices._settled(offered[0][1].without_device(), True)
    assert described().provider == "fa4"
    other_process(monkeypatch)
    assert described().provider == "cudnn"
