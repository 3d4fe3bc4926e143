"""Settings with a `with` statement: exited in any order, they restore what was before."""

from __future__ import annotations

import contextvars
import itertools
import random

import pytest

import cudnn_sdpa
from cudnn_sdpa import OptionError, fallback, shape_policy, use_plan_store
from cudnn_sdpa.plans import default_store
from cudnn_sdpa.plans import shape_policy as shape_policy_module

POLICIES = ("exact", "bucketed", "tiered")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_overlapping_policies_restore_the_previous_one(order):
    before = shape_policy_module.active()
    uses = [shape_policy(policy) for policy in POLICIES]
    for use, policy in zip(uses, POLICIES, strict=True):
        assert use.__enter__() == policy
    left = list(range(3))
    for number in order:
        assert shape_policy_module.active() == POLICIES[left[-1]]
        uses[number].__exit__(None, None, None)
        left.remove(number)
    assert shape_policy_module.active() == before


def test_overlapping_stores_restore_the_previous_one(tmp_path):
    before = default_store.active()
    first, second = use_plan_store(tmp_path / "first"), use_plan_store(tmp_path / "second")
    with first:
        second.__enter__()
    assert default_store.active() is second.store
    second.__exit__(None, None, None)
    assert default_store.active() is before


def test_random_policy_changes_match_a_model():
    """Entered and exited at random, and set permanently outside of all statements."""
    r, open_uses = random.Random(5), []
    before = shape_policy_module.active()
    for _ in range(2000):
        if open_uses and r.random() < 0.5:
            open_uses.pop(r.randrange(len(open_uses)))[0].__exit__(None, None, None)
        else:
            use = shape_policy(policy := r.choice(POLICIES))
            use.__enter__()
            open_uses.append((use, policy))
        assert shape_policy_module.active() == (open_uses[-1][1] if open_uses else before)
    for use, _ in open_uses:
        use.__exit__(None, None, None)
    assert shape_policy_module.active() == before
    assert shape_policy_module._overrides._entries == []


def test_a_policy_set_inside_a_context_ends_with_it():
    before = shape_policy_module.active()
    with shape_policy("exact"):
        for policy in POLICIES * 100:
            shape_policy(policy)
            assert shape_policy_module.active() == policy
        assert len(shape_policy_module._overrides._entries) < 5
    assert shape_policy_module.active() == before


def test_a_fallback_may_be_exited_in_another_context():
    """As with a FastAPI dependency that yields."""

    def dependency():
        with fallback("torch"):
            yield

    running = dependency()
    contextvars.copy_context().run(next, running)
    with pytest.raises(StopIteration):
        contextvars.copy_context().run(next, running)


@pytest.mark.parametrize("path", ["", "~nobody_of_this_name/plans"])
def test_an_invalid_path_is_an_option_error(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"^path: got"):
        use_plan_store(path)
    with pytest.raises(OptionError, match=r"^folder: got"):
        cudnn_sdpa.compile_plans(cudnn_sdpa.plans.manifest.PlanManifest(), "h200", path)
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_folder_in_the_environment_warns(run_python):
    code = "from cudnn_sdpa.plans import default_store; print(default_store.active(), default_store.active())"
    result = run_python(code, CUDNN_SDPA_PLAN_DIR="~nobody_of_this_name/plans")
    assert result.stdout == "None None\n"
    assert result.stderr.count("plans are not stored despite CUDNN_SDPA_PLAN_DIR") == 1


@pytest.mark.parametrize("off", ["off", "OFF", "Off"])
def test_off_is_off_in_any_case(off, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDNN_SDPA_PLAN_DIR", off)
    assert default_store.folder_of_environment() is None
    assert default_store._from_environment() is None
    with use_plan_store(off) as store:
        assert store is None
    assert list(tmp_path.iterdir()) == []
