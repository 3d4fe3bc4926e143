"""The helper process: every failure becomes an error, and the next request works."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from cudnn_sdpa import OfflineError
from cudnn_sdpa.attention.dense.explain import describe_sdpa
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline import planner
from cudnn_sdpa.offline.planner import Helper, plan_offline
from tests.threads import in_threads

pytestmark = pytest.mark.usefixtures("can_plan")


@pytest.fixture(scope="module")
def helper(can_plan):  # noqa: ARG001 - skips first
    helper = Helper()
    yield helper
    helper.close()


@pytest.fixture
def request_for_a_plan(shapes, h200):
    key = describe_sdpa(*shapes()).key(Target.from_properties(h200), None)
    return {"key": key.to_json(), "properties": h200}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> bool:
    for _ in range(200):
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_one_process_answers_many_requests(helper, request_for_a_plan):
    first = helper.ask(request_for_a_plan)
    pid = helper._process.pid
    second = helper.ask(request_for_a_plan)
    assert helper._process.pid == pid
    assert first["engine"] == second["engine"]
    assert len(first["plan"]) == len(second["plan"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)
def test_a_crash_is_an_answer_that_names_the_signal(helper, request_for_a_plan, number):
    helper.ask(request_for_a_plan)
    pid, caught = helper._process.pid, []

    def ask():
        try:
            helper.ask(request_for_a_plan)
        except OfflineError as error:
            caught.append(error)

    os.kill(pid, signal.SIGSTOP)  # so that it dies before it answers
    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    os.kill(pid, number)
    os.kill(pid, signal.SIGCONT)
    thread.join(60)
    assert len(caught) == 1
    assert f"was killed by {number.name}" in str(caught[0])
    assert wait_until_gone(pid)
    assert helper.ask(request_for_a_plan)["engine"]
    assert helper._process.pid != pid


@pytest.mark.slow
def test_a_death_between_two_requests_goes_unnoticed(helper, request_for_a_plan):
    helper.ask(request_for_a_plan)
    pid = helper._process.pid
    os.kill(pid, signal.SIGKILL)
    helper._process.wait(30)
    assert helper.ask(request_for_a_plan)["engine"]
    assert helper._process.pid != pid


@pytest.mark.slow
def test_a_timeout_raises_and_its_late_answer_is_dropped(helper, request_for_a_plan):
    helper.ask(request_for_a_plan)
    pid = helper._process.pid
    with pytest.raises(OfflineError, match="does not answer"):
        helper.ask(request_for_a_plan, timeout=0.001)
    assert wait_until_gone(pid)
    broken = {**request_for_a_plan, "properties": {}}
    assert "error" in helper.ask(broken)
    assert helper.ask(request_for_a_plan)["engine"]


def test_after_an_interrupt_the_next_request_gets_its_own_answer(helper, request_for_a_plan):
    helper.ask({**request_for_a_plan, "properties": {}})
    process, main = helper._process, threading.main_thread()
    process.send_signal(signal.SIGSTOP)
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(main.ident, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores the signal
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            helper.ask({**request_for_a_plan, "properties": {}})
    finally:
        signal.signal(signal.SIGINT, before)
    timer.join()
    process.send_signal(signal.SIGCONT)  # does nothing to a process that has been waited for
    assert helper.ask(request_for_a_plan)["engine"]


def answer_or_crash(helper, request_):
    """The error, from the helper's answer or from its last output."""
    try:
        answer = helper.ask(request_)
    except OfflineError as error:
        return str(error)
    return answer["error"]


@pytest.mark.parametrize(
    "properties",
    [{}, {"deviceVer": 900}, {"deviceVer": [9]}, {"deviceVer": 900, "multiProcessorCount": 132}],
    ids=["nothing", "a version alone", "a list as version", "two keys"],
)
def test_invalid_gpu_data_raises_and_the_next_request_works(helper, request_for_a_plan, properties):
    assert "Error" in answer_or_crash(helper, {**request_for_a_plan, "properties": properties})
    assert helper.ask(request_for_a_plan)["engine"]


@pytest.mark.parametrize("request_", [{}, {"key": 3}, {"key": {}, "properties": {}}], ids=str)
def test_an_invalid_request_raises_and_the_next_request_works(helper, request_for_a_plan, request_):
    assert "Error" in answer_or_crash(helper, request_)
    assert helper.ask(request_for_a_plan)["engine"]


@pytest.mark.slow
def test_many_threads_may_send_requests(helper, request_for_a_plan):
    answers = in_threads(lambda _: helper.ask(request_for_a_plan), 4)
    assert len({(answer["engine"], len(answer["plan"])) for answer in answers}) == 1


def test_an_operation_that_differs_in_the_helper_is_refused(shapes, h200):
    key = describe_sdpa(*shapes()).key(Target.from_properties(h200), None)
    with pytest.raises(OfflineError, match="source has changed"):
        plan_offline(dataclasses.replace(key, digest="0" * 16), h200)


@pytest.mark.parametrize("operation", ["cudnn_sdpa.attention.dense.graphs:missing", "no_such_module:attend"])
def test_an_unknown_operation_is_refused(shapes, h200, operation):
    key = describe_sdpa(*shapes()).key(Target.from_properties(h200), None)
    with pytest.raises(OfflineError, match=r"missing|no_such_module"):
        plan_offline(dataclasses.replace(key, operation=operation), h200)
    assert plan_offline(key, h200).engine


@pytest.mark.slow
def test_close_may_be_called_twice(request_for_a_plan):
    helper = Helper()
    helper.close()
    helper.ask(request_for_a_plan)
    pid = helper._process.pid
    helper.close()
    helper.close()
    assert wait_until_gone(pid)


@pytest.mark.slow
def test_it_exits_with_its_parent_however_that_exits(run_python, request_for_a_plan):
    code = """
import json, os, signal, sys
from cudnn_sdpa.offline.planner import Helper
helper = Helper()
helper.ask(json.loads(sys.argv[1]), timeout=60)
print(helper._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = run_python(code, json.dumps(request_for_a_plan), check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert wait_until_gone(int(result.stdout))


@pytest.mark.slow
def test_a_forked_child_starts_its_own_helper(run_python, request_for_a_plan):
    code = """
import json, os, sys
from cudnn_sdpa.offline.planner import _helper as helper
request = json.loads(sys.argv[1])
helper.ask(request)
own = helper._process.pid
child = os.fork()
if child == 0:
    assert helper.ask(request)["engine"]
    assert helper._process.pid != own
    helper.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert helper.ask(request)["engine"]
assert helper._process.pid == own
"""
    result = run_python(code, json.dumps(request_for_a_plan))
    assert result.returncode == 0


#: A helper that answers each request with the number of one before it, as after an answer that nobody waited for.
LATE = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"engine": "eng0", "number": request["number"] - request.get("late", 0)}), flush=True)
"""


def test_the_answer_to_another_request_is_refused(monkeypatch):
    """And its helper is ended, so that the next one is not answered by it either."""
    monkeypatch.setattr(planner, "_PROGRAM", LATE.replace("{", "{{").replace("}", "}}"))
    monkeypatch.setattr(planner.driver, "helper_environment", dict)
    helper = Helper()
    try:
        assert helper.ask({})["engine"] == "eng0"
        pid = helper._process.pid
        with pytest.raises(OfflineError, match="answered a different request"):
            helper.ask({"late": 1})
        assert wait_until_gone(pid)
        assert helper.ask({})["engine"] == "eng0"
    finally:
        helper.close()
