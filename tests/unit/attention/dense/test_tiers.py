"""Which plan serves a new shape, and which one takes over: the decisions, with fake plans."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from cudnn_sdpa import UnsupportedError, autotune, no_plan_builds, plan_cache, shape_policy
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense import launch, tiers
from cudnn_sdpa.attention.dense.plans import ForwardSpec
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.plans import cache
from cudnn_sdpa.plans.file_format import BadPlanFileError

TARGET = replace(Target.from_properties(load_properties("h200")), cudnn=91900)


class FakePlan:
    """A plan that knows its key."""

    def __init__(self, key, loaded=False):
        self.key, self.loaded, self.held = key, loaded, False
        self.build_seconds, self.last_used, self.added_at = 0.0, 0, 0


class FakeCall:
    """A prepared call of a plan."""

    def __init__(self, plan):
        self.plan, self.last = plan, None


class FakeBucketCall(FakeCall):
    """A prepared call of a bucket plan."""

    is_captured = False
    table_bytes = 100

    def __init__(self, bucket, plan, scale, successor):
        super().__init__(plan)
        self.bucket, self.scale, self.successor = bucket, scale, successor


class FakeBackground:
    """Accepts requests; the test decides when they are done."""

    def __init__(self):
        self.requests = []

    def request(self, key, properties, then):
        request = tiers.Request(key, properties, then)
        self.requests.append(request)
        return request


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(tiers, "live_target", lambda _: TARGET)
    monkeypatch.setattr(tiers, "live_properties", lambda _: {})
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tiers, "build_plan", lambda _, key: FakePlan(key))
    monkeypatch.setattr(tiers, "plan_of", lambda key, _: FakePlan(key, loaded=True))
    monkeypatch.setattr(tiers, "bind", lambda _, plan, *__: FakeCall(plan))
    monkeypatch.setattr(tiers, "BucketCall", FakeBucketCall)
    monkeypatch.setattr(cache, "load_plan", lambda _: None)
    plan_cache.clear()
    tiers.recurring_shapes.clear()
    yield
    plan_cache.clear()
    tiers.recurring_shapes.clear()


@pytest.fixture
def background(monkeypatch):
    fake = FakeBackground()
    monkeypatch.setattr(tiers, "background", fake)
    return fake


def serve(rows, **options):
    """The prepared call that serves a causal prefill of this length."""
    q, k = (torch.empty(1, rows, heads, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2) for heads in (4, 2))
    call = ForwardArguments(q, k, k, is_causal=True, **options)
    signature = ("test", rows, *options)
    prepared = tiers.prepare(ForwardSpec.of(call), call, signature)
    assert launch.calls.get(signature) is prepared
    return prepared


def kinds(rows):
    return ["bucket" if isinstance(serve(n), FakeBucketCall) else "exact" for n in rows]


def test_exact_gives_every_shape_its_own_plan():
    with shape_policy("exact"):
        assert kinds(range(100, 110)) == ["exact"] * 10
    assert plan_cache.info().builds == 10


def test_bucketed_builds_one_plan():
    with shape_policy("bucketed"):
        assert kinds(range(100, 110)) == ["bucket"] * 10
        assert serve(100).successor is None
    assert plan_cache.info().builds == 1


def test_tiered_begins_with_exact_shape_plans():
    with shape_policy("tiered"):
        assert kinds([100, 110, 120, 130, 140, 100]) == ["exact", "exact", "exact", "bucket", "bucket", "exact"]
    assert plan_cache.info().builds == 4


def test_shapes_are_counted_per_bucket():
    with shape_policy("tiered"):
        assert kinds([100, 110, 120, 2000, 2100, 2200, 130, 2300]) == ["exact"] * 6 + ["bucket"] * 2


def test_a_shape_whose_plan_was_evicted_is_counted_once():
    with shape_policy("tiered"):
        for _ in range(5):
            assert kinds([100, 110]) == ["exact", "exact"]
            plan_cache.resize(1)
            plan_cache.resize(512)


def test_a_cached_bucket_plan_serves_the_first_shape():
    with shape_policy("bucketed"):
        serve(100)
    with shape_policy("tiered"):
        assert kinds([200]) == ["bucket"]
        assert serve(200).successor is not None


def test_plans_are_loaded_before_any_is_built(monkeypatch):
    with shape_policy("bucketed"):
        bucket = serve(100).plan.key
    with shape_policy("exact"):
        own = serve(200).plan.key
    plan_cache.clear()
    stored = {bucket, own}
    monkeypatch.setattr(cache, "load_plan", lambda key: FakePlan(key, loaded=True) if key in stored else None)
    with shape_policy("tiered"):
        assert kinds([200, 300]) == ["exact", "bucket"]
    assert (plan_cache.info().loads, plan_cache.info().builds) == (2, 0)


def test_autotune_gives_every_shape_its_own_plan():
    with shape_policy("bucketed"), autotune():
        assert kinds([100, 200]) == ["exact"] * 2


def test_shapes_outside_all_buckets_are_exact():
    with shape_policy("bucketed"):
        for rows in (100, 200):
            assert type(serve(rows, with_lse=True)) is FakeCall
    assert plan_cache.info().builds == 2


def test_an_unsupported_bucket_plan_is_requested_once(monkeypatch):
    asked = []

    def build(_, key):
        if any(operand.ragged for operand in key.inputs):
            asked.append(key)
            raise UnsupportedError(key.name, ["no engine"])
        return FakePlan(key)

    monkeypatch.setattr(tiers, "build_plan", build)
    with shape_policy("bucketed"):
        assert kinds([100, 200, 300]) == ["exact"] * 3
    assert len(asked) == 1


def test_unsupported_shapes_are_refused_under_every_policy(monkeypatch):
    def refuse(*_):
        raise UnsupportedError("sdpa", ["not here"])

    monkeypatch.setattr(ForwardSpec, "key", refuse)
    for policy in ("exact", "bucketed", "tiered"):
        with shape_policy(policy), pytest.raises(UnsupportedError, match="not here"):
            serve(100)


def test_under_determinism_plans_are_exact():
    torch.use_deterministic_algorithms(True)
    try:
        for policy in ("bucketed", "tiered"):
            with shape_policy(policy):
                assert kinds([100, 200]) == ["exact", "exact"]
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_policy_change_drops_bucket_calls_only():
    with shape_policy("tiered"):
        kinds([100, 110, 120, 130])
        assert len(launch.calls) == 4
    with shape_policy("exact"):
        assert len(launch.calls) == 3


def test_calls_made_in_a_capture_are_not_cached(monkeypatch):
    monkeypatch.setattr(FakeBucketCall, "is_captured", True)
    with shape_policy("bucketed"), pytest.raises(AssertionError):
        serve(100)  # it is not in the table
    assert len(launch.calls) == 0


def test_the_memory_of_tables_is_limited(monkeypatch):
    monkeypatch.setattr(tiers, "MAX_TABLE_BYTES", 300)
    with shape_policy("bucketed"):
        for rows, held in ((100, 1), (110, 2), (120, 3), (130, 1), (140, 2)):
            serve(rows)
            assert len(launch.calls) == held


class Clock:
    """A fake clock."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(tiers, "time", clock)
    return clock


@pytest.fixture
def call(clock):  # noqa: ARG001
    """A call that a bucket serves."""
    with shape_policy("bucketed"):
        serve(100)
    with shape_policy("tiered"):
        yield serve(200)


def use(call, clock, times=1, seconds=1.0):
    """What each use finds; the clock advances before each."""
    found = []
    for _ in range(times):
        clock.now += seconds
        found.append(call.successor.find())
    return found


def test_the_third_use_requests_a_plan(call, clock, background):
    for count in (0, 0, 1, 1, 1):
        assert use(call, clock) == [None]
        assert len(background.requests) == count
    assert background.requests[0].key == call.successor._usage._key


def test_consecutive_layers_count_as_one_use(call, clock, background):
    use(call, clock, 60, seconds=1e-3)
    assert background.requests == []


def test_a_shape_in_constant_use_counts_as_recurring(call, clock, background):
    use(call, clock, 1000, seconds=1e-3)
    assert len(background.requests) == 1


def test_a_single_query_needs_more_uses(clock, background):
    def decode(rows):
        q, k = (torch.empty(1, n, 4, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2) for n in (1, rows))
        call = ForwardArguments(q, k, k)
        return tiers.prepare(ForwardSpec.of(call), call, ("decode", rows))

    with shape_policy("bucketed"):
        decode(100)
    with shape_policy("tiered"):
        step = decode(200)
        use(step, clock, 9)
        assert background.requests == []
        use(step, clock)
        assert len(background.requests) == 1


def test_calls_of_one_shape_count_together_and_across_policy_changes(call, clock, background):
    use(call, clock)
    with shape_policy("exact"):
        pass
    again = serve(200)
    assert again is not call
    use(again, clock, 2)
    assert len(background.requests) == 1


def test_no_plan_builds_forbids_background_builds(call, clock, background):
    with no_plan_builds():
        use(call, clock, 5)
    assert background.requests == []
    use(call, clock)
    assert len(background.requests) == 1


def test_a_request_that_is_not_accepted_is_repeated_later(call, clock, background, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(background, "request", lambda *_: None)
        use(call, clock, 5)
    use(call, clock)
    assert len(background.requests) == 1


def done(call, clock, background, stored="a stored plan"):
    use(call, clock, 3)
    request = background.requests[-1]
    if stored is not None:
        request.then(stored)
    request.is_done = True


def test_the_exact_shape_plan_takes_over_at_the_next_call(call, clock, background):
    done(call, clock, background)
    (own,) = use(call, clock, seconds=0.0)
    assert own.plan.key == background.requests[0].key
    assert own.plan.held
    assert launch.calls.get(("test", 200)) is own
    assert use(call, clock) != [None]  # a thread that still holds the old call gets the plan too
    assert plan_cache.info().loads == 1


def test_a_plan_built_elsewhere_takes_over(call, clock, background):
    plan_cache.put(FakePlan(call.successor._usage._key, loaded=True))
    with no_plan_builds():
        (own,) = use(call, clock)
    assert own.plan.held
    assert background.requests == []


def test_plans_do_not_change_in_a_capture_or_under_determinism(call, clock, background, monkeypatch):
    done(call, clock, background)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert use(call, clock) == [None]
    torch.use_deterministic_algorithms(True)
    try:
        assert use(call, clock) == [None]
    finally:
        torch.use_deterministic_algorithms(False)
    assert launch.calls.get(("test", 200)) is call
    assert use(call, clock) != [None]


@pytest.mark.parametrize("fault", ["not built", "not loaded"])
def test_a_failed_request_is_repeated_much_later(call, clock, background, monkeypatch, caplog, fault):
    def refuse(*_):
        raise BadPlanFileError("cuDNN does not take it")

    monkeypatch.setattr(tiers, "plan_of", refuse)
    done(call, clock, background, None if fault == "not built" else "damaged")
    assert use(call, clock, 24) == [None] * 24
    assert len(background.requests) == 1
    assert caplog.text.count("cannot be used") == (fault == "not loaded")
    assert launch.calls.get(("test", 200)) is call
    use(call, clock)
    assert len(background.requests) == 2


def test_the_number_of_tracked_shapes_is_limited(monkeypatch):
    monkeypatch.setattr(tiers, "MAX_SHAPES", 3)
    with shape_policy("bucketed"):
        serve(100)
    with shape_policy("tiered"):
        kinds(range(101, 120))
    assert len(tiers.recurring_shapes._by_key) == 3


def test_deterministic_calls_have_exact_shape_plans():
    with shape_policy("tiered"):
        kinds([100, 110, 120, 130])
        assert type(serve(140, deterministic=True)) is FakeCall


def test_a_policy_change_during_a_call_leaves_no_bucket_call(monkeypatch):
    real = FakeBucketCall.__init__

    def change(self, *arguments):
        real(self, *arguments)
        monkeypatch.setattr(FakeBucketCall, "__init__", real)
        shape_policy("exact")

    with shape_policy("bucketed"):
        serve(100)
        monkeypatch.setattr(FakeBucketCall, "__init__", change)
        q = torch.empty(1, 200, 4, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        call = ForwardArguments(q, q[:, :2], q[:, :2], is_causal=True)
        assert isinstance(tiers.prepare(ForwardSpec.of(call), call, "late"), FakeBucketCall)
        assert launch.calls.get("late") is None
