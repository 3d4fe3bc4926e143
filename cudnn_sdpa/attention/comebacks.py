"""Shapes that buckets serve and that come back: how often, and the plans of their own that are built meanwhile."""

from __future__ import annotations

import logging
import threading
import time

import torch

from cudnn_sdpa.offline.background import Request, background
from cudnn_sdpa.runtime import store_setting
from cudnn_sdpa.runtime.building import plan_of
from cudnn_sdpa.runtime.cache import plan_cache
from cudnn_sdpa.runtime.capture import relaxed_capture
from cudnn_sdpa.runtime.key import PlanKey
from cudnn_sdpa.runtime.plan import Plan
from cudnn_sdpa.runtime.plan_file import BadPlanFileError, StoredPlan
from cudnn_sdpa.runtime.target import live_properties

_log = logging.getLogger("cudnn_sdpa")

#: Calls within so many seconds are one use: the layers of a model, or the steps of a benchmark's loop.
SECONDS_OF_A_USE = 0.25

#: A shape gets a plan of its own when it is used for the third time. A prompt that never comes back is not worth one.
USES_BEFORE_OWN_PLAN = 3

#: A cache that grows passes through the same lengths in every generation: single queries have to come back more often.
USES_OF_A_SINGLE_QUERY = 10

#: After a failure, so many times as many uses are waited for.
PATIENCE = 8

#: Of so many shapes the uses are counted.
MOST_SHAPES = 4096


class Comeback:
    """The uses of one shape, by whatever calls, and what has come of them."""

    __slots__ = ("_counted", "_key", "_request", "_uses", "_wanted")

    def __init__(self, key: PlanKey) -> None:
        self._key = key
        self._uses = 0
        self._counted = -SECONDS_OF_A_USE
        queries = next(operand.layout.shape[2] for operand in key.inputs if operand.name == "q")
        self._wanted = USES_OF_A_SINGLE_QUERY if queries == 1 else USES_BEFORE_OWN_PLAN
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
            plans = store_setting.active()
            if plans is not None:
                plans.reject(self._key, str(error))

    def _take(self) -> Plan | None:
        self._request = None
        plan = plan_cache.peek(self._key)
        if plan is None:  # it may have been a fault of the moment
            self._uses, self._wanted = 0, self._wanted * PATIENCE
        return plan


class Comebacks:
    """Those of all shapes, by key. They outlive the calls, which are forgotten with their tables or the policy."""

    def __init__(self) -> None:
        self._by_key: dict[PlanKey, Comeback] = {}
        self._lock = threading.Lock()

    def of(self, key: PlanKey) -> Comeback:
        """That of a shape."""
        with self._lock:
            found = self._by_key.get(key)
            if found is None:
                while len(self._by_key) >= MOST_SHAPES:
                    del self._by_key[next(iter(self._by_key))]
                found = self._by_key[key] = Comeback(key)
            return found

    def clear(self) -> None:
        """Begins to count again."""
        with self._lock:
            self._by_key.clear()


comebacks = Comebacks()
