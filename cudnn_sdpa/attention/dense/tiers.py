"""Which plan serves a call of a new shape, how often shapes recur, and how a plan for the exact shape takes over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable

import torch

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense import graphs, launch
from cudnn_sdpa.attention.dense.buckets import Bucket, BucketCall
from cudnn_sdpa.attention.dense.launch import ForwardCall, bind
from cudnn_sdpa.attention.dense.plans import ForwardSpec
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

#: Calls within so many seconds are one use: the layers of a model, or the steps of a benchmark's loop.
SECONDS_OF_A_USE = 0.25

#: A shape gets a plan of its own when it is used for the third time. A prompt that never comes back is not worth one.
USES_BEFORE_EXACT_SHAPE_PLAN = 3

#: A cache that grows passes through the same lengths in every generation: single queries have to come back more often.
USES_OF_A_SINGLE_QUERY = 10

#: After a failure, so many times as many uses are waited for.
PATIENCE = 8

#: Of so many shapes the uses are counted.
MAX_SHAPES = 4096


class ShapeUsage:
    """The uses of one shape, by whatever calls, and what has come of them."""

    __slots__ = ("_counted", "_key", "_request", "_uses", "_wanted")

    def __init__(self, key: PlanKey) -> None:
        self._key = key
        self._uses = 0
        self._counted = -SECONDS_OF_A_USE
        queries = next(operand.layout.shape[2] for operand in key.inputs if operand.name == "q")
        self._wanted = USES_OF_A_SINGLE_QUERY if queries == 1 else USES_BEFORE_EXACT_SHAPE_PLAN
        self._request: Request | None = None

    def use(self) -> Plan | None:
        """Counts a use; the shape's own plan, once that is there and may take over."""
        request = self._request
        now = time.monotonic()
        is_new = now - self._counted >= SECONDS_OF_A_USE
        if not is_new and (request is None or not request.is_done):
            return None
        if torch.cuda.is_current_stream_capturing() or torch.are_deterministic_algorithms_enabled():
            return None
        if is_new:
            self._counted = now
            self._uses += 1
            held = plan_cache.peek(self._key)  # by `warmup`, `explain`, or another call of the same shape
            if held is not None:
                return held
        if request is not None:
            return self._take() if request.is_done else None
        if self._uses >= self._wanted and not plan_cache.builds_are_forbidden:
            assert self._key.device is not None
            self._request = background.request(self._key, live_properties(self._key.device), self._hold)
        return None

    def _hold(self, stored: StoredPlan) -> None:
        """Loads a plan, in the background: CUDA loads no kernel before the GPU has done all that is queued."""
        try:
            with relaxed_capture():  # holding one plan more may let another one go
                plan_cache.put(plan_of(self._key, stored))
        except BadPlanFileError as error:
            _log.warning("a plan that was built in the background cannot be used: %s: %s", self._key, error)
            plans = default_store.active()
            if plans is not None:
                plans.reject(self._key, str(error))

    def _take(self) -> Plan | None:
        self._request = None
        plan = plan_cache.peek(self._key)
        if plan is None:  # it may have been a fault of the moment
            self._uses, self._wanted = 0, self._wanted * PATIENCE
        return plan


class RecurringShapes:
    """Those of all shapes, by key. They outlive the calls, which are forgotten with their tables or the policy."""

    def __init__(self) -> None:
        self._by_key: dict[PlanKey, ShapeUsage] = {}
        self._lock = threading.Lock()

    def of(self, key: PlanKey) -> ShapeUsage:
        """That of a shape."""
        with self._lock:
            found = self._by_key.get(key)
            if found is None:
                while len(self._by_key) >= MAX_SHAPES:
                    del self._by_key[next(iter(self._by_key))]
                found = self._by_key[key] = ShapeUsage(key)
            return found

    def clear(self) -> None:
        """Begins to count again."""
        with self._lock:
            self._by_key.clear()


recurring_shapes = RecurringShapes()


#: Under "tiered", so many shapes of a bucket get plans of their own before the bucket's plan is built. A bucket's plan
#: takes as long as the first of its kind, some 10 times as long as another one.
SHAPES_BEFORE_BUCKET = 3

#: What the tables of all calls that buckets serve may take of the GPU's memory.
MAX_TABLE_BYTES = 64 << 20

#: Of so many buckets is remembered what has been seen of them.
MAX_BUCKETS = 1024


def prepare(forward: ForwardSpec, call: ForwardArguments, signature: Hashable) -> ForwardCall:
    """The prepared call for a new signature, remembered.

    Raises:
        UnsupportedError: cuDNN has no plan for it.
        PlanBuildError: It is missing and may not be built now.
    """
    device = call.q.get_device()
    key = forward.key(live_target(device), device)  # under every policy, what has no plan of its own is refused
    with torch.cuda.device(device):
        policy = shape_policy.active()
        of_bucket = None if _wants_exact_shape_plan(policy, call) else _of_bucket(forward, key, call, signature)
        if of_bucket is None:
            plan = plan_cache.get(key, lambda key: build_plan(graphs.sdpa_forward, key))
            prepared = bind(forward, plan, call.scale_value, call.softcap)
            launch.calls.add(signature, prepared)
            return prepared
        if not of_bucket.is_of_graph:  # otherwise its tables are of no use outside
            _make_room(of_bucket.table_bytes)
            launch.calls.add(signature, of_bucket)
            if shape_policy.active() != policy:  # it has been changed meanwhile, and calls of buckets were forgotten
                forget_buckets()
        return of_bucket


def _wants_exact_shape_plan(policy: str, call: ForwardArguments) -> bool:
    deterministic = call.deterministic or torch.are_deterministic_algorithms_enabled()
    return policy == shape_policy.EXACT or deterministic or autotune.is_in_force()


def _of_bucket(forward: ForwardSpec, key: PlanKey, call: ForwardArguments, signature: Hashable) -> BucketCall | None:
    """The call of its bucket's plan, if that is to serve it. What is held comes before what has to be loaded."""
    bucket = Bucket.of(forward)
    of_bucket = None if bucket is None else bucket.key(key.target, key.device)
    if bucket is None or of_bucket is None or plan_cache.peek(key) is not None:
        return None
    tiered = shape_policy.active() == shape_policy.TIERED
    plan = plan_cache.peek(of_bucket)
    if plan is None and plan_cache.find(key) is not None:
        return None
    plan = plan or plan_cache.find(of_bucket)
    if plan is None and (not tiered or _varies(of_bucket, key)):
        plan = _build(of_bucket)
    if plan is None:
        return None
    scale = call.scale_value
    return BucketCall(bucket, plan, scale, ExactShapePlan(forward, key, scale, signature) if tiered else None)


def _build(of_bucket: PlanKey) -> Plan | None:
    """A bucket's plan; None if cuDNN has none."""
    if of_bucket in _seen.without_plan:
        return None
    try:
        return plan_cache.get(of_bucket, lambda key: build_plan(graphs.sdpa_forward, key))
    except UnsupportedError:
        _seen.without_plan.add(of_bucket)
        return None


class _Seen:
    """What has been seen of buckets whose plan is not there; forgotten when the plan cache is cleared.

    Attributes:
        shapes: By the bucket's key, keys of the shapes.
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


def _varies(of_bucket: PlanKey, key: PlanKey) -> bool:
    """Whether so many shapes of the bucket have been seen that it is worth its plan."""
    if len(_seen.shapes) >= MAX_BUCKETS:
        _seen.shapes.clear()
        _seen.without_plan.clear()
    keys = _seen.shapes.setdefault(of_bucket, set())
    if len(keys) < SHAPES_BEFORE_BUCKET:
        keys.add(key)
        return False
    return key not in keys


def _make_room(size: int) -> None:
    """Keeps the memory of all tables bounded: with the last one too many, all go."""
    if sum(call.table_bytes for call in launch.calls.each(BucketCall)) + size > MAX_TABLE_BYTES:
        forget_buckets()


@shape_policy.on_change
def forget_buckets() -> None:
    """Has all calls that buckets serve prepared anew, under whatever policy there is then."""
    launch.calls.forget(lambda call: isinstance(call, BucketCall))


class ExactShapePlan:
    """Leads from the plan of a bucket to the plan of a shape's own."""

    __slots__ = ("_comeback", "_forward", "_scale", "_signature")

    def __init__(self, forward: ForwardSpec, key: PlanKey, scale: float, signature: Hashable) -> None:
        self._comeback: ShapeUsage = recurring_shapes.of(key)
        self._forward = forward
        self._scale = scale
        self._signature = signature

    def find(self) -> ForwardCall | None:
        """The call of the shape's own plan, once that is there and may take over. Counts the use."""
        plan = self._comeback.use()
        if plan is None:
            return None
        own = bind(self._forward, plan, self._scale)
        launch.calls.add(self._signature, own)
        return own
