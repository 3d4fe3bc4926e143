"""Plans built in the background."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
import torch

import cudnn_sdpa
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense.specs import ForwardSpec
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.offline import background
from cudnn_sdpa.offline.background import BackgroundPlanner
from cudnn_sdpa.offline.planner import plan_offline


@pytest.fixture
def planner():
    planner = BackgroundPlanner()
    yield planner
    planner.close()


@pytest.fixture(scope="module")
def properties(can_plan):  # noqa: ARG001
    return load_properties("h200")


def key(properties, rows=128, dtype=torch.bfloat16):
    q = torch.empty(1, 4, rows, 64, dtype=dtype, device="meta")
    return ForwardSpec.of(from_fields(ForwardArguments, q, q, q, is_causal=True)).key(
        Target.from_properties(properties), None
    )


class Asked:
    """A request, and the plan that it gave."""

    def __init__(self, planner, of, properties):
        self.stored = None
        self.request = planner.request(of, properties, self.keep)

    def keep(self, stored):
        self.stored = stored

    @property
    def is_done(self):
        return self.request.is_done


@pytest.mark.slow
def test_background_plans_match_those_of_a_direct_helper(planner, properties):
    request = Asked(planner, key(properties), properties)
    assert not request.is_done
    assert planner.wait(120)
    expected = plan_offline(key(properties), properties)
    stored = request.stored
    assert (stored.engine, stored.knobs, stored.workspace) == (expected.engine, expected.knobs, expected.workspace)
    assert stored.identity == key(properties).identity()
    assert len(stored.data) > 10_000


@pytest.mark.slow
def test_the_callback_runs_in_the_background(planner, properties, caplog):
    given = []
    request = planner.request(
        key(properties), properties, lambda stored: given.append((stored, threading.current_thread()))
    )
    assert planner.wait(120)
    ((stored, thread),) = given
    assert stored.identity == key(properties).identity()
    assert thread is not threading.current_thread()
    assert request.is_done

    def fail(_):
        raise KeyError("no room")

    request = planner.request(key(properties), properties, fail)
    assert planner.wait(120)
    assert request.is_done
    assert "a plan was not built in the background: KeyError: 'no room'" in caplog.text


@pytest.mark.slow
def test_duplicate_requests_build_once(planner, properties):
    first = Asked(planner, key(properties), properties)
    assert Asked(planner, key(properties), properties).request is first.request
    assert planner.wait(120)
    assert Asked(planner, key(properties), properties).request is not first.request  # that one is done and was returned


@pytest.mark.slow
def test_plans_are_kept_in_the_store(planner, properties, tmp_path):
    with cudnn_sdpa.use_plan_store(tmp_path / "plans") as store:
        request = Asked(planner, key(properties), properties)
        assert planner.wait(120)
        assert store.load(key(properties)).data == request.stored.data


@pytest.mark.slow
def test_errors_are_logged_once_and_stop_nothing(planner, properties, monkeypatch, caplog):
    def fail(*_):
        raise KeyError("engine")

    with monkeypatch.context() as patch:
        patch.setattr(background, "plan_offline", fail)
        requests = [Asked(planner, key(properties, rows), properties) for rows in (128, 192, 256)]
        assert planner.wait(120)
    assert [(request.is_done, request.stored) for request in requests] == [(True, None)] * 3
    assert caplog.text.count("KeyError: 'engine'") == 1
    assert planner._thread is not None
    again = Asked(planner, key(properties), properties)
    assert planner.wait(120)
    assert again.stored is not None


@pytest.mark.slow
def test_a_thread_that_cannot_start_is_no_error(planner, properties, monkeypatch, caplog):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            assert Asked(planner, key(properties), properties).request is None
    assert caplog.text.count("can't start new thread") == 1
    assert planner.wait(0.0)
    request = Asked(planner, key(properties), properties)
    assert planner.wait(120)
    assert request.stored is not None


@pytest.mark.parametrize(("name", "value"), [("executable", ""), ("executable", None), ("frozen", True)])
def test_without_an_interpreter_there_is_no_helper(properties, monkeypatch, name, value):
    monkeypatch.setattr(sys, name, value, raising=False)
    assert Asked(BackgroundPlanner(), key(properties), properties).request is None


@pytest.mark.slow
def test_plans_stored_by_another_process_are_not_built(planner, properties, tmp_path, monkeypatch):
    with cudnn_sdpa.use_plan_store(tmp_path / "plans"):
        first = Asked(planner, key(properties), properties)
        assert planner.wait(120)
        monkeypatch.setattr(background, "plan_offline", None)
        second = Asked(planner, key(properties), properties)
        assert planner.wait(120)
    assert second.stored.data == first.stored.data


@pytest.mark.slow
def test_an_interrupt_does_not_end_the_helper(planner, properties):
    Asked(planner, key(properties), properties)
    assert planner.wait(120)
    process = planner._helper._process
    process.send_signal(signal.SIGINT)
    request = Asked(planner, key(properties, 256), properties)
    assert planner.wait(120)
    assert request.stored is not None
    assert planner._helper._process is process


@pytest.mark.slow
def test_a_killed_helper_loses_one_plan(planner, properties, caplog):
    first = Asked(planner, key(properties), properties)
    while not (planner._helper and planner._helper._process):
        time.sleep(0.01)
    planner._helper._process.kill()
    assert planner.wait(120)
    assert first.stored is None
    assert "killed by SIGKILL" in caplog.text
    second = Asked(planner, key(properties), properties)
    assert planner.wait(120)
    assert second.stored is not None


@pytest.mark.slow
def test_an_idle_helper_exits_and_restarts(planner, properties, monkeypatch):
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.1)
    Asked(planner, key(properties), properties)
    thread = planner._thread
    assert planner.wait(120)
    thread.join(10)
    assert not thread.is_alive()
    assert planner._helper is planner._thread is None
    again = Asked(planner, key(properties, 256), properties)
    assert planner.wait(120)
    assert again.stored is not None


@pytest.mark.slow
def test_excess_requests_are_dropped(planner, properties, monkeypatch):
    monkeypatch.setattr(background, "MAX_WAITING", 1)
    assert Asked(planner, key(properties), properties).request is not None
    assert Asked(planner, key(properties, 256), properties).request is None
    assert planner.wait(120)
    assert Asked(planner, key(properties, 256), properties).request is not None


def test_closing_abandons_builds_silently(planner, properties, caplog):
    request = Asked(planner, key(properties), properties)
    while not (planner._helper and planner._helper._process):
        time.sleep(0.01)
    process = planner._helper._process
    start = time.monotonic()
    planner.close()
    assert time.monotonic() - start < 2
    assert process.poll() is not None
    assert request.stored is None
    assert caplog.text == ""
    assert Asked(planner, key(properties, 256), properties).request is None


def test_closing_before_the_helper_has_started(properties):
    planner = BackgroundPlanner()
    Asked(planner, key(properties), properties)
    thread = planner._thread
    start = time.monotonic()
    planner.close()
    assert time.monotonic() - start < 1.5
    assert not thread.is_alive()
    assert planner._helper is None


def test_a_program_exits_while_a_plan_is_built(run_python, can_plan):  # noqa: ARG001
    result = run_python(
        """
import time, torch
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense.specs import ForwardSpec as Forward
from cudnn_sdpa.offline.background import background
from cudnn_sdpa.graph.target import Target, load_properties
properties = load_properties("h200")
q = torch.empty(1, 4, 128, 64, dtype=torch.bfloat16, device="meta")
key = Forward.of(ForwardArguments(q, q, q)).key(Target.from_properties(properties), None)
background.request(key, properties, print)
while not (background._helper and background._helper._process):
    time.sleep(0.01)
print(background._helper._process.pid)
"""
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(result.stdout), 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_starts_its_own_helper(properties):
    planner = background.background
    Asked(planner, key(properties), properties)
    assert planner.wait(120)
    theirs = planner._helper
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert planner._helper is planner._thread is None
            request = Asked(planner, key(properties, 256), properties)
            assert planner.wait(120)
            assert request.stored is not None
            status = 0
        finally:
            planner.close()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert theirs._process.poll() is None
    assert threading.active_count() >= 2
