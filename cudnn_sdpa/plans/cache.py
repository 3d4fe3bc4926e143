"""All plans of this process: bounded, least recently used out first, one build per key."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from cudnn_sdpa.errors import OptionError, PlanBuildError
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.plans.autotune_timing import UntunedPlan
from cudnn_sdpa.plans.build import load_plan
from cudnn_sdpa.plans.plan import Plan, captured_plans

_log = logging.getLogger("cudnn_sdpa")

DEFAULT_SIZE = 512


@dataclass(frozen=True)
class PlanCacheInfo:
    """Counters of the plan cache since the process started or `clear` was called.

    Attributes:
        plans: Plans held now.
        capacity: Most plans that are held.
        builds: Plans built.
        loads: Plans loaded from the plan store.
        hits: Uses of a plan that was there already; a warm call is one.
        evictions: Plans let go to stay within the capacity.
        failures: Builds that raised.
        captured: Plans kept alive, whether held or not, because a CUDA graph holds a launch of them.
        build_seconds: Time spent building.
    """

    plans: int
    capacity: int
    builds: int
    loads: int
    hits: int
    evictions: int
    failures: int
    captured: int
    build_seconds: float


def capacity_from_environment() -> int:
    """What `CUDNN_SDPA_CACHE_SIZE` says, if it is a capacity, or 512."""
    text = os.environ.get("CUDNN_SDPA_CACHE_SIZE", "")
    if not text:
        return DEFAULT_SIZE
    if not (text.isdecimal() and text.isascii() and len(text) < 19 and int(text) > 0):
        _log.warning(
            "CUDNN_SDPA_CACHE_SIZE: got %r; expected an integer of at least 1; %d plans are held", text, DEFAULT_SIZE
        )
        return DEFAULT_SIZE
    return int(text)


#: What a launch may still take when the interpreter ends; a few microseconds are usual.
_END_SECONDS = 0.05

#: Draws the number of a use, kept in `Plan.last_used`. Drawing is atomic, orders the plans by use, and counts.
next_use = itertools.count().__next__


class Table(Protocol):
    """What refers to plans of the cache, and forgets those that leave it."""

    def _drop(self, plan: Plan | None) -> None: ...


class PlanCache:
    """The plans of this process.

    Reached as `cudnn_sdpa.plan_cache`. Its capacity is 512 plans, or what the environment variable
    `CUDNN_SDPA_CACHE_SIZE` said when the package was imported.

    Examples:
        >>> import cudnn_sdpa
        >>> cudnn_sdpa.plan_cache.info().plans <= cudnn_sdpa.plan_cache.info().capacity
        True
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._plans: dict[PlanKey, Plan] = {}
        self._tables: weakref.WeakSet[Table] = weakref.WeakSet()
        self._forbidden = 0
        self._is_ending = False
        self._start_afresh()
        self._watchers: list[tuple[int, list[PlanKey]]] = []
        self._reset_counters()

    def _start_afresh(self) -> None:
        """A forked child has none of the threads that may hold the lock or build a plan."""
        self._lock = threading.RLock()
        self._building: dict[PlanKey, threading.Event] = {}

    def _reset_counters(self) -> None:
        self._uses_not_counted = next_use() + 1
        self._builds = self._loads = self._evictions = self._failures = 0
        self._build_seconds = 0.0

    def peek(self, key: PlanKey) -> Plan | None:
        """The plan of `key` if it is held; does not count as a use."""
        return self._plans.get(key)

    def find(self, key: PlanKey) -> Plan | None:
        """The plan of `key` if it is held, or can be loaded now; nothing is built."""
        plan = self._plans.get(key)
        if plan is None:
            self._leave_if_ending()
        if plan is None and not torch.cuda.is_current_stream_capturing() and (loaded := load_plan(key)) is not None:
            self.put(loaded)
            plan = self._plans.get(key, loaded)
        return plan

    @property
    def builds_are_forbidden(self) -> bool:
        """Whether `no_plan_builds` is in force."""
        return self._forbidden > 0

    def get(self, key: PlanKey, build: Callable[[PlanKey], Plan], *, to_use: bool = True) -> Plan:
        """The plan of `key`. If it is not there, one thread loads it or calls `build`, and the others wait for it.

        Who then uses the plan sets its `last_used` to `next_use()`. The use for which it was built is no hit; say
        `to_use=False` if there will be none.

        Raises:
            PlanBuildError: It is not there, and `no_plan_builds` is in force.
        """
        while True:
            with self._lock:
                plan = self._plans.get(key)
                if plan is not None:
                    return plan
                self._leave_if_ending()
                finished = self._building.get(key)
                if finished is None:
                    self._building[key] = threading.Event()
                    break
            finished.wait()
        try:
            plan = load_plan(key)
            if plan is None:
                self._check_allowed(key)
                plan = self._build(key, build)
            return self._insert(plan, to_use)
        finally:
            with self._lock:
                self._building.pop(key).set()

    def end(self) -> None:
        """Lets all plans go, and has other threads that go on launching end at their next call.

        Where the interpreter ends while such a thread is within cuDNN, C++ ends the process with an abort.
        """
        self._is_ending = True
        used = bool(self._plans)
        self.clear()
        if used and threading.active_count() > 1:
            time.sleep(_END_SECONDS)  # for launches that are on their way

    def _leave_if_ending(self) -> None:
        """Ends this thread, as the interpreter's end is about to, but where it harms nobody."""
        if self._is_ending and threading.current_thread() is not threading.main_thread():
            raise SystemExit("the interpreter is ending, and no plan can be launched any more")

    def _build(self, key: PlanKey, build: Callable[[PlanKey], Plan]) -> Plan:
        try:
            return build(key)
        except BaseException:
            with self._lock:
                self._failures += 1
            raise

    def _check_allowed(self, key: PlanKey) -> None:
        if self._forbidden:
            why = (
                "A plan is missing, and no_plan_builds() is in force. Make this call once before, or note what a run "
                "uses with record_plans() and make it ready with warmup()."
            )
            raise PlanBuildError(key, why)

    def put(self, plan: Plan) -> None:
        """Holds a plan that was made elsewhere, if there is none of its key yet."""
        with self._lock:
            if plan.key not in self._plans:
                self._insert(plan, to_use=False)

    def _insert(self, plan: Plan, to_use: bool) -> Plan:
        """Holds a plan; gives the one that is held, which may be another's that was quicker."""
        with self._lock:
            self._builds += not plan.loaded
            self._loads += plan.loaded
            self._uses_not_counted += to_use
            self._build_seconds += 0 if plan.loaded else plan.build_seconds
            held = self._plans.get(plan.key)
            if held is not None:
                return held
            plan.last_used = plan.place = max((other.last_used for other in self._plans.values()), default=0)
            self._plans[plan.key] = plan
            plan.held = True
            if isinstance(plan, UntunedPlan):
                plan.on_found = self._replace
            self._shrink(keep=plan)
            return plan

    def _replace(self, plan: Plan, fastest: Plan) -> None:
        """Holds the fastest plan of a key in the place of its first one; calls that are bound to that one bind anew."""
        with self._lock:
            if self._plans.get(plan.key) is plan:
                fastest.last_used, fastest.place, fastest.held = plan.last_used, plan.place, True
                self._plans[plan.key] = fastest
                plan.held = False
                for table in self._tables:
                    table._drop(plan)

    def _shrink(self, keep: Plan | None = None) -> None:
        while len(self._plans) > self._capacity:
            candidates = (plan for plan in self._plans.values() if plan is not keep)
            self._remove(min(candidates, key=lambda plan: plan.last_used))
            self._evictions += 1

    def _remove(self, plan: Plan) -> None:
        del self._plans[plan.key]
        plan.held = False
        self._note_use(plan)
        for table in self._tables:
            table._drop(plan)

    def info(self) -> PlanCacheInfo:
        """The counters."""
        with self._lock:
            uses = next_use() - self._uses_not_counted
            self._uses_not_counted += 1
            return PlanCacheInfo(
                plans=len(self._plans),
                capacity=self._capacity,
                builds=self._builds,
                loads=self._loads,
                hits=max(0, uses),
                evictions=self._evictions,
                failures=self._failures,
                captured=len(captured_plans),
                build_seconds=self._build_seconds,
            )

    def clear(self) -> None:
        """Lets all plans go and sets the counters to zero.

        A plan that a CUDA graph holds a launch of stays alive, so that the graph can be replayed; the cache only
        forgets it.
        """
        with self._lock:
            for plan in self._plans.values():
                plan.held = False
                self._note_use(plan)
            for table in self._tables:
                table._drop(None)
            self._plans.clear()
            self._reset_counters()

    def resize(self, capacity: int) -> None:
        """Sets the most plans that are held, letting the least recently used ones go if there are more.

        Args:
            capacity: At least 1.

        Raises:
            OptionError: `capacity` is no positive integer.
        """
        if type(capacity) is not int or capacity < 1:
            raise OptionError("capacity", repr(capacity), "an integer of at least 1")
        with self._lock:
            self._capacity = capacity
            self._shrink()

    @contextmanager
    def watch_uses(self) -> Iterator[list[PlanKey]]:
        """While it is in force, notes the plans that are used; the list is complete when it is left."""
        watcher: tuple[int, list[PlanKey]] = (next_use(), [])
        with self._lock:
            self._uses_not_counted += 1
            self._watchers.append(watcher)
        try:
            yield watcher[1]
        finally:
            with self._lock:
                for plan in self._plans.values():
                    self._note_use(plan)
                self._watchers.remove(watcher)

    def _note_use(self, plan: Plan) -> None:
        for since, keys in self._watchers:
            if plan.last_used > since and plan.last_used != plan.place and plan.key not in keys:
                keys.append(plan.key)

    def plans(self) -> list[Plan]:
        """The plans held now, the least recently used first."""
        with self._lock:
            return sorted(self._plans.values(), key=lambda plan: plan.last_used)


plan_cache = PlanCache(capacity_from_environment())
os.register_at_fork(after_in_child=plan_cache._start_afresh)


@atexit.register
def _release() -> None:
    """Frees the plans while cuDNN can still do it; what is left to the interpreter's end is reported as leaked."""
    plan_cache.end()
    captured_plans.clear()


@contextmanager
def no_plan_builds() -> Iterator[None]:
    """While it is in force, in the whole process, a call that has no plan raises instead of building one.

    For servers, after warm-up: a shape that was forgotten shows itself at once and not as a stall.

    Raises:
        PlanBuildError: Out of the call that would have built a plan; it names the plan's key.

    Examples:
        >>> import cudnn_sdpa
        >>> with cudnn_sdpa.no_plan_builds():
        ...     pass  # serve requests
    """
    with plan_cache._lock:
        plan_cache._forbidden += 1
    try:
        yield
    finally:
        with plan_cache._lock:
            plan_cache._forbidden -= 1
