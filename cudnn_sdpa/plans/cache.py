"""The process-wide plan cache: bounded, LRU, one build per key; plans are loaded from the plan store, or built here."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import re
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from cudnn_sdpa.errors import ExecutionError, OptionError, PlanBuildError
from cudnn_sdpa.graph import backend, handles
from cudnn_sdpa.graph.backend import Handle
from cudnn_sdpa.graph.definition import GraphDefinition, find_operation
from cudnn_sdpa.graph.diagnostics import shortened
from cudnn_sdpa.graph.heuristics import build_others
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.private_memory import relaxed_capture
from cudnn_sdpa.plans import autotune, default_store
from cudnn_sdpa.plans.autotune import AutotuneCandidate, UntunedPlan
from cudnn_sdpa.plans.device_memory import constants_of
from cudnn_sdpa.plans.plan import Plan, captured_plans, stored_form
from cudnn_sdpa.plans.program_plan import ProgramOp
from cudnn_sdpa.plans.store import BadPlanFileError, PlanStore, StoredPlan

_log = logging.getLogger("cudnn_sdpa")

DEFAULT_SIZE = 512


@dataclass(frozen=True)
class PlanCacheInfo:
    """Counters of the plan cache since the process started or `clear` was called.

    Attributes:
        plans: Plans held now.
        capacity: Maximum number of plans held.
        builds: Plans built.
        loads: Plans loaded from the plan store.
        hits: Uses of a plan already held; a warm call is one.
        evictions: Plans evicted to stay within the capacity.
        failures: Builds that raised.
        captured: Plans kept alive, held or not, because a CUDA graph contains a launch of them.
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
    text = os.environ.get("CUDNN_SDPA_CACHE_SIZE", "")
    if not text:
        return DEFAULT_SIZE
    if not (text.isdecimal() and text.isascii() and len(text) < 19 and int(text) > 0):
        _log.warning("CUDNN_SDPA_CACHE_SIZE: got %r; expected an integer of at least 1; using %d", text, DEFAULT_SIZE)
        return DEFAULT_SIZE
    return int(text)


#: Seconds to let running launches finish when the interpreter exits; microseconds usually suffice.
_END_SECONDS = 0.05

#: Launches by the native module, which alone counts there; it notes in `Plan.native_use` which was a plan's last.
native_uses = array("Q", (0,))
_uses = itertools.count(1)


def next_use() -> int:
    """The number of a use in Python, for `Plan.last_used`: those numbers order plans by use.

    It is greater than those of all uses before, and less than those of later ones: native launches so far come first in
    it, then Python's. No lock is needed, which a signal handler or a finalizer could find taken: each of the two is
    atomic.
    """
    return native_uses[0] << 64 | next(_uses)


def _count_uses() -> int:
    """Counts all uses, this one as well."""
    return native_uses[0] + next(_uses)


class Table(Protocol):
    def _drop(self, plan: Plan | None) -> None: ...


class _Build(NamedTuple):
    thread: int
    finished: threading.Event


class PlanCache:
    """The compiled plans in memory: `cudnn_sdpa.plan_cache` of this process.

    Calls use its plans. When it is full, it evicts the least recently used one. Its capacity is 512 plans, or the value
    of the environment variable `CUDNN_SDPA_CACHE_SIZE` at the import of the package.

    Examples:
        >>> import cudnn_sdpa
        >>> cudnn_sdpa.plan_cache.info().plans <= cudnn_sdpa.plan_cache.info().capacity
        True
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._plans: dict[PlanKey, Plan] = {}
        self._tables: weakref.WeakSet[Table] = weakref.WeakSet()
        self.generation = 0  # how often all calls were forgotten
        self._forbidden = 0
        self._is_ending = False
        self._start_afresh()
        self._watchers: list[tuple[int, list[PlanKey]]] = []
        self._reset_counters()

    def _start_afresh(self) -> None:
        self._lock = threading.RLock()
        self._building: dict[PlanKey, _Build] = {}

    def _reset_counters(self) -> None:
        self._uses_not_counted = _count_uses()
        self._builds = self._loads = self._evictions = self._failures = 0
        self._build_seconds = 0.0

    def peek(self, key: PlanKey) -> Plan | None:
        """The plan of `key` if it is held; not counted as a use."""
        return self._plans.get(key)

    def find(self, key: PlanKey) -> Plan | None:
        """The plan of `key` if it is held or stored; nothing is built."""
        plan = self._plans.get(key)
        if plan is None:
            self._leave_if_ending()
        if plan is None and not torch.cuda.is_current_stream_capturing() and (loaded := load_plan(key)) is not None:
            self.put(loaded)
            plan = self._plans.get(key, loaded)
        return plan

    @property
    def builds_are_forbidden(self) -> bool:
        return self._forbidden > 0

    def get(self, key: PlanKey, build: Callable[[PlanKey], Plan], *, to_use: bool = True) -> Plan:
        """The plan of `key`. If it is missing, one thread loads it or calls `build`, and other threads wait.

        A nested call in the building thread, from a signal handler or a finalizer, builds the plan too, since it cannot
        wait for itself.

        The caller sets the plan's `last_used` to `next_use()` when it launches. The use for which a plan was built is
        no hit; pass `to_use=False` if there will be none.
        """
        while True:
            with self._lock:
                plan = self._plans.get(key)
                if plan is not None:
                    return plan
                self._leave_if_ending()
                running = self._building.get(key)
                if running is None:
                    running = self._building[key] = _Build(threading.get_ident(), threading.Event())
                    break
            if running.thread == threading.get_ident():  # a signal handler or finalizer has interrupted it
                return self._load_or_build(key, build, to_use)
            running.finished.wait()
        try:
            return self._load_or_build(key, build, to_use)
        finally:
            with self._lock:
                self._building.pop(key).finished.set()

    def _load_or_build(self, key: PlanKey, build: Callable[[PlanKey], Plan], to_use: bool) -> Plan:
        plan = load_plan(key)
        if plan is None and self._forbidden and not _is_compiled(key):
            why = (
                "A plan is missing, and no_plan_builds() is in force. Make this call once before, or record a run's "
                "plans with record_plans() and build them with warmup()."
            )
            raise PlanBuildError(key, why)
        if plan is None:
            try:
                plan = build(key)
            except BaseException:
                with self._lock:
                    self._failures += 1
                raise
        return self._insert(plan, to_use)

    def end(self) -> None:
        """Drops all plans; other threads that still launch end at their next call.

        If the interpreter exits while such a thread is inside cuDNN, C++ aborts the process.
        """
        self._is_ending = True
        used = bool(self._plans)
        self.clear()
        if used and threading.active_count() > 1:
            time.sleep(_END_SECONDS)  # for running launches

    def _leave_if_ending(self) -> None:
        if self._is_ending and threading.current_thread() is not threading.main_thread():
            raise SystemExit("the interpreter is shutting down, and plans can no longer be launched")

    def put(self, plan: Plan) -> None:
        """Adds a plan that was made elsewhere, unless its key has one."""
        with self._lock:
            if plan.key not in self._plans:
                self._insert(plan, to_use=False)

    def _insert(self, plan: Plan, to_use: bool) -> Plan:
        with self._lock:
            self._builds += not plan.loaded
            self._loads += plan.loaded
            self._uses_not_counted += to_use
            self._build_seconds += 0 if plan.loaded else plan.build_seconds
            held = self._plans.get(plan.key)
            if held is not None:
                return held
            plan.last_used = plan.added_at = max((other.last_used for other in self._plans.values()), default=0)
            self._plans[plan.key] = plan
            plan.held = True
            if isinstance(plan, UntunedPlan):
                plan.on_tuned = self._replace
            self._shrink(keep=plan)
            return plan

    def _replace(self, plan: Plan, fastest: Plan) -> None:
        with self._lock:
            if self._plans.get(plan.key) is plan:
                fastest.last_used, fastest.added_at, fastest.held = plan.last_used, plan.added_at, True
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
        """The counters of the cache."""
        with self._lock:
            self._uses_not_counted += 1  # this look
            uses = _count_uses() - self._uses_not_counted
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
        """Drops all plans and resets the counters.

        A plan launched in a CUDA graph stays alive so that the graph can be replayed; the cache drops only its own
        reference.
        """
        with self._lock:
            for plan in self._plans.values():
                plan.held = False
                self._note_use(plan)
            self.forget_calls()
            self._plans.clear()
            self._reset_counters()

    def forget_calls(self) -> None:
        """Has all calls find their plans again."""
        with self._lock:
            self.generation += 1
            for table in self._tables:
                table._drop(None)

    def resize(self, capacity: int) -> None:
        """Sets the maximum number of plans, evicting the least recently used beyond it.

        Args:
            capacity: At least 1.

        Raises:
            OptionError: `capacity` is not a positive integer.
        """
        if type(capacity) is not int or capacity < 1:
            raise OptionError("capacity", repr(capacity), "an integer of at least 1")
        with self._lock:
            self._capacity = capacity
            self._shrink()

    @contextmanager
    def watch_uses(self) -> Iterator[list[PlanKey]]:
        """Records the plans used while active; the list is complete on exit."""
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
            if plan.last_used > since and plan.last_used != plan.added_at and plan.key not in keys:
                keys.append(plan.key)

    def plans(self) -> list[Plan]:
        """Held plans, least recently used first."""
        with self._lock:
            return sorted(self._plans.values(), key=lambda plan: plan.last_used)


plan_cache = PlanCache(capacity_from_environment())
"""The one `PlanCache` of this process."""
os.register_at_fork(after_in_child=plan_cache._start_afresh)


@atexit.register
def _release() -> None:
    plan_cache.end()
    captured_plans.clear()


@contextmanager
def no_plan_builds() -> Iterator[None]:
    """While active, process-wide, a call without a plan raises instead of building one.

    For servers, after warm-up: a forgotten shape raises at once instead of stalling. A new shape whose kernels are
    compiled, as of own kernels and of FlashAttention-4, takes less than a millisecond, and is served.

    Raises:
        PlanBuildError: Raised by the call that would build a plan; it names the plan's key.

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


# Calls that are bound to plans of the cache.


class WithPlan(Protocol):
    """An entry of a `CallTable`: a plan bound to everything that a raw signature determines."""

    @property
    def plan(self) -> Plan | None: ...


EntryT = TypeVar("EntryT", bound=WithPlan)


class CallTable(Generic[EntryT]):
    """First-level lookup from a raw signature, as cheap as possible, to a prepared call.

    Every plan in it is in the plan cache; evicting a plan removes its entries.

    Attributes:
        get: `get(signature)` gives the prepared call, or None.
    """

    def __init__(self, limit: int = 8192) -> None:
        self._calls: dict[Hashable, EntryT] = {}
        self._limit = limit
        self.get = self._calls.get
        plan_cache._tables.add(self)

    def add(self, signature: Hashable, call: EntryT) -> None:
        """Adds `call`, unless it has no plan, or its plan has been evicted in the meantime."""
        with plan_cache._lock:
            if call.plan is None or not call.plan.held:
                return
            while len(self._calls) >= self._limit:
                del self._calls[next(iter(self._calls))]
            self._calls[signature] = call

    def each(self) -> list[EntryT]:
        with plan_cache._lock:
            return list(self._calls.values())

    def forget(self, concerns: Callable[[EntryT], bool]) -> None:
        with plan_cache._lock:
            for signature in [s for s, call in self._calls.items() if concerns(call)]:
                del self._calls[signature]

    def _drop(self, plan: Plan | None) -> None:
        for signature in [s for s, call in self._calls.items() if plan is None or call.plan is plan]:
            del self._calls[signature]

    def __len__(self) -> int:
        return len(self._calls)


# Plans that the cache lacks.


def load_plan(key: PlanKey) -> Plan | None:
    """The plan of `key` from the plan store, if it has one for this GPU; under `autotune` only a tuned one."""
    store = _store()
    if store is None or key.provider is not None:  # kernels of others than cuDNN are stored, but no plans of them
        return None
    only_tuned = bool(autotune.in_force) and not autotune.not_tunable(key)
    if only_tuned and key in autotune.offered:
        return None  # it is built with all candidates
    for stored_key in (key, key.without_device()) if key.is_gpu_specific else (key,):
        stored = store.load(stored_key, only_tuned=only_tuned)
        if stored is not None:
            try:
                return plan_of(key, stored)
            except BadPlanFileError as error:
                # Not removed: cuDNN's error does not always distinguish a bad file from a failing GPU or process, and
                # other processes share it. If a plan can be built, it replaces the file.
                store.ignore(stored_key, str(error))
    return None


def _store() -> PlanStore | None:
    setting = default_store.Setting
    return setting.store if setting.is_resolved else default_store.active()


#: Messages of cuDNN, CUDA and PyTorch for failures of the GPU or its memory rather than of the plan.
_GPU_FAILURE = re.compile(
    r"out.of.memory|OutOfMemory|ALLOC|CUDA error|CUDA_DRIVER|cudaError\w+|illegal memory|launch failure|"
    r"CUDA_ERROR_(?!INVALID_IMAGE|NO_BINARY_FOR_GPU|INVALID_PTX|UNSUPPORTED_PTX_VERSION|INVALID_SOURCE)",
)


def plan_of(key: PlanKey, stored: StoredPlan) -> Plan:
    """The plan of `key` from its stored form; `BadPlanFileError` if cuDNN rejects it here.

    Errors for which the plan is not at fault are others: `ExecutionError`, `MemoryError`, PyTorch's `OutOfMemoryError`,
    and `PlanBuildError` while a CUDA graph is being captured on this stream.
    """
    assert key.device is not None
    start = time.perf_counter()
    with torch.cuda.device(key.device), relaxed_capture(), backend.no_error_left():
        _handle_for(key)  # makes this thread's launch handle before a capture that may follow
        with handles.loading_handle(key.device) as handle:
            built = _loaded(handle, key, stored)
        plan = Plan(key, built, constants_of(key))
    plan.build_seconds, plan.loaded, plan.tuned = time.perf_counter() - start, True, stored.tuned
    return plan


def _loaded(handle: Handle, key: PlanKey, stored: StoredPlan) -> backend.BuiltGraph:
    try:
        built = backend.load_graph(handle, stored.data, stored.engine, stored.knobs)
        if built.workspace != stored.workspace:
            raise ValueError(f"it needs {built.workspace} bytes of workspace, not {stored.workspace}")
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and _GPU_FAILURE.search(str(error)):
            raise ExecutionError(f"the stored plan of {key.name} could not be loaded: {error}") from error
        raise BadPlanFileError(f"cuDNN rejects it ({shortened(str(error))})") from error
    return built


def build_plan(operation: GraphDefinition, key: PlanKey) -> Plan:
    """Plans and compiles `key` on its GPU, and saves the plan in the plan store, if there is one.

    The key of another provider's plan names its own operation.
    """
    if key.provider != operation.provider:
        operation = find_operation(key.operation)
    if isinstance(operation, ProgramOp):
        _refuse_while_capturing(key)
        return operation.plan(key)
    plan = _compile(operation, key)
    if (store := _store()) is not None:
        store.save(key, stored_form(plan))
    return plan


def _is_compiled(key: PlanKey) -> bool:
    """Whether all that a missing plan needs is compiled, as for a new shape of a known kind: see `ProgramOp`."""
    if key.provider is None:
        return False
    operation = find_operation(key.operation)
    return isinstance(operation, ProgramOp) and operation.is_compiled(key)


def _compile(operation: GraphDefinition, key: PlanKey) -> Plan:
    assert key.device is not None
    start = time.perf_counter()
    with torch.cuda.device(key.device), relaxed_capture(), backend.no_error_left():
        handle = _handle_for(key)
        plan = Plan(key, operation.compile(key, backend.GraphBuilder(handle=handle)), constants_of(key))
        if autotune.in_force:
            plan = _with_candidates(plan, operation, handle)
    plan.build_seconds = time.perf_counter() - start
    return plan


def _with_candidates(plan: Plan, operation: GraphDefinition, handle: Handle) -> Plan:
    if reason := autotune.not_tunable(plan.key):
        autotune.note(plan.key, [AutotuneCandidate(plan.engine, plan.knobs)], reason=reason)
        return plan
    max_count = autotune.max_candidates() - 1
    others = build_others(operation, plan.key, (plan.engine, plan.knobs), max_count, handle=handle)
    candidates = [plan, *(Plan(plan.key, built, plan.constants) for built in others)]
    alternatives = autotune.offered.pop(plan.key, list)
    return UntunedPlan(candidates, alternatives())


def _handle_for(key: PlanKey) -> Handle:
    assert key.device is not None
    _refuse_while_capturing(key)
    return handles.build_handle(key.device)


def _refuse_while_capturing(key: PlanKey) -> None:
    if torch.cuda.is_current_stream_capturing():
        why = (
            "A plan cannot be built while a CUDA graph is being captured; make this call once before the capture, or "
            "record a run's plans with record_plans() and build them with warmup() on this thread."
        )
        raise PlanBuildError(key, why)
