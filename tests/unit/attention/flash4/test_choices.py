"""What `autotune` has measured decides who serves a call under `providers("fastest")`, in all processes."""

from __future__ import annotations

import flash4_stand_in as stand_in
import pytest
import torch

from cudnn_sdpa import autotune, explain, providers, sdpa
from cudnn_sdpa.attention.flash4 import serving
from cudnn_sdpa.attention.flash4.choices import Choices
from cudnn_sdpa.engine.explain import TARGET_VARIABLE
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
    q, k, v = (torch.empty(2, 8, length, 72, dtype=torch.bfloat16, device="meta") for _ in range(3))
    with providers("fastest"):
        return explain(sdpa, q, k, v, is_causal=True)


def other_process(monkeypatch):
    monkeypatch.setattr(serving, "choices", Choices())


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
