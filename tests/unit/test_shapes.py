"""The shape policy: the setting."""

from __future__ import annotations

import pytest

from cudnn_sdpa import OptionError, shape_policy
from cudnn_sdpa.runtime import shapes


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.setattr(shapes._Setting, "policy", "")
    monkeypatch.setattr(shapes._overrides, "_entries", [])
    monkeypatch.delenv(shapes.VARIABLE, raising=False)
    monkeypatch.setattr(shapes, "_listeners", [])


def test_the_default():
    assert shapes.active() == shapes.DEFAULT


def test_the_environment_names_the_policy(monkeypatch):
    monkeypatch.setenv(shapes.VARIABLE, "bucketed")
    assert shapes.active() == "bucketed"
    shape_policy("exact")
    assert shapes.active() == "exact"


def test_a_wrong_name_in_the_environment_is_said(monkeypatch):
    monkeypatch.setenv(shapes.VARIABLE, "bucket")
    with pytest.raises(OptionError, match="CUDNN_SDPA_SHAPE_POLICY: got 'bucket'; expected one of exact, bucketed"):
        shapes.active()


@pytest.mark.parametrize("name", ["Exact", "", None, 1])
def test_a_wrong_name_is_refused_and_changes_nothing(name):
    with pytest.raises(OptionError, match=r"policy: got .*; expected one of 'exact', 'bucketed', 'tiered'"):
        shape_policy(name)
    assert shapes.active() == shapes.DEFAULT


def test_statements_nest():
    with shape_policy("exact") as outer:
        with shape_policy("bucketed") as inner:
            assert (outer, inner, shapes.active()) == ("exact", "bucketed", "bucketed")
        assert shapes.active() == "exact"
    assert shapes.active() == shapes.DEFAULT


def test_an_exception_ends_it():
    with pytest.raises(KeyError), shape_policy("exact"):
        raise KeyError
    assert shapes.active() == shapes.DEFAULT


def test_listeners_hear_of_changes_alone():
    heard = []
    shapes.on_change(lambda: heard.append(shapes.active()))
    with shape_policy(shapes.DEFAULT):
        assert heard == []
        with shape_policy("exact"):
            assert heard == ["exact"]
    assert heard == ["exact", shapes.DEFAULT]
