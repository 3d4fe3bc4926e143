"""`PlanCache`: bounded, LRU eviction, one build per key, correct counters."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

import pytest

from cudnn_sdpa import OptionError
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.cache import CallTable, PlanCache, next_use
from tests.threads import in_threads

TARGET = Target((("deviceVer", 900), ("multiProcessorCount", 132)), 92800, "1.32.0", "NVIDIA H200")
KEY = PlanKey("package.module:attend", "digest", (), (), (), TARGET, 0)


@dataclass(eq=False)
class StandIn:
    """The attributes of a plan that the cache uses."""

    key: PlanKey
    build_seconds: float = 0.25
    last_used: int = 0
    captured: bool = False
    held: bool = False
    loaded: bool = False
    place: int = 0
    plan: StandIn = field(init=False)

    def __post_init__(self):
        self.plan = self  # also as its own prepared call


def key(number: int) -> PlanKey:
    return replace(KEY, options=PlanKey.typed({"n": number}))


def use(cache: PlanCache, number: int, build=StandIn) -> StandIn:
    """A call: looks its plan up and launches it."""
    plan = cache.get(key(number), build)
    plan.last_used = next_use()
    return plan


def held(cache: PlanCache) -> list[int]:
    return [plan.key.option_values["n"] for plan in cache.plans()]


def refuse(key):
    raise AssertionError(f"{key} is there and must not be built")


def test_a_plan_is_built_once_and_found_afterwards():
    cache = PlanCache(8)
    plan = cache.get(key(3), StandIn)
    assert plan.key == key(3)
    assert all(cache.get(key(3), refuse) is plan for _ in range(5))
    assert cache.peek(key(3)) is plan
    assert cache.peek(key(4)) is None


def test_counters():
    cache = PlanCache(2)
    assert cache.info().hits == cache.info().builds == 0
    for number in (2, 3, 2, 4, 2, 3):
        use(cache, number)
    use(cache, 3, refuse)
    info = cache.info()
    assert (info.plans, info.capacity, info.builds, info.evictions, info.failures) == (2, 2, 4, 2, 0)
    assert info.hits == 3
    assert info.build_seconds == 1.0
    assert cache.info() == info


def test_the_least_recently_used_plan_is_evicted_first():
    cache = PlanCache(3)
    for number in (2, 3, 4):
        use(cache, number)
    use(cache, 2, refuse)
    use(cache, 3, refuse)
    cache.peek(key(4))  # does not count as a use
    assert held(cache) == [4, 2, 3]
    use(cache, 5)
    assert held(cache) == [2, 3, 5]
    use(cache, 6)
    assert held(cache) == [3, 5, 6]


def test_resize_keeps_the_most_recently_used():
    cache = PlanCache(5)
    for number in range(5):
        use(cache, number)
    use(cache, 1, refuse)
    cache.resize(2)
    assert held(cache) == [4, 1]
    assert cache.info().capacity == 2
    assert cache.info().evictions == 3
    cache.resize(3)
    use(cache, 9)
    assert held(cache) == [4, 1, 9]


@pytest.mark.parametrize("capacity", [0, -1, 2.0, True, "8", None])
def test_resize_takes_positive_integers_only(capacity):
    cache = PlanCache(4)
    with pytest.raises(OptionError) as caught:
        cache.resize(capacity)
    assert str(caught.value) == f"capacity: got {capacity!r}; expected an integer of at least 1."
    assert cache.info().capacity == 4


def test_a_plan_that_was_built_but_never_used_counts_as_recent():
    cache = PlanCache(2)
    use(cache, 2)
    use(cache, 3)
    cache.get(key(4), StandIn)  # as `explain` does
    assert held(cache) == [3, 4]
    use(cache, 5)
    assert 5 in held(cache)
    assert len(held(cache)) == 2


def test_the_first_use_of_a_prebuilt_plan_is_a_hit():
    cache = PlanCache(2)
    cache.get(key(2), StandIn, to_use=False)
    use(cache, 2, refuse)
    assert (cache.info().builds, cache.info().hits) == (1, 1)


def test_clear_drops_all_plans_and_resets_counters():
    cache = PlanCache(4)
    for number in (2, 3, 2):
        use(cache, number)
    cache.clear()
    info = cache.info()
    assert (info.plans, info.builds, info.hits, info.evictions, info.build_seconds) == (0, 0, 0, 0, 0.0)
    assert info.capacity == 4
    assert use(cache, 2).key == key(2)
    assert cache.info().builds == 1


def test_one_of_many_threads_builds_and_the_others_wait():
    cache, built = PlanCache(4), []

    def slowly(key):
        built.append(threading.get_ident())
        time.sleep(0.1)
        return StandIn(key)

    results = in_threads(lambda _: use(cache, 3, slowly), 32)
    assert len(built) == 1
    assert set(map(id, results)) == {id(cache.peek(key(3)))}
    assert cache.info().builds == 1
    assert cache.info().hits == 31


def test_different_keys_are_built_at_the_same_time():
    cache, together = PlanCache(8), threading.Barrier(4)

    def build(key):
        together.wait(20)  # raises unless all four are being built at once
        return StandIn(key)

    results = in_threads(lambda index: cache.get(key(index), build), 4)
    assert [plan.key for plan in results] == [key(index) for index in range(4)]


def test_a_failure_raises_in_the_building_thread_and_another_retries():
    cache, attempts = PlanCache(4), []
    lock = threading.Lock()

    def fail_twice(key):
        with lock:
            attempts.append(key)
            number = len(attempts)
        time.sleep(0.05)
        if number <= 2:
            raise RuntimeError(f"attempt {number}")
        return StandIn(key)

    def work(_):
        try:
            return cache.get(key(3), fail_twice)
        except RuntimeError as error:
            return error

    results = in_threads(work, 8)
    failures = sorted(str(result) for result in results if isinstance(result, RuntimeError))
    assert failures == ["attempt 1", "attempt 2"]
    assert len(attempts) == 3
    assert {id(result) for result in results if isinstance(result, StandIn)} == {id(cache.peek(key(3)))}
    assert (cache.info().failures, cache.info().builds) == (2, 1)


def test_after_a_failure_the_same_thread_may_try_again():
    cache = PlanCache(4)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            cache.get(key(3), lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cache.get(key(3), StandIn).key == key(3)
    assert cache.info().failures == 3


def test_many_threads_over_more_keys_than_fit_get_their_own_plans():
    cache = PlanCache(5)

    def work(index):
        for step in range(300):
            number = (index * 7 + step * 3) % 13
            if use(cache, number).key != key(number):
                return f"wrong plan for {number}"
        return "right"

    assert in_threads(work, 8) == ["right"] * 8
    info = cache.info()
    assert info.plans == 5
    assert info.builds - info.evictions == 5
    assert info.builds + info.hits == 8 * 300


def test_calls_of_a_plan_are_evicted_with_it(global_cache):
    table = CallTable()
    global_cache.resize(2)
    for number in (2, 3):
        plan = use(global_cache, number)
        table.add(("a", number), plan)
        table.add(("b", number), plan)
    use(global_cache, 2, refuse)
    use(global_cache, 4)
    assert table.get(("a", 3)) is None
    assert table.get(("b", 3)) is None
    assert table.get(("a", 2)).key == key(2)
    assert len(table) == 2
    global_cache.clear()
    assert len(table) == 0


def test_a_call_of_an_evicted_plan_is_not_cached(global_cache):
    table = CallTable()
    plan = global_cache.get(key(2), StandIn)
    global_cache.clear()
    table.add("signature", plan)
    assert len(table) == 0
    global_cache.get(key(2), StandIn)
    table.add("signature", plan)  # of the same key, but not the cached plan
    assert table.get("signature") is None


def test_the_number_of_calls_is_bounded(global_cache):
    table = CallTable(limit=10)
    plan = global_cache.get(key(2), StandIn)
    for number in range(50):
        table.add(number, plan)
    assert len(table) == 10
    assert table.get(49) is plan
    assert table.get(3) is None


def test_used_plans_are_recorded():
    """Also of plans that are dropped meanwhile; earlier uses are not recorded."""
    cache = PlanCache(8)
    first, second, third = (use(cache, number) for number in (1, 2, 3))
    with cache.watch_uses() as used:
        second.last_used = next_use()
        use(cache, 4)
        cache.get(key(5), StandIn)  # built but not used
        with cache.watch_uses() as inner:
            third.last_used = next_use()
        cache.clear()
    assert set(used) == {key(2), key(3), key(4)}
    assert inner == [key(3)]
    assert first.key not in used


@pytest.mark.parametrize("evict", [lambda cache: use(cache, 3), lambda cache: cache.resize(1)], ids=["build", "resize"])
def test_used_plans_that_are_evicted_are_recorded(evict):
    cache = PlanCache(2)
    other, plan = use(cache, 1), use(cache, 2)
    with cache.watch_uses() as used:
        plan.last_used = next_use()
        other.last_used = next_use()
        evict(cache)
        assert 2 not in held(cache)
    assert key(2) in used


def test_a_plan_made_elsewhere_is_added_once():
    cache = PlanCache(8)
    plan = StandIn(key(1))
    cache.put(plan)
    cache.put(StandIn(key(1)))
    assert cache.peek(key(1)) is plan
    assert cache.get(key(1), refuse) is plan


@pytest.mark.parametrize("by_another", [False, True], ids=["built", "fails"])
def test_a_plan_added_during_a_build_is_the_one_returned(global_cache, by_another):
    """No caller gets a plan that the cache does not hold."""
    table, quicker = CallTable(), StandIn(key(1))

    def build(of):
        global_cache.put(quicker)
        table.add("signature", quicker)
        if by_another:
            raise ValueError("not built")
        return StandIn(of)

    try:
        found = global_cache.get(key(1), build)
    except ValueError:
        found = global_cache.get(key(1), refuse)
    assert found is quicker
    assert global_cache.peek(key(1)) is quicker
    assert (global_cache.info().plans, global_cache.info().builds) == (1, 1 if by_another else 2)
    global_cache.clear()
    assert not quicker.held
    assert table.get("signature") is None


def test_concurrent_operations_leave_one_plan_per_key(global_cache):
    global_cache.resize(6)
    tables = [CallTable() for _ in range(8)]

    def work(index):
        for step in range(300):
            of = key((index + 5 * step) % 9)
            if (index + step) % 3:
                plan = global_cache.get(of, lambda of: (time.sleep(0), StandIn(of))[1])
            else:
                global_cache.put(StandIn(of))
                plan = global_cache.peek(of)
            if plan is not None:
                plan.last_used = next_use()
                tables[index].add(step % 20, plan)

    in_threads(work, 8)
    held_now = set(map(id, global_cache.plans()))
    for table in tables:
        for call in table._calls.values():
            assert id(call) in held_now
            assert call.held


def test_a_build_that_is_entered_again_in_its_own_thread_does_not_wait_for_itself():
    """As by a signal handler or a finalizer that makes the same call."""
    cache, inner = PlanCache(4), []

    def interrupted(key):
        inner.append(use(cache, 3))
        return StandIn(key)

    (outer,) = in_threads(lambda _: use(cache, 3, interrupted), 1)
    assert [outer] == inner == [cache.peek(key(3))]
    assert use(cache, 3, refuse) is outer
