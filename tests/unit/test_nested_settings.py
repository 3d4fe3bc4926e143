"""Settings with a `with` statement: exited in any order, they restore what was before."""

from __future__ import annotations

import ast
import contextvars
import itertools
import random
from pathlib import Path

import pytest

import cudnn_sdpa
from cudnn_sdpa import OptionError, cpu_checks, fallback, providers, shape_policy, use_plan_store
from cudnn_sdpa.engine import cpu_target
from cudnn_sdpa.plans import default_store
from cudnn_sdpa.plans import providers as providers_module
from cudnn_sdpa.plans import shape_policy as shape_policy_module
from cudnn_sdpa.plans.store import PlanStore

POLICIES = ("exact", "bucketed", "tiered")

#: Every setting of the process that a `with` statement ends: what sets it, the values to set, and what is in force.
SETTINGS = {
    "shape_policy": (shape_policy, POLICIES, shape_policy_module.active),
    "providers": (providers, ("own", "cudnn", "fastest"), lambda: providers_module.active()[0]),
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
    assert found == {"Override", "ShapePolicyUse", "ProvidersUse", "PlanStoreUse", "CpuChecksUse"}, "not in SETTINGS"


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
    """Entered at once or later and exited at random, and set for good in between."""
    set_to, values, in_force = setting
    before = in_force()
    with (use := set_to(values[0])):
        entries = use._overrides._entries
    at_start, r = list(entries), random.Random(5)
    for _ in range(100):
        model, created, entered, outer = [], [], [], set_to(values[0])
        with outer:  # all that is set for good ends with it
            for number in range(12):
                what, value = r.choice(["create", "enter", "enter", "exit", "set"]), r.choice(values)
                if what in ("create", "set"):
                    use = set_to(value)
                    model.append((number, value, False))
                    if what == "create":
                        created.append((number, value, use))
                    del use
                elif what == "enter":
                    if not created or r.random() < 0.5:
                        created.append((number, value, set_to(value)))
                        model.append((number, value, False))
                    made = created.pop(r.randrange(len(created)))
                    made[2].__enter__()
                    entered.append(made)
                    model = [each for each in model if each[0] != made[0]]
                    model.append((*made[:2], True))
                elif entered:
                    made = entered.pop(r.randrange(len(entered)))
                    made[2].__exit__(None, None, None)
                    start = next(place for place, each in enumerate(model) if each[0] == made[0])
                    holds = [each[2] for each in model[start + 1 :]]
                    del model[start : start + 1 + (holds.index(True) if True in holds else len(holds))]
                assert in_force() == (model[-1][1] if model else values[0])
            for made in entered:
                made[2].__exit__(None, None, None)
        assert in_force() == before
        assert entries == at_start


def test_an_override_may_be_entered_again_and_within_itself(setting):
    set_to, values, in_force = setting
    before, use = in_force(), set_to(values[0])
    for _ in range(2):
        with use:
            with use:
                assert in_force() == values[0]
            assert in_force() == values[0]
        assert in_force() == before


def test_what_another_thread_ends_does_not_end_this_threads(setting):
    """Also while this thread is between the call and its `with` statement."""
    set_to, values, in_force = setting
    use = set_to(values[0])
    with use:
        mine = set_to(values[1])
        use.__exit__(None, None, None)  # as another thread does, which had entered before
        with mine:
            assert in_force() == values[1]
        use.__enter__()


def test_a_statement_that_the_garbage_collector_ends_does_not_deadlock(run_python):
    assert run_python(ENDED_BY_THE_COLLECTOR).stdout == "as before\n"


ENDED_BY_THE_COLLECTOR = """
import faulthandler, gc
import cudnn_sdpa
from cudnn_sdpa.plans import shape_policy

faulthandler.dump_traceback_later(60, exit=True)

def holder(cycle):
    with cudnn_sdpa.shape_policy("exact"):
        yield cycle

gc.set_threshold(1, 1, 1)  # anywhere
before = shape_policy.active()
with cudnn_sdpa.shape_policy("bucketed"):
    for _ in range(300):
        cycle = []
        held = holder(cycle)
        cycle.append(held)
        next(held)
        del cycle, held
        cudnn_sdpa.shape_policy("tiered")
    gc.collect()
assert shape_policy.active() == before
print("as before")
"""


def test_a_signal_handler_may_change_a_setting_in_the_middle_of_a_change(run_python):
    assert run_python(INTERRUPTED).stdout == "the latest\n"


INTERRUPTED = """
import faulthandler, sys
import cudnn_sdpa
from cudnn_sdpa.plans import shape_policy

faulthandler.dump_traceback_later(60, exit=True)

def handle():
    if number % 2 and shape_policy._overrides._entries:
        cudnn_sdpa.shape_policy("exact")
    with cudnn_sdpa.shape_policy("tiered"):
        cudnn_sdpa.shape_policy("bucketed")
        assert shape_policy.active() == "bucketed"

before, number = shape_policy.active(), 0

def trace(frame, event, argument):
    global number
    if frame.f_code.co_filename.endswith(("settings.py", "shape_policy.py")):
        number += 1
        if number % 47 == 0:
            sys.settrace(None)
            handle()
            sys.settrace(trace)
        return trace

def check():
    sys.settrace(None)
    entries = shape_policy._overrides._entries
    assert shape_policy.active() == (entries[-1].value if entries else before)
    sys.settrace(trace)

for _ in range(200):  # between any two lines
    sys.settrace(trace)
    with cudnn_sdpa.shape_policy("exact"):
        check()
        cudnn_sdpa.shape_policy("bucketed")
        check()
        with cudnn_sdpa.shape_policy("tiered"):
            check()
        check()
    check()
    sys.settrace(None)
assert number > 1000
print("the latest")
"""


def test_a_policy_set_inside_a_context_ends_with_it():
    before = shape_policy_module.active()
    with shape_policy("exact"):
        for policy in POLICIES * 100:
            shape_policy(policy)
            assert shape_policy_module.active() == policy
        assert len(shape_policy_module._overrides._entries) < 20
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
        cudnn_sdpa.compile_plans(cudnn_sdpa.PlanManifest(), "h200", path)
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
