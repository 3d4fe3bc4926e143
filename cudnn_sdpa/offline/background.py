"""Background plan builds in helper processes that use no GPU."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cudnn_sdpa.graph.backend import DeviceProperties
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.private_memory import relaxed_capture
from cudnn_sdpa.graph.target import live_properties
from cudnn_sdpa.offline import interpreter
from cudnn_sdpa.offline.planner import Helper, plan_offline
from cudnn_sdpa.plans import default_store
from cudnn_sdpa.plans.cache import plan_cache, plan_of
from cudnn_sdpa.plans.store import BadPlanFileError, StoredPlan

_log = logging.getLogger("cudnn_sdpa")

#: Seconds after which an idle helper ends; it takes about 500 MB of host memory.
IDLE_SECONDS = 60.0

#: Maximum number of pending requests; callers may retry later.
MAX_WAITING = 256

#: Helpers run at the lowest CPU priority.
NICENESS = 10


@dataclass(eq=False)
class Request:
    """A request for a plan; `then` is called with it in the background."""

    key: PlanKey
    properties: DeviceProperties
    then: Callable[[StoredPlan], None]
    is_done: bool = False


class BackgroundPlanner:
    """Builds plans in the background, one after the other. Only `wait` and `close` block."""

    def __init__(self) -> None:
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Resets a forked child, which lacks its parent's threads and must not use its helpers."""
        self._lock = threading.RLock()  # a signal handler may make a call within
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._pending: dict[PlanKey, Request] = {}
        self._helper: Helper | None = None
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()
        self._closed = bool(interpreter.why_no_helper())

    def request(self, key: PlanKey, properties: DeviceProperties, then: Callable[[StoredPlan], None]) -> Request | None:
        """Requests a plan, and a call of `then` with it. Repeating a pending request returns the same one.

        None if it is rejected: too many are pending, or no helper can start.
        """
        with self._lock:
            request = self._pending.get(key)
            if request is not None or self._closed or len(self._pending) >= MAX_WAITING:
                return request
            if self._thread is None and not self._start_thread():
                return None
            request = self._pending[key] = Request(key, properties, then)
            self._queue.put(request)
            return request

    def _start_thread(self) -> bool:
        thread = threading.Thread(target=self._work, name="cudnn_sdpa plans", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # too many threads, or the interpreter is shutting down
            self._warn(f"no plans are built in the background: {error}")
            return False
        self._thread = thread
        return True

    def wait(self, timeout: float) -> bool:
        """Waits until all requests are done. For tests and benchmarks."""
        end = time.monotonic() + timeout
        while self._pending and time.monotonic() < end:
            time.sleep(0.01)
        return not self._pending

    def close(self) -> None:
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            self._queue.put(None)
            if self._helper is not None:
                self._helper.kill()
        if thread is not None:
            thread.join(timeout=2.0)

    def _work(self) -> None:
        helper = Helper(NICENESS)
        with self._lock:
            self._helper = helper
            if self._closed:
                helper.kill()
        try:
            while (request := self._next()) is not None:
                try:
                    stored = self._plan(helper, request)
                    if stored is not None:
                        request.then(stored)
                except Exception as error:  # noqa: BLE001 - after any error, the next plan may still succeed
                    self._warn(f"a plan was not built in the background: {type(error).__name__}: {error}")
                self._finish(request)
        finally:
            helper.close()
            with self._lock:
                if self._helper is helper:  # not a later thread's
                    self._helper = None
                if self._thread is threading.current_thread():
                    self._thread = None

    def _next(self) -> Request | None:
        """The next request; None after a long idle time, or when closed."""
        try:
            return self._queue.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            pass
        with self._lock:  # or a request could arrive between the last check and the thread's end
            if not self._queue.empty():
                return self._queue.get()
            self._thread = None
            return None

    def _plan(self, helper: Helper, request: Request) -> StoredPlan | None:
        if self._closed:
            return None
        store = default_store.active()
        if store is not None and (stored := store.load(request.key)) is not None:  # another process has built it
            return stored
        stored = plan_offline(request.key, request.properties, helper)
        if store is not None:
            store.save(request.key, stored)
        return stored

    def _finish(self, request: Request) -> None:
        request.is_done = True
        with self._lock:
            self._pending.pop(request.key, None)

    def _warn(self, message: str) -> None:
        """Logs a warning once: the same failure may recur for every shape of a server."""
        if not self._closed:
            _log.log(logging.DEBUG if message in self._warned else logging.WARNING, "%s", message)
            self._warned.add(message)


def build_in_background(key: PlanKey) -> Request | None:
    assert key.device is not None
    return background.request(key, live_properties(key.device), partial(_hold, key))


def _hold(key: PlanKey, stored: StoredPlan) -> None:
    """Loads a plan in the background, because CUDA loads a kernel only after all queued work is done."""
    try:
        with relaxed_capture():  # caching this plan may evict another
            plan_cache.put(plan_of(key, stored))
    except BadPlanFileError as error:
        _log.warning("a plan that was built in the background cannot be used: %s: %s", key, error)
        store = default_store.active()
        if store is not None:
            store.reject(key, str(error))


background = BackgroundPlanner()
atexit.register(background.close)
os.register_at_fork(after_in_child=background._start_afresh)
