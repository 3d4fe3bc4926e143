"""Which plan serves a call of a new shape, how often shapes recur, and how a plan for the exact shape takes over."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING

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
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans import autotune, shape_policy
from cudnn_sdpa.plans.build import build_plan
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.plan import Plan

if TYPE_CHECKING:
    from cudnn_sdpa.offline.background import Request

#: Calls within this many seconds count as one use, such as those of a model's layers or of a benchmark's loop.
SECONDS_PER_USE = 0.25

#: Number of uses after which a shape gets an exact-shape plan; a prompt length that does not recur is not worth one.
USES_BEFORE_EXACT_SHAPE_PLAN = 3

#: The same for single queries, whose key lengths recur in every generation as a cache grows.
USES_BEFORE_DECODE_PLAN = 10

#: Under "tiered", the number of shapes of a bucket that get exact-shape plans before the bucket's plan is built, which
#: takes about 10 times as long as another plan of a known kind.
SHAPES_BEFORE_BUCKET = 3

#: Factor on the number of uses after a failed build.
RETRY_FACTOR = 8

#: Maximum number of shapes and buckets whose usage is known; past it, all counts begin again.
MAX_SHAPES = 4096

#: Maximum GPU memory for the tables of all bucket calls.
MAX_TABLE_BYTES = 64 << 20


class Usage:
    """How often a shape or a bucket was used, and from how many uses on its plan is worth building.

    Attributes:
        uses: Of a shape: its uses on its bucket's plan. Of a bucket without a plan: the shapes that it has had.
        wanted: The number of uses before its plan is built; infinite if cuDNN has none.
    """

    __slots__ = ("_counted", "_request", "uses", "wanted")

    def __init__(self, wanted: float) -> None:
        self.uses = 0
        self.wanted = wanted
        self._counted = -SECONDS_PER_USE
        self._request: Request | None = None

    @classmethod
    def of(cls, key: PlanKey, wanted: float) -> Usage:
        """The usage of the shape or the bucket with this key."""
        if len(usages) >= MAX_SHAPES and key not in usages:
            usages.clear()
        return usages.setdefault(key, cls(wanted))

    @classmethod
    def _drop(cls, plan: Plan | None) -> None:
        """Forgets all usage when the plan cache is cleared."""
        if plan is None:
            usages.clear()

    def use(self, key: PlanKey) -> Plan | None:
        """Counts a use of a shape. Returns its exact-shape plan once that is held and may replace the bucket's."""
        now, request = time.monotonic(), self._request
        is_new = now - self._counted >= SECONDS_PER_USE
        is_done = request is not None and request.is_done
        if not (is_new or is_done):
            return None
        if torch.cuda.is_current_stream_capturing() or torch.are_deterministic_algorithms_enabled():
            return None
        plan = plan_cache.peek(key)  # of the helper process, `warmup`, `explain`, or another call of the same shape
        if plan is not None:
            self._request = None
            return plan
        if is_new:
            self._counted, self.uses = now, self.uses + 1
        if is_done:  # without a plan: it failed, perhaps only this time
            self._request, self.uses, self.wanted = None, 0, self.wanted * RETRY_FACTOR
        if self._request is None and self.uses >= self.wanted and not plan_cache.builds_are_forbidden:
            from cudnn_sdpa.offline.background import build_in_background  # few programs get this far

            self._request = build_in_background(key)
        return None


#: The usage of shapes and buckets by key. It outlives cached calls, which are dropped with their tables or the policy.
usages: dict[PlanKey, Usage] = {}
plan_cache._tables.add(Usage)


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
    deterministic = call.softmax.deterministic or torch.are_deterministic_algorithms_enabled()
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
    plan = plan or plan_cache.find(bucket_key) or _build(bucket_key, key, tiered=tiered)
    if plan is None:
        return None
    exact = None
    if tiered:
        wanted = USES_BEFORE_DECODE_PLAN if forward.dense.sq == 1 else USES_BEFORE_EXACT_SHAPE_PLAN
        exact = partial(_run_of_exact_shape, Usage.of(key, wanted), forward, key, scale)
    run = BucketRun(bucket, plan, scale, exact)
    if run.is_captured:  # its tables are valid only in the graph
        return Prepared(run, None)
    _make_room(run.table_bytes)
    return Prepared(run, plan, is_current=lambda: shape_policy.active() == policy)


def _run_of_exact_shape(
    usage: Usage, forward: ForwardSpec, key: PlanKey, scale: float, call: ForwardArguments
) -> Run | None:
    """Counts a use. Returns what runs the call on its exact-shape plan, once that may replace the bucket's."""
    plan = usage.use(key)
    if plan is None:
        return None
    run = bind(forward, plan, call, scale)
    OPERATIONS["sdpa"].remember(call, Prepared(run, plan))
    return run


def _build(bucket_key: PlanKey, key: PlanKey, *, tiered: bool) -> Plan | None:
    """Builds a bucket's plan; None if cuDNN has none, or if its first shapes are to have exact-shape plans."""
    bucket = Usage.of(bucket_key, SHAPES_BEFORE_BUCKET)
    if bucket.wanted == math.inf:
        return None
    usage = usages.get(key)  # once: another thread may clear them
    if tiered and usage is None and bucket.uses < bucket.wanted:
        Usage.of(key, USES_BEFORE_EXACT_SHAPE_PLAN)
        bucket.uses += 1
        return None
    if tiered and usage is not None and not usage.uses:  # one of the first, whose plan was evicted
        return None
    try:
        return plan_cache.get(bucket_key, partial(build_plan, graphs.sdpa_forward))
    except UnsupportedError:
        bucket.wanted = math.inf
        return None


def _make_room(size: int) -> None:
    """Bounds the memory of all tables: drops all bucket calls when the next one would exceed it."""
    if sum(run.table_bytes for run in OPERATIONS["sdpa"].runs(BucketRun)) + size > MAX_TABLE_BYTES:
        forget_buckets()


@shape_policy.on_change
def forget_buckets() -> None:
    """Drops all bucket calls; their next use prepares them again, under the policy of that time."""
    OPERATIONS["sdpa"].forget(BucketRun)
