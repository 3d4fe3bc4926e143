"""Settings of the plan cache: `no_plan_builds`, and the capacity from the environment."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from test_cache import StandIn, key, refuse

from cudnn_sdpa import PlanBuildError, no_plan_builds
from cudnn_sdpa.plans.cache import DEFAULT_SIZE, capacity_from_environment


def test_no_plan_builds_names_the_key_and_does_not_build(global_cache):
    plan = global_cache.get(key(2), StandIn)
    with no_plan_builds():
        assert global_cache.get(key(2), refuse) is plan
        with pytest.raises(PlanBuildError, match="no_plan_builds") as caught:
            global_cache.get(key(3), refuse)
    assert caught.value.key == key(3)
    assert str(key(3)) in str(caught.value)
    suggestion = "Make this call once before, or record a run's plans with record_plans() and build them with warmup()."
    assert str(caught.value).startswith(f"A plan is missing, and no_plan_builds() is in force. {suggestion}\n")
    assert global_cache.get(key(3), StandIn).key == key(3)
    assert global_cache.info().failures == 0


def test_no_plan_builds_nests_and_ends_with_an_exception(global_cache):
    with no_plan_builds():
        with pytest.raises(ZeroDivisionError), no_plan_builds():
            raise ZeroDivisionError
        with pytest.raises(PlanBuildError):
            global_cache.get(key(2), refuse)
    assert global_cache.get(key(2), StandIn).key == key(2)


def test_no_plan_builds_holds_in_all_threads(global_cache):
    with no_plan_builds(), ThreadPoolExecutor(4) as pool:
        attempts = [pool.submit(global_cache.get, key(number), refuse) for number in range(4)]
    assert [type(attempt.exception()) for attempt in attempts] == [PlanBuildError] * 4


@pytest.mark.parametrize(("text", "capacity"), [("7", 7), ("", DEFAULT_SIZE), (None, DEFAULT_SIZE)])
def test_the_environment_sets_the_capacity(monkeypatch, text, capacity):
    monkeypatch.delenv("CUDNN_SDPA_CACHE_SIZE", raising=False)
    if text is not None:
        monkeypatch.setenv("CUDNN_SDPA_CACHE_SIZE", text)
    assert capacity_from_environment() == capacity


@pytest.mark.parametrize("text", ["0", "-3", "many", "2.5", "٣", "9" * 5000])
def test_an_invalid_capacity_in_the_environment_is_named(monkeypatch, caplog, text):
    monkeypatch.setenv("CUDNN_SDPA_CACHE_SIZE", text)
    assert capacity_from_environment() == DEFAULT_SIZE
    (record,) = caplog.records
    assert record.getMessage().startswith(f"CUDNN_SDPA_CACHE_SIZE: got {text!r}; expected an integer of at least 1")


def test_the_environment_is_read_when_the_package_is_imported(run_python):
    code = "from cudnn_sdpa import plan_cache; print(plan_cache.info().capacity)"
    assert run_python(code, CUDNN_SDPA_CACHE_SIZE="7").stdout.strip() == "7"
    result = run_python(code, CUDNN_SDPA_CACHE_SIZE="many")
    assert result.stdout.strip() == str(DEFAULT_SIZE)
    assert "CUDNN_SDPA_CACHE_SIZE: got 'many'" in result.stderr
