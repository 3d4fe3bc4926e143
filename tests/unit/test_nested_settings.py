"""Settings with a `with` statement: exited in any order, they restore what was before."""

from __future__ import annotations

import ast
import contextvars
import itertools
import random
from pathlib import Path

import pytest

import cudnn_sdpa
from cudnn_sdpa import OptionError, cpu_checks, fallback, shape_policy, use_plan_store
from cudnn_sdpa.engine import cpu_target
from cudnn_sdpa.plans import default_store
from cudnn_sdpa.plans import shape_policy as shape_policy_module
from cudnn_sdpa.plans.store import PlanStore

POLICIES = ("exact", "bucketed", "tiered")

#: Every setting of the process that a `with` statement ends: what sets it, the values to set, and what is in force.
SETTINGS = {
    "shape_policy": (shape_policy, POLICIES, shape_policy_module.active),
    "use_plan_store": (use_plan_store, ("first", "second", "third"), default_store.active),
    "cpu_checks": (cpu_checks, ("a100", None, "b200"), cpu_target.active_name),
}


@pytest.fixture(params=SETTINGS)
def setting(request, tmp_path, monkeypatch):
    """What sets a setting, the values, and what is in force then."""
    monkeypatch.chdir(tmp_path)
    set_to, values, active = SETTINGS[request.param]

    def in_force():
        found = active()
        return found.folder.name if isinstance(found, PlanStore) else found

    before = in_force()
    yield set_to, values, in_force
    assert in_force() == before


def test_every_setting_is_tested():
    """Left out: a count (`no_plan_builds`), lists (`autotune`, `record_plans`), a context variable (`fallback`)."""
    found = set()
    for path in Path(cudnn_sdpa.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            methods = {each.name for each in getattr(node, "body", ()) if isinstance(each, ast.FunctionDef)}
            if isinstance(node, ast.ClassDef) and methods & {"__enter__", "__exit__"}:
                found.add(node.name)
    assert found == {"Override", "ShapePolicyUse", "PlanStoreUse", "CpuChecksUse"}, "not in SETTINGS"


def test_a_permanent_value_outlives_statements_that_follow(setting):
    set_to, values, in_force = setting
    with set_to(values[0]):
        set_to(values[1])
        for _ in range(3):
            with set_to(values[2]):
                assert in_force() == values[2]
            assert in_force() == values[1]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_overlapping_settings_restore_the_previous_one(setting, order):
    set_to, values, in_force = setting
    before = in_force()
    uses = [set_to(value) for value in values]
    for use in uses:
        use.__enter__()
    left = list(range(3))
    for number in order:
        assert in_force() == values[left[-1]]
        uses[number].__exit__(None, None, None)
        left.remove(number)
    assert in_force() == before


def test_random_changes_match_a_model(setting):
    """Entered and exited at random, and set permanently outside of all statements."""
    set_to, values, in_force = setting
    r, open_uses = random.Random(5), []
    before = in_force()
    with (use := set_to(values[0])):
        entries = use._overrides._entries
    at_start = list(entries)
    for _ in range(1000):
        if open_uses and r.random() < 0.5:
            open_uses.pop(r.randrange(len(open_uses)))[0].__exit__(None, None, None)
        else:
            use = set_to(value := r.choice(values))
            use.__enter__()
            open_uses.append((use, value))
        assert in_force() == (open_uses[-1][1] if open_uses else before)
    for use, _ in open_uses:
        use.__exit__(None, None, None)
    assert in_force() == before
    assert entries == at_start


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
