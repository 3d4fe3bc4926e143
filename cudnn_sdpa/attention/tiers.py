"""Which plan serves a call of a new shape, as the shape policy has it, and how a better one takes over."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable

import torch

from cudnn_sdpa.attention import graphs, lookup
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.bucket_calls import BucketCall
from cudnn_sdpa.attention.buckets import Bucket
from cudnn_sdpa.attention.calls import ForwardCall, bind
from cudnn_sdpa.attention.passes import Forward
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.offline.background import Request, background
from cudnn_sdpa.runtime import shapes, tuning
from cudnn_sdpa.runtime.cache import plan_cache
from cudnn_sdpa.runtime.key import PlanKey
from cudnn_sdpa.runtime.plan import Plan, build_plan, plan_of, stored_form
from cudnn_sdpa.runtime.plan_file import BadPlanFileError, StoredPlan
from cudnn_sdpa.runtime.target import live_properties, live_target

#: Under "tiered", so many shapes of a bucket get plans of their own before the bucket's plan is built. A bucket's plan
#: takes as long as the first of its kind, some 10 times as long as another one.
SHAPES_BEFORE_BUCKET = 3

#: A shape gets a plan of its own when it is used for the third time. The layers of a model that call it one after the
#: other use it once: a prompt that never comes back, or the growing cache of a generation, is not worth a build.
USES_BEFORE_OWN_PLAN = 3

#: What the tables of all calls that buckets serve may take of the GPU's memory.
MOST_TABLE_BYTES = 64 << 20

_log = logging.getLogger("cudnn_sdpa")


def prepare(forward: Forward, call: ForwardArguments, signature: Hashable) -> ForwardCall:
    """The prepared call for a new signature, remembered.

    Raises:
        UnsupportedError: cuDNN has no plan for it.
        PlanBuildError: It is missing and may not be built now.
    """
    device = call.q.get_device()
    key = forward.key(live_target(device), device)  # under every policy, what has no plan of its own is refused
    with torch.cuda.device(device):
        of_bucket = _of_bucket(forward, key, call, signature)
        if of_bucket is None:
            plan = plan_cache.get(key, lambda key: build_plan(graphs.sdpa_forward, key))
            prepared = bind(forward, plan, call.scale_value, call.softcap)
            lookup.calls.add(signature, prepared)
            return prepared
        if not of_bucket.is_of_graph:
            _make_room(of_bucket.table_bytes)
            lookup.calls.add(signature, of_bucket)
        return of_bucket


def _of_bucket(forward: Forward, key: PlanKey, call: ForwardArguments, signature: Hashable) -> BucketCall | None:
    """The call of its bucket's plan, if that is to serve it."""
    policy = shapes.active()
    if policy == shapes.EXACT or torch.are_deterministic_algorithms_enabled() or tuning.is_in_force():
        return None
    if plan_cache.find(key) is not None:
        return None
    bucket = Bucket.of(forward)
    of_bucket = None if bucket is None else bucket.key(key.target, key.device)
    if bucket is None or of_bucket is None:
        return None
    plan = plan_cache.find(of_bucket)
    if plan is None and (policy == shapes.BUCKETED or _varies(of_bucket, key)):
        plan = _build(of_bucket)
    if plan is None:
        return None
    successor = OwnPlan(forward, key, call.scale_value, signature) if policy == shapes.TIERED else None
    return BucketCall(bucket, plan, call.scale_value, successor)


def _build(of_bucket: PlanKey) -> Plan | None:
    """A bucket's plan; None if cuDNN has none."""
    if of_bucket in _seen.without_plan:
        return None
    try:
        return plan_cache.get(of_bucket, _build_and_load)
    except UnsupportedError:
        _seen.without_plan.add(of_bucket)
        return None


def _build_and_load(of_bucket: PlanKey) -> Plan:
    """Builds a plan, and loads it once for nothing.

    The first load of a process takes 7 to 20 ms, further ones 3 to 6: better here, beside a build, than when the first
    shape's own plan takes over.
    """
    plan = build_plan(graphs.sdpa_forward, of_bucket)
    if not plan.loaded:
        with contextlib.suppress(BadPlanFileError):
            plan_of(of_bucket, stored_form(plan))
    return plan


class _Seen:
    """What has been seen of buckets whose plan is not there; forgotten when the plan cache is cleared.

    Attributes:
        shapes: By the bucket's key, keys of the shapes.
        without_plan: Buckets for which cuDNN has no plan.
        last: The shape that a bucket served last.
        table_bytes: What the tables of all prepared calls take.
    """

    def __init__(self) -> None:
        self.shapes: dict[PlanKey, set[PlanKey]] = {}
        self.without_plan: set[PlanKey] = set()
        self.last: OwnPlan | None = None
        self.table_bytes = 0
        plan_cache._tables.add(self)

    def _drop(self, plan: Plan | None) -> None:
        if plan is None:
            self.shapes.clear()
            self.without_plan.clear()
            self.table_bytes = 0


_seen = _Seen()


def _varies(of_bucket: PlanKey, key: PlanKey) -> bool:
    """Whether so many shapes of the bucket have been seen that it is worth its plan."""
    keys = _seen.shapes.setdefault(of_bucket, set())
    if len(keys) < SHAPES_BEFORE_BUCKET:
        keys.add(key)
        return False
    return key not in keys


def _make_room(size: int) -> None:
    """Keeps the memory of all tables bounded: with the last one too many, all go."""
    _seen.table_bytes += size
    if _seen.table_bytes > MOST_TABLE_BYTES:
        _forget_buckets()
        _seen.table_bytes = size


class OwnPlan:
    """Leads from the plan of a bucket to the plan of a shape's own, which a helper process builds meanwhile."""

    __slots__ = ("_forward", "_given_up", "_key", "_request", "_scale", "_signature", "_uses")

    def __init__(self, forward: Forward, key: PlanKey, scale: float, signature: Hashable) -> None:
        self._forward = forward
        self._key = key
        self._scale = scale
        self._signature = signature
        self._uses = 0
        self._request: Request | None = None
        self._given_up = False

    def find(self) -> ForwardCall | None:
        """The call of the shape's own plan, once that is there and may take over. Counts the uses."""
        if _seen.last is not self:
            _seen.last = self
            self._uses += 1
            if self._request is None and self._uses >= USES_BEFORE_OWN_PLAN and not plan_cache.builds_are_forbidden:
                assert self._key.device is not None
                self._request = background.request(self._key, live_properties(self._key.device))
        if self._request is None or not self._request.is_done or self._given_up:
            return None
        if torch.cuda.is_current_stream_capturing() or torch.are_deterministic_algorithms_enabled():
            return None
        return self._take_over(self._request.stored)

    def _take_over(self, stored: StoredPlan | None) -> ForwardCall | None:
        plan = plan_cache.peek(self._key)
        try:
            if plan is None and stored is not None:
                plan_cache.put(plan_of(self._key, stored))
                plan = plan_cache.peek(self._key)
        except BadPlanFileError as error:
            _log.warning("a plan that was built in the background cannot be used: %s: %s", self._key, error)
        if plan is None:
            self._given_up = True
            return None
        own = bind(self._forward, plan, self._scale)
        lookup.calls.add(self._signature, own)
        return own


@shapes.on_change
def _forget_buckets() -> None:
    """Under another policy, calls are prepared anew."""
    lookup.calls.forget(lambda call: isinstance(call, BucketCall))
