"""Which plan serves a new shape, and who takes over: the decisions, with plans that are not real."""

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
    """A plan that says of which key it is."""

    def __init__(self, key, loaded=False):
        self.key, self.loaded, self.held = key, loaded, False
        self.build_seconds, self.last_used, self.place = 0.0, 0, 0


class FakeCall:
    """A prepared call of a plan."""

    def __init__(self, plan):
        self.plan, self.last = plan, None


class FakeBucketCall(FakeCall):
    """One of a bucket's plan."""

    is_captured = False
    table_bytes = 100

    def __init__(self, bucket, plan, scale, successor):
        super().__init__(plan)
        self.bucket, self.scale, self.successor = bucket, scale, successor


class FakeBackground:
    """Takes requests; the test says when they are done."""

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
    """What serves a causal prefill of this length: the prepared call."""
    q, k = (torch.empty(1, rows, heads, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2) for heads in (4, 2))
    call = ForwardArguments(q, k, k, is_causal=True, **options)
    signature = ("test", rows, *options)
    prepared = tiers.prepare(ForwardSpec.of(call), call, signature)
    assert launch.calls.get(signature) is prepared
    return prepared


def kinds(rows):
    return ["bucket" if isinstance(serve(n), FakeBucketCall) else "own" for n in rows]


def test_exact_gives_every_shape_its_own_plan():
    with shape_policy("exact"):
        assert kinds(range(100, 110)) == ["own"] * 10
    assert plan_cache.info().builds == 10


def test_bucketed_builds_one_plan():
    with shape_policy("bucketed"):
        assert kinds(range(100, 110)) == ["bucket"] * 10
        assert serve(100).successor is None
    assert plan_cache.info().builds == 1


def test_tiered_begins_with_plans_of_their_own():
    with shape_policy("tiered"):
        assert kinds([100, 110, 120, 130, 140, 100]) == ["own", "own", "own", "bucket", "bucket", "own"]
    assert plan_cache.info().builds == 4


def test_shapes_of_another_bucket_are_counted_for_themselves():
    with shape_policy("tiered"):
        assert kinds([100, 110, 120, 2000, 2100, 2200, 130, 2300]) == ["own"] * 6 + ["bucket"] * 2


def test_a_shape_that_lost_its_plan_does_not_count_again():
    with shape_policy("tiered"):
        for _ in range(5):
            assert kinds([100, 110]) == ["own", "own"]
            plan_cache.resize(1)
            plan_cache.resize(512)


def test_a_buckets_plan_that_is_there_serves_the_first_shape():
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
        assert kinds([200, 300]) == ["own", "bucket"]
    assert (plan_cache.info().loads, plan_cache.info().builds) == (2, 0)


def test_while_plans_are_tuned_every_shape_has_its_own():
    with shape_policy("bucketed"), autotune():
        assert kinds([100, 200]) == ["own"] * 2


def test_what_fits_no_bucket_is_exact():
    with shape_policy("bucketed"):
        for rows in (100, 200):
            assert type(serve(rows, with_lse=True)) is FakeCall
    assert plan_cache.info().builds == 2


def test_a_bucket_without_a_plan_is_asked_for_once(monkeypatch):
    asked = []

    def build(_, key):
        if any(operand.ragged for operand in key.inputs):
            asked.append(key)
            raise UnsupportedError(key.name, ["no engine"])
        return FakePlan(key)

    monkeypatch.setattr(tiers, "build_plan", build)
    with shape_policy("bucketed"):
        assert kinds([100, 200, 300]) == ["own"] * 3
    assert len(asked) == 1


def test_what_has_no_plan_of_its_own_is_refused_under_every_policy(monkeypatch):
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
                assert kinds([100, 200]) == ["own", "own"]
    finally:
        torch.use_deterministic_algorithms(False)


def test_another_policy_forgets_calls_of_buckets_alone():
    with shape_policy("tiered"):
        kinds([100, 110, 120, 130])
        assert len(launch.calls) == 4
    with shape_policy("exact"):
        assert len(launch.calls) == 3


def test_what_is_made_in_a_graph_is_not_remembered(monkeypatch):
    monkeypatch.setattr(FakeBucketCall, "is_captured", True)
    with shape_policy("bucketed"), pytest.raises(AssertionError):
        serve(100)  # it looks for it
    assert len(launch.calls) == 0


def test_tables_take_no_more_than_their_share(monkeypatch):
    monkeypatch.setattr(tiers, "MAX_TABLE_BYTES", 300)
    with shape_policy("bucketed"):
        for rows, held in ((100, 1), (110, 2), (120, 3), (130, 1), (140, 2)):
            serve(rows)
            assert len(launch.calls) == held


class Clock:
    """Stands for the time."""

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
    """What each use finds, the clock running on before it."""
    found = []
    for _ in range(times):
        clock.now += seconds
        found.append(call.successor.find())
    return found


def test_the_third_use_asks_for_a_plan(call, clock, background):
    for count in (0, 0, 1, 1, 1):
        assert use(call, clock) == [None]
        assert len(background.requests) == count
    assert background.requests[0].key == call.successor._usage._key


def test_layers_that_follow_each_other_are_one_use(call, clock, background):
    use(call, clock, 60, seconds=1e-3)
    assert background.requests == []


def test_a_shape_that_is_used_all_the_time_comes_back(call, clock, background):
    use(call, clock, 1000, seconds=1e-3)
    assert len(background.requests) == 1


def test_a_single_query_has_to_come_back_more_often(clock, background):
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


def test_calls_of_one_shape_count_together_and_over_a_change_of_the_policy(call, clock, background):
    use(call, clock)
    with shape_policy("exact"):
        pass
    again = serve(200)
    assert again is not call
    use(again, clock, 2)
    assert len(background.requests) == 1


def test_no_plan_builds_holds_for_the_background(call, clock, background):
    with no_plan_builds():
        use(call, clock, 5)
    assert background.requests == []
    use(call, clock)
    assert len(background.requests) == 1


def test_what_is_not_taken_is_asked_for_later(call, clock, background, monkeypatch):
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


def test_the_own_plan_takes_over_at_the_next_call(call, clock, background):
    done(call, clock, background)
    (own,) = use(call, clock, seconds=0.0)
    assert own.plan.key == background.requests[0].key
    assert own.plan.held
    assert launch.calls.get(("test", 200)) is own
    assert use(call, clock) != [None]  # a thread that still has the old call gets the plan too
    assert plan_cache.info().loads == 1


def test_a_plan_that_is_there_for_another_reason_takes_over(call, clock, background):
    plan_cache.put(FakePlan(call.successor._usage._key, loaded=True))
    with no_plan_builds():
        (own,) = use(call, clock)
    assert own.plan.held
    assert background.requests == []


def test_nobody_takes_over_in_a_capture_or_under_determinism(call, clock, background, monkeypatch):
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
def test_a_plan_that_does_not_come_is_tried_again_much_later(call, clock, background, monkeypatch, caplog, fault):
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


def test_the_uses_of_so_many_shapes_are_counted(monkeypatch):
    monkeypatch.setattr(tiers, "MAX_SHAPES", 3)
    with shape_policy("bucketed"):
        serve(100)
    with shape_policy("tiered"):
        kinds(range(101, 120))
    assert len(tiers.recurring_shapes._by_key) == 3


def test_a_call_that_must_not_change_has_its_own_plan():
    with shape_policy("tiered"):
        kinds([100, 110, 120, 130])
        assert type(serve(140, deterministic=True)) is FakeCall


def test_a_policy_that_changes_meanwhile_leaves_no_call_of_a_bucket(monkeypatch):
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
