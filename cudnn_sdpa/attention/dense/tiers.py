"""Which plan serves a call of a new shape, how often shapes recur, and how a plan for the exact shape takes over."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

import torch

from cudnn_sdpa.attention.arguments import ForwardArguments, sign_of_scale, warn_of_order, with_positive_scale
from cudnn_sdpa.attention.dense import graphs, parts, plans, reference
from cudnn_sdpa.attention.dense.buckets import Bucket, BucketRun
from cudnn_sdpa.attention.dense.launch import Run, bind
from cudnn_sdpa.attention.dense.plans import ForwardSpec
from cudnn_sdpa.attention.reference import fill_without_keys
from cudnn_sdpa.engine.call import Result
from cudnn_sdpa.engine.launch import Prepared
from cudnn_sdpa.engine.memory import check_address, multiplied
from cudnn_sdpa.engine.operation import OPERATIONS
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import live_properties, live_target
from cudnn_sdpa.offline.background import Request, background
from cudnn_sdpa.plans import autotune, default_store, shape_policy
from cudnn_sdpa.plans.build import build_plan, plan_of
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.device_memory import relaxed_capture
from cudnn_sdpa.plans.file_format import BadPlanFileError, StoredPlan
from cudnn_sdpa.plans.plan import Plan

_log = logging.getLogger("cudnn_sdpa")

#: Calls within this many seconds count as one use, such as those of a model's layers or of a benchmark's loop.
SECONDS_PER_USE = 0.25

#: Number of uses after which a shape gets an exact-shape plan; a prompt length that does not recur is not worth one.
USES_BEFORE_EXACT_SHAPE_PLAN = 3

#: The same for single queries, whose key lengths recur in every generation as a cache grows.
USES_BEFORE_DECODE_PLAN = 10

#: Factor on the number of uses after a failed build.
RETRY_FACTOR = 8

#: Maximum number of shapes tracked.
MAX_SHAPES = 4096


class ShapeUsage:
    """The uses of one shape by any call, and the build of its exact-shape plan."""

    __slots__ = ("_counted", "_key", "_request", "_uses", "_wanted")

    def __init__(self, key: PlanKey) -> None:
        self._key = key
        self._uses = 0
        self._counted = -SECONDS_PER_USE
        queries = next(operand.layout.shape[2] for operand in key.inputs if operand.name == "q")
        self._wanted = USES_BEFORE_DECODE_PLAN if queries == 1 else USES_BEFORE_EXACT_SHAPE_PLAN
        self._request: Request | None = None

    def use(self) -> Plan | None:
        """Counts a use. Returns the exact-shape plan once it is available and may replace the bucket's."""
        request = self._request
        now = time.monotonic()
        is_new = now - self._counted >= SECONDS_PER_USE
        if not is_new and (request is None or not request.is_done):
            return None
        if torch.cuda.is_current_stream_capturing() or torch.are_deterministic_algorithms_enabled():
            return None
        if is_new:
            self._counted = now
            self._uses += 1
            cached = plan_cache.peek(self._key)  # by `warmup`, `explain`, or another call of the same shape
            if cached is not None:
                return cached
        if request is not None:
            return self._take() if request.is_done else None
        if self._uses >= self._wanted and not plan_cache.builds_are_forbidden:
            assert self._key.device is not None
            self._request = background.request(self._key, live_properties(self._key.device), self._hold)
        return None

    def _hold(self, stored: StoredPlan) -> None:
        """Loads a plan in the background, because CUDA loads a kernel only after all queued work is done."""
        try:
            with relaxed_capture():  # caching this plan may evict another
                plan_cache.put(plan_of(self._key, stored))
        except BadPlanFileError as error:
            _log.warning("a plan that was built in the background cannot be used: %s: %s", self._key, error)
            store = default_store.active()
            if store is not None:
                store.reject(self._key, str(error))

    def _take(self) -> Plan | None:
        self._request = None
        plan = plan_cache.peek(self._key)
        if plan is None:  # the failure may have been transient
            self._uses, self._wanted = 0, self._wanted * RETRY_FACTOR
        return plan


class RecurringShapes:
    """The usage of all shapes by key. It outlives cached calls, which are dropped with their tables or the policy."""

    def __init__(self) -> None:
        self._by_key: dict[PlanKey, ShapeUsage] = {}
        self._lock = threading.RLock()

    def of(self, key: PlanKey) -> ShapeUsage:
        """The usage of a shape."""
        with self._lock:
            usage = self._by_key.get(key)
            if usage is None:
                while len(self._by_key) >= MAX_SHAPES:
                    del self._by_key[next(iter(self._by_key))]
                usage = self._by_key[key] = ShapeUsage(key)
            return usage

    def clear(self) -> None:
        """Resets all counts."""
        with self._lock:
            self._by_key.clear()


recurring_shapes = RecurringShapes()


#: Under "tiered", the number of shapes of a bucket that get exact-shape plans before the bucket's plan is built, which
#: takes about 10 times as long as another plan of a known kind.
SHAPES_BEFORE_BUCKET = 3

#: Maximum GPU memory for the tables of all bucket calls.
MAX_TABLE_BYTES = 64 << 20

#: Maximum number of buckets tracked.
MAX_BUCKETS = 1024


def prepare(call: ForwardArguments) -> Prepared:
    """A forward call bound to the plan that serves it.

    Raises:
        UnsupportedError: cuDNN has no plan for it.
        PlanBuildError: The plan is missing and may not be built now.
    """
    warn_of_order(call)
    device, sign, scale = call.q.get_device(), sign_of_scale(call), with_positive_scale(call).scale_value
    forward = ForwardSpec.of(call)
    if forward.is_empty:
        return Prepared(_fill_empty, None)
    if forward.dense.has_no_plan:
        return Prepared(reference.run, None)
    if parts.split_forward(call):
        return Prepared(_run_parts, None)
    key = forward.key(live_target(device), device)  # refused under every policy if there is no exact-shape plan
    with torch.cuda.device(device):
        policy = shape_policy.Setting.policy or shape_policy.active()
        is_exact = sign is not None or _wants_exact_shape_plan(policy, call)
        prepared = None if is_exact else _with_bucket(forward, key, policy, scale)
        if prepared is None:
            plan = plan_cache.get(key, partial(build_plan, graphs.sdpa_forward))
            prepared = Prepared(bind(forward, plan, call, scale), plan)
    if sign is None:
        return prepared
    run = prepared.run  # a caller's negative scale is rare: a wrapper keeps it out of all other calls

    def run_multiplied(call: ForwardArguments) -> Result:
        check_address("q", call.q)  # PyTorch's kernel would read a null pointer
        return run(call._replace(q=multiplied(call.q, sign)))

    return prepared._replace(run=run_multiplied)


def _run_parts(call: ForwardArguments) -> Result:
    return parts.run_forward(call, OPERATIONS["sdpa"].on_gpu)  # which remembers their bindings


def _fill_empty(call: ForwardArguments) -> Result:
    sinks = None if call.sinks is None else call.sinks.view(1, -1, 1)
    return fill_without_keys(call, plans.results(call), sinks)


def _wants_exact_shape_plan(policy: str, call: ForwardArguments) -> bool:
    deterministic = call.deterministic or torch.are_deterministic_algorithms_enabled()
    return policy == shape_policy.EXACT or deterministic or bool(autotune.in_force)


def _with_bucket(forward: ForwardSpec, key: PlanKey, policy: str, scale: float) -> Prepared | None:
    """The call bound to its bucket's plan, if that should serve it. Cached plans take precedence over stored ones."""
    bucket = Bucket.of(forward)
    bucket_key = None if bucket is None else bucket.key(key.target, key.device)
    if bucket is None or bucket_key is None or plan_cache.peek(key) is not None:
        return None
    tiered = policy == shape_policy.TIERED
    plan = plan_cache.peek(bucket_key)
    if plan is None and plan_cache.find(key) is not None:
        return None
    plan = plan or plan_cache.find(bucket_key)
    if plan is None and (not tiered or _varies(bucket_key, key)):
        plan = _build(bucket_key)
    if plan is None:
        return None
    successor = ExactShapePlan(forward, key, scale) if tiered else None
    run = BucketRun(bucket, plan, scale, successor)
    if run.is_captured:  # its tables are valid only in the graph
        return Prepared(run, None)
    _make_room(run.table_bytes)
    return Prepared(run, plan, is_current=lambda: shape_policy.active() == policy)


def _build(bucket_key: PlanKey) -> Plan | None:
    """Builds a bucket's plan; None if cuDNN has none."""
    if bucket_key in _seen.without_plan:
        return None
    try:
        return plan_cache.get(bucket_key, partial(build_plan, graphs.sdpa_forward))
    except UnsupportedError:
        _seen.without_plan.add(bucket_key)
        return None


class _Seen:
    """Shapes of buckets whose plan is missing; reset when the plan cache is cleared.

    Attributes:
        shapes: Keys of the shapes, by the bucket's key.
        without_plan: Buckets for which cuDNN has no plan.
    """

    def __init__(self) -> None:
        self.shapes: dict[PlanKey, set[PlanKey]] = {}
        self.without_plan: set[PlanKey] = set()
        plan_cache._tables.add(self)

    def _drop(self, plan: Plan | None) -> None:
        if plan is None:
            self.shapes.clear()
            self.without_plan.clear()


_seen = _Seen()


def _varies(bucket_key: PlanKey, key: PlanKey) -> bool:
    """Whether enough shapes of the bucket were seen for its plan to be worth building."""
    if len(_seen.shapes) >= MAX_BUCKETS:
        _seen.shapes.clear()
        _seen.without_plan.clear()
    keys = _seen.shapes.setdefault(bucket_key, set())
    if len(keys) < SHAPES_BEFORE_BUCKET:
        keys.add(key)
        return False
    return key not in keys


def _make_room(size: int) -> None:
    """Bounds the memory of all tables: drops all bucket calls when the next one would exceed it."""
    if sum(run.table_bytes for run in OPERATIONS["sdpa"].runs(BucketRun)) + size > MAX_TABLE_BYTES:
        forget_buckets()


@shape_policy.on_change
def forget_buckets() -> None:
    """Drops all bucket calls; their next use prepares them again, under the policy of that time."""
    OPERATIONS["sdpa"].forget(BucketRun)


class ExactShapePlan:
    """Replaces the plan of a bucket by the exact-shape plan."""

    __slots__ = ("_forward", "_scale", "_usage")

    def __init__(self, forward: ForwardSpec, key: PlanKey, scale: float) -> None:
        self._usage: ShapeUsage = recurring_shapes.of(key)
        self._forward = forward
        self._scale = scale

    def find(self, call: ForwardArguments) -> Run | None:
        """Counts a use. Returns what runs the call on the exact-shape plan, once that may replace the bucket's."""
        plan = self._usage.use()
        if plan is None:
            return None
        run = bind(self._forward, plan, call, self._scale)
        OPERATIONS["sdpa"].remember(call, Prepared(run, plan))
        return run
