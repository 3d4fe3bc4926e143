"""Which plan serves a call of a new shape, as the shape policy has it, and how a better one takes over."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from cudnn_sdpa.attention import graphs, lookup
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.bucket_calls import BucketCall
from cudnn_sdpa.attention.buckets import Bucket
from cudnn_sdpa.attention.calls import ForwardCall, bind
from cudnn_sdpa.attention.comebacks import Comeback, comebacks
from cudnn_sdpa.attention.passes import Forward
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.runtime import shapes, tuning
from cudnn_sdpa.runtime.building import build_plan
from cudnn_sdpa.runtime.cache import plan_cache
from cudnn_sdpa.runtime.key import PlanKey
from cudnn_sdpa.runtime.plan import Plan
from cudnn_sdpa.runtime.target import live_target

#: Under "tiered", so many shapes of a bucket get plans of their own before the bucket's plan is built. A bucket's plan
#: takes as long as the first of its kind, some 10 times as long as another one.
SHAPES_BEFORE_BUCKET = 3

#: What the tables of all calls that buckets serve may take of the GPU's memory.
MOST_TABLE_BYTES = 64 << 20

#: Of so many buckets is remembered what has been seen of them.
MOST_BUCKETS = 1024


def prepare(forward: Forward, call: ForwardArguments, signature: Hashable) -> ForwardCall:
    """The prepared call for a new signature, remembered.

    Raises:
        UnsupportedError: cuDNN has no plan for it.
        PlanBuildError: It is missing and may not be built now.
    """
    device = call.q.get_device()
    key = forward.key(live_target(device), device)  # under every policy, what has no plan of its own is refused
    with torch.cuda.device(device):
        policy = shapes.active()
        of_bucket = None if _wants_own_plan(policy, call) else _of_bucket(forward, key, call, signature)
        if of_bucket is None:
            plan = plan_cache.get(key, lambda key: build_plan(graphs.sdpa_forward, key))
            prepared = bind(forward, plan, call.scale_value, call.softcap)
            lookup.calls.add(signature, prepared)
            return prepared
        if not of_bucket.is_of_graph:  # otherwise its tables are of no use outside
            _make_room(of_bucket.table_bytes)
            lookup.calls.add(signature, of_bucket)
            if shapes.active() != policy:  # it has been changed meanwhile, and calls of buckets were forgotten
                forget_buckets()
        return of_bucket


def _wants_own_plan(policy: str, call: ForwardArguments) -> bool:
    deterministic = call.deterministic or torch.are_deterministic_algorithms_enabled()
    return policy == shapes.EXACT or deterministic or tuning.is_in_force()


def _of_bucket(forward: Forward, key: PlanKey, call: ForwardArguments, signature: Hashable) -> BucketCall | None:
    """The call of its bucket's plan, if that is to serve it. What is held comes before what has to be loaded."""
    bucket = Bucket.of(forward)
    of_bucket = None if bucket is None else bucket.key(key.target, key.device)
    if bucket is None or of_bucket is None or plan_cache.peek(key) is not None:
        return None
    tiered = shapes.active() == shapes.TIERED
    plan = plan_cache.peek(of_bucket)
    if plan is None and plan_cache.find(key) is not None:
        return None
    plan = plan or plan_cache.find(of_bucket)
    if plan is None and (not tiered or _varies(of_bucket, key)):
        plan = _build(of_bucket)
    if plan is None:
        return None
    scale = call.scale_value
    return BucketCall(bucket, plan, scale, OwnPlan(forward, key, scale, signature) if tiered else None)


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
    if len(_seen.shapes) >= MOST_BUCKETS:
        _seen.shapes.clear()
        _seen.without_plan.clear()
    keys = _seen.shapes.setdefault(of_bucket, set())
    if len(keys) < SHAPES_BEFORE_BUCKET:
        keys.add(key)
        return False
    return key not in keys


def _make_room(size: int) -> None:
    """Keeps the memory of all tables bounded: with the last one too many, all go."""
    if sum(call.table_bytes for call in lookup.calls.each(BucketCall)) + size > MOST_TABLE_BYTES:
        forget_buckets()


@shapes.on_change
def forget_buckets() -> None:
    """Has all calls that buckets serve prepared anew, under whatever policy there is then."""
    lookup.calls.forget(lambda call: isinstance(call, BucketCall))


class OwnPlan:
    """Leads from the plan of a bucket to the plan of a shape's own."""

    __slots__ = ("_comeback", "_forward", "_scale", "_signature")

    def __init__(self, forward: Forward, key: PlanKey, scale: float, signature: Hashable) -> None:
        self._comeback: Comeback = comebacks.of(key)
        self._forward = forward
        self._scale = scale
        self._signature = signature

    def find(self) -> ForwardCall | None:
        """The call of the shape's own plan, once that is there and may take over. Counts the use."""
        plan = self._comeback.use()
        if plan is None:
            return None
        own = bind(self._forward, plan, self._scale)
        lookup.calls.add(self._signature, own)
        return own
