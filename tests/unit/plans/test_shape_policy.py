"""The shape policy: the setting."""

from __future__ import annotations

import pytest

from cudnn_sdpa import OptionError, shape_policy
from cudnn_sdpa.plans import shape_policy as shape_policy_module


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.setattr(shape_policy_module.Setting, "policy", "")
    monkeypatch.setattr(shape_policy_module._overrides, "_entries", [])
    monkeypatch.delenv(shape_policy_module.VARIABLE, raising=False)
    monkeypatch.setattr(shape_policy_module, "_listeners", [])


def test_the_default():
    assert shape_policy_module.active() == shape_policy_module.DEFAULT


def test_the_environment_variable_names_the_policy(monkeypatch):
    monkeypatch.setenv(shape_policy_module.VARIABLE, "bucketed")
    assert shape_policy_module.active() == "bucketed"
    shape_policy("exact")
    assert shape_policy_module.active() == "exact"


def test_a_wrong_name_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv(shape_policy_module.VARIABLE, "bucket")
    with pytest.raises(OptionError, match="CUDNN_SDPA_SHAPE_POLICY: got 'bucket'; expected one of exact, bucketed"):
        shape_policy_module.active()


def test_listeners_are_notified_of_changes_only():
    heard = []
    shape_policy_module.on_change(lambda: heard.append(shape_policy_module.active()))
    with shape_policy(shape_policy_module.DEFAULT):
        assert heard == []
        with shape_policy("exact"):
            assert heard == ["exact"]
    assert heard == ["exact", shape_policy_module.DEFAULT]
