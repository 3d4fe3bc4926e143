"""Which plan serves a call of a new shape, and which one takes over: public calls on a fake GPU."""

from __future__ import annotations

import flash4_stand_in as stand_in
import pytest
import torch
from fake_gpu import FakePlan, gpu_on_the_cpu
from float64_reference import attend

from cudnn_sdpa import UnsupportedError, autotune, no_plan_builds, plan_cache, providers, sdpa, shape_policy
from cudnn_sdpa.attention.arguments import from_fields
from cudnn_sdpa.attention.dense import forward
from cudnn_sdpa.attention.dense.call import SdpaCall
from cudnn_sdpa.attention.dense.forward import Bucket, BucketRun
from cudnn_sdpa.attention.dense.sdpa import SDPA
from cudnn_sdpa.attention.dense.specs import ForwardSpec
from cudnn_sdpa.attention.flash4 import plans as flash4
from cudnn_sdpa.errors import PlanBuildError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.known_issues import KnownIssue
from cudnn_sdpa.offline import background as background_plans
from cudnn_sdpa.plans import cache
from cudnn_sdpa.plans.store import BadPlanFileError


class Tables:
    """The tables of a bucket in CPU memory."""

    size = 100

    def __init__(self, tensors, *_, captured=False):
        self.tensors = {name: x.contiguous() for name, x in tensors.items()}
        self.addresses = {name: x.data_ptr() for name, x in self.tensors.items()}

    def prepare(self, stream):
        """They are ready at once."""


def loaded(key):
    plan = FakePlan(key)
    plan.loaded = True
    return plan


@pytest.fixture(autouse=True)
def patch():
    """Runs calls on a fake GPU without plans and without counted shapes; undone before that GPU goes."""
    tables = Bucket.tables
    with gpu_on_the_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "tables", lambda bucket, _: tables(bucket, "cpu"))
        patch.setattr(forward, "DeviceTables", Tables)
        patch.setattr(background_plans, "live_properties", lambda _: {})
        patch.setattr(background_plans, "plan_of", lambda key, _: loaded(key))
        forward.usages.clear()
        yield patch
        forward.usages.clear()


def inputs(rows, queries=None):
    sizes = ((rows if queries is None else queries, 4), (rows, 2), (rows, 2))
    return [torch.randn(1, n, heads, 16).to(torch.bfloat16).transpose(1, 2) for n, heads in sizes]


def serve(rows, queries=None, **options):
    """A call of this length, causal if there are as many queries: whether a bucket's plan served it. It is right."""
    tensors, options = inputs(rows, queries), {"is_causal": queries is None, **options}
    out = sdpa(*tensors, **options)
    if options.get("return_lse"):
        out = out[0]
    of_formula = {name: value for name, value in options.items() if name in ("is_causal", "window_size", "scale")}
    torch.testing.assert_close(out.double(), attend(*tensors, **of_formula)[0], rtol=2e-2, atol=2e-2)
    return "bucket" if any(operand.ragged for operand in FakePlan.launched[-1].inputs) else "exact"


def kinds(rows, **options):
    return [serve(n, **options) for n in rows]


def known(rows, **options):
    """Whether calls of this length are known."""
    return SDPA.table.get(SDPA.signature(from_fields(SdpaCall, *inputs(rows), is_causal=True, **options))) is not None


def test_exact_gives_every_shape_its_own_plan():
    with shape_policy("exact"):
        assert kinds(range(10, 20)) == ["exact"] * 10
    assert plan_cache.info().builds == 10


def test_bucketed_builds_one_plan():
    with shape_policy("bucketed"):
        assert kinds(range(10, 20)) == ["bucket"] * 10
    assert plan_cache.info().builds == 1


def test_tiered_begins_with_exact_shape_plans():
    with shape_policy("tiered"):
        assert kinds([10, 11, 12, 13, 14, 10]) == ["exact", "exact", "exact", "bucket", "bucket", "exact"]
    assert plan_cache.info().builds == 4


def test_shapes_are_counted_per_bucket():
    with shape_policy("tiered"):
        assert kinds([10, 11, 12]) == kinds([10, 11, 12], window_size=(3, -1)) == ["exact"] * 3
        assert kinds([13]) == kinds([13], window_size=(3, -1)) == ["bucket"]
    assert plan_cache.info().builds == 8


def test_a_shape_whose_plan_was_evicted_is_counted_once():
    with shape_policy("tiered"):
        for _ in range(3):
            assert kinds([10, 11, 12]) == ["exact"] * 3
            plan_cache.resize(1)
            plan_cache.resize(512)


def test_clearing_the_plan_cache_forgets_the_shapes():
    with shape_policy("tiered"):
        assert kinds([10, 11, 12, 13])[-1] == "bucket"
        plan_cache.clear()
        assert kinds([14, 15, 16, 17]) == ["exact", "exact", "exact", "bucket"]


def test_a_cached_bucket_plan_serves_the_first_shape():
    with shape_policy("bucketed"):
        serve(10)
    with shape_policy("tiered"):
        assert kinds([20]) == ["bucket"]
    assert plan_cache.info().builds == 1


def test_a_cached_exact_shape_plan_comes_before_the_buckets():
    with shape_policy("exact"):
        serve(20)
    with shape_policy("bucketed"):
        assert serve(10) == "bucket"
        assert serve(20, scale=0.3) == "exact"
        assert serve(30, scale=0.3) == "bucket"
    assert plan_cache.info().builds == 2


def test_plans_are_loaded_before_any_is_built(patch):
    with shape_policy("bucketed"):
        serve(10)
    with shape_policy("exact"):
        serve(20)
    stored = {plan.key for plan in plan_cache.plans()}
    assert len(stored) == 2
    plan_cache.clear()
    patch.setattr(cache, "load_plan", lambda key: loaded(key) if key in stored else None)
    with shape_policy("tiered"):
        assert kinds([20, 30]) == ["exact", "bucket"]
    assert (plan_cache.info().loads, plan_cache.info().builds) == (2, 0)


def test_autotune_gives_every_shape_its_own_plan():
    with shape_policy("bucketed"), autotune():
        assert kinds([10, 20]) == ["exact"] * 2


@pytest.mark.parametrize("options", [{"return_lse": True}, {"scale": -0.3}, {"scale": 0.0}], ids=str)
def test_calls_outside_all_buckets_are_exact(options):
    with shape_policy("bucketed"):
        assert kinds([10, 20], **options) == ["exact"] * 2
        assert SDPA.runs(BucketRun) == []
    assert plan_cache.info().builds == 2


def test_an_unsupported_bucket_plan_is_requested_once(patch):
    build, asked = forward.build_plan, []

    def refuse_buckets(operation, key):
        if any(operand.ragged for operand in key.inputs):
            asked.append(key)
            raise UnsupportedError(key.name, ["no engine"])
        return build(operation, key)

    patch.setattr(forward, "build_plan", refuse_buckets)
    with shape_policy("bucketed"):
        assert kinds([10, 20, 30]) == ["exact"] * 3
    assert len(asked) == 1


def test_unsupported_shapes_are_refused_under_every_policy(patch):
    def refuse(*_):
        raise UnsupportedError("sdpa", ["not here"])

    patch.setattr(ForwardSpec, "key", refuse)
    for policy in ("exact", "bucketed", "tiered"):
        with shape_policy(policy), pytest.raises(UnsupportedError, match="not here"):
            serve(10)
    assert len(SDPA.table) == 0


def test_under_determinism_plans_are_exact(deterministic_algorithms):
    """Also those of calls that decline it, and of shapes that a bucket's plan has served."""
    for policy in ("bucketed", "tiered"):
        with shape_policy("bucketed"):
            serve(20)
        with shape_policy(policy):
            assert serve(20) == "bucket"
            with deterministic_algorithms():
                assert kinds([10, 20]) == ["exact", "exact"]
                assert serve(30, deterministic=False) == "exact"
        plan_cache.clear()


@pytest.mark.parametrize("policy", ["bucketed", "tiered"])
def test_deterministic_calls_have_exact_shape_plans(policy):
    with shape_policy(policy):
        assert kinds([10, 11, 12, 13])[-1] == "bucket"
        assert kinds([13, 14], deterministic=True) == ["exact", "exact"]


def test_a_policy_change_drops_bucket_calls_only():
    with shape_policy("tiered"):
        kinds([10, 11, 12, 13])
        assert (len(SDPA.table), len(SDPA.runs(BucketRun))) == (4, 1)
    with shape_policy("exact"):
        assert (len(SDPA.table), SDPA.runs(BucketRun)) == (3, [])
        assert kinds([10, 13]) == ["exact", "exact"]


def test_a_policy_change_during_a_call_leaves_no_bucket_call(patch):
    class Late(Tables):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            shape_policy("exact")

    with shape_policy("bucketed"):
        serve(10)
        patch.setattr(forward, "DeviceTables", Late)
        assert serve(20) == "bucket"
        assert not known(20)
        assert SDPA.runs(BucketRun) == []
        assert serve(20) == "exact"


@pytest.mark.parametrize("policy", ["bucketed", "tiered"])
def test_another_providers_plans_are_exact_and_what_it_declines_follows_the_policy(policy, monkeypatch):
    bug = KnownIssue(
        bug="it skips a tile",
        source="seen on an H200",
        treatment="refused",
        concerns=lambda key: key.inputs[0].layout.shape[2] > 15,  # rows of q
        provider="own",
    )
    monkeypatch.setattr(known_issues, "ATTENTION_ISSUES", (*known_issues.ATTENTION_ISSUES, bug))
    with shape_policy(policy), providers("own", "cudnn"):
        assert kinds(range(10, 16)) == ["exact"] * 6
        assert {key.provider for key in FakePlan.launched[-6:]} == {"own"}
        assert kinds(range(16, 22)) == ["exact"] * 3 * (policy == "tiered") + ["bucket"] * (
            6 - 3 * (policy == "tiered")
        )
        assert {key.provider for key in FakePlan.launched[-6:]} == {None}


@pytest.mark.parametrize("policy", ["bucketed", "tiered"])
def test_the_plan_of_a_bucket_serves_while_flash4_compiles(policy, patch, tmp_path):
    """Also where none may be built; FlashAttention-4, whose plans are exact, takes over."""
    stand_in.write(tmp_path)
    patch.setattr(flash4, "DIMS", ((16, 16),))
    asked = []
    patch.setattr(flash4.functions, "compile_in_background", asked.append)
    with stand_in.on_the_search_path(tmp_path), providers("fa4", "cudnn"):
        with shape_policy("bucketed"):
            assert serve(10) == "bucket"
        assert len(asked) == 1
        with no_plan_builds(), shape_policy(policy):
            assert kinds([20, 30, 20]) == ["bucket"] * 3
            with shape_policy("exact"), pytest.raises(PlanBuildError):
                serve(20)
        assert len(asked) == 1
        assert {key.provider for key in FakePlan.launched[-4:]} == {None}
        patch.setattr(flash4.functions, "are_ready", lambda _: True)
        patch.setattr("fake_gpu.evaluate", lambda _, __, x: attend(*(x[n] for n in "qkv"), is_causal=True)[:1])
        plan_cache.forget_calls()
        with shape_policy(policy):
            assert kinds([20, 30]) == ["exact"] * 2
        assert {key.provider for key in FakePlan.launched[-2:]} == {"fa4"}


def test_calls_made_in_a_capture_are_not_remembered():
    with shape_policy("bucketed"):
        serve(10)
        with pytest.MonkeyPatch.context() as capture:
            capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert kinds([20, 20]) == ["bucket", "bucket"]
            assert not known(20)
            assert serve(10) == "bucket"  # with tables from outside the graph
        assert serve(20) == "bucket"
        assert known(20)


def test_the_memory_of_tables_is_limited(patch):
    patch.setattr(forward, "MAX_TABLE_BYTES", 3 * Tables.size)
    with shape_policy("bucketed"):
        for rows, held in ((10, 1), (11, 2), (12, 3), (13, 1), (14, 2)):
            assert serve(rows) == "bucket"
            assert len(SDPA.runs(BucketRun)) == held
        assert kinds([10, 13]) == ["bucket"] * 2


def test_the_number_of_tracked_buckets_is_limited(patch):
    patch.setattr(forward, "MAX_SHAPES", 4)
    with shape_policy("tiered"):
        for left in range(3, 7):
            assert serve(10, window_size=(left, -1)) == "exact"
            assert len(forward.usages) <= 4


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(patch):
    clock = Clock()
    patch.setattr(forward, "time", clock)
    return clock


class FakeBackground:
    """Accepts requests; the test decides when they are done."""

    def __init__(self):
        self.requests = []

    def request(self, key, properties, then):
        request = background_plans.Request(key, properties, then)
        self.requests.append(request)
        return request


@pytest.fixture
def background(patch):
    fake = FakeBackground()
    patch.setattr(background_plans, "background", fake)
    return fake


@pytest.fixture
def tiered(background, clock):  # noqa: ARG001 - nothing may reach the real ones
    """Plans of the buckets of prefills and of single queries are cached."""
    with shape_policy("bucketed"):
        serve(10)
        serve(10, queries=1)
    with shape_policy("tiered"):
        yield


def use(clock, times=1, seconds=1.0, **options):
    """What serves each use of one shape, which a bucket's plan serves at first; the clock advances before each."""
    found = []
    for _ in range(times):
        clock.now += seconds
        found.append(serve(20, **options))
    return found


@pytest.mark.usefixtures("tiered")
def test_the_third_use_requests_a_plan(clock, background):
    for count in (0, 0, 1, 1, 1):
        assert use(clock) == ["bucket"]
        assert len(background.requests) == count
    with shape_policy("exact"):
        assert use(clock) == ["exact"]
    assert background.requests[0].key == FakePlan.launched[-1]


@pytest.mark.usefixtures("tiered")
def test_consecutive_layers_count_as_one_use(clock, background):
    assert use(clock, 30, seconds=1e-3) == ["bucket"] * 30
    assert background.requests == []


@pytest.mark.usefixtures("tiered")
def test_a_shape_in_constant_use_counts_as_recurring(clock, background):
    use(clock, 40, seconds=0.02)
    assert len(background.requests) == 1


@pytest.mark.usefixtures("tiered")
def test_a_single_query_needs_more_uses(clock, background):
    assert use(clock, 9, queries=1) == ["bucket"] * 9
    assert background.requests == []
    use(clock, queries=1)
    assert len(background.requests) == 1


@pytest.mark.usefixtures("background")
def test_under_bucketed_no_plan_is_requested(clock, background):
    with shape_policy("bucketed"):
        assert use(clock, 20) == ["bucket"] * 20
    assert background.requests == []


@pytest.mark.usefixtures("tiered")
def test_calls_of_one_shape_count_together_and_across_policy_changes(clock, background):
    use(clock)
    with shape_policy("exact"):
        pass
    out = torch.empty_like(inputs(20)[0])
    assert use(clock, out=out) == ["bucket"]
    assert background.requests == []
    use(clock, scale=0.3)
    assert len(background.requests) == 1
    take(background.requests[0])
    for options in ({"out": out}, {"scale": 0.3}, {}):
        assert use(clock, 2, **options) == ["exact", "exact"]
    assert (plan_cache.info().loads, SDPA.runs(BucketRun)) == (1, [])


@pytest.mark.usefixtures("tiered")
def test_no_plan_builds_forbids_background_builds(clock, background):
    with no_plan_builds():
        use(clock, 5)
    assert background.requests == []
    use(clock)
    assert len(background.requests) == 1


@pytest.mark.usefixtures("tiered")
def test_a_request_that_is_not_accepted_is_repeated_later(clock, background):
    with pytest.MonkeyPatch.context() as full:
        full.setattr(background, "request", lambda *_: None)
        use(clock, 5)
    use(clock)
    assert len(background.requests) == 1


def take(request, stored="a stored plan"):
    """Ends a request; with a plan, unless that is None."""
    if stored is not None:
        request.then(stored)
    request.is_done = True


def done(clock, background, stored="a stored plan"):
    assert use(clock, 3) == ["bucket"] * 3
    take(background.requests[-1], stored)


@pytest.mark.usefixtures("tiered")
def test_the_exact_shape_plan_takes_over_at_the_next_call(clock, background):
    done(clock, background)
    (old,) = SDPA.runs(BucketRun)
    assert use(clock, seconds=0.0) == ["exact"]
    assert FakePlan.launched[-1] == background.requests[0].key
    assert plan_cache.peek(FakePlan.launched[-1]) is not None
    assert (known(20), SDPA.runs(BucketRun)) == (True, [])
    assert use(clock, 3, seconds=0.0) == ["exact"] * 3
    clock.now += 1
    old(from_fields(SdpaCall, *inputs(20), is_causal=True))  # of a thread that still holds it
    assert FakePlan.launched[-1] == background.requests[0].key
    assert plan_cache.info().loads == 1


@pytest.mark.usefixtures("tiered")
def test_a_plan_built_elsewhere_takes_over(clock, background):
    assert use(clock) == ["bucket"]
    assert serve(20, deterministic=True) == "exact"  # builds it
    with no_plan_builds():
        assert use(clock, 2) == ["exact", "exact"]
    assert SDPA.runs(BucketRun) == []
    assert background.requests == []


@pytest.mark.usefixtures("tiered")
def test_plans_do_not_change_in_a_capture(clock, background):
    done(clock, background)
    with pytest.MonkeyPatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert use(clock, 2) == ["bucket", "bucket"]
    assert use(clock) == ["exact"]


@pytest.mark.usefixtures("tiered")
def test_plans_do_not_change_under_determinism(clock, background, deterministic_algorithms):
    """Those of calls that decline it; others have exact-shape plans."""
    done(clock, background)
    with deterministic_algorithms():
        assert use(clock, 2, deterministic=False) == ["bucket", "bucket"]
        assert use(clock) == ["exact"]
    assert len(SDPA.runs(BucketRun)) == 1
    assert use(clock) == ["exact"]
    assert SDPA.runs(BucketRun) == []


@pytest.mark.usefixtures("tiered")
@pytest.mark.parametrize("fault", ["not built", "not loaded"])
def test_a_failed_request_is_repeated_much_later(clock, background, patch, caplog, fault):
    def refuse(*_):
        raise BadPlanFileError("cuDNN does not take it")

    patch.setattr(background_plans, "plan_of", refuse)
    done(clock, background, None if fault == "not built" else "damaged")
    assert use(clock, 24) == ["bucket"] * 24
    assert len(background.requests) == 1
    assert caplog.text.count("cannot be used") == (fault == "not loaded")
    assert use(clock) == ["bucket"]
    assert len(background.requests) == 2


@pytest.mark.usefixtures("tiered")
def test_the_number_of_tracked_shapes_is_limited(patch):
    patch.setattr(forward, "MAX_SHAPES", 3)
    assert kinds(range(30, 40)) == ["bucket"] * 10
    assert len(forward.usages) <= 3
