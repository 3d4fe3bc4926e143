"""Plans built beside the running program, by helper processes that use no GPU."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from typing import Any

from cudnn_sdpa.errors import CudnnSdpaError
from cudnn_sdpa.offline.planner import Helper, plan_offline
from cudnn_sdpa.runtime import store_setting
from cudnn_sdpa.runtime.key import PlanKey
from cudnn_sdpa.runtime.plan_file import StoredPlan

_log = logging.getLogger("cudnn_sdpa")

#: A helper that has had nothing to do for so long ends; it takes some 500 MB of the machine's memory.
IDLE_SECONDS = 60.0

#: Most plans that wait for being built. Who asks for one more may ask again later.
MOST_WAITING = 256

#: Helpers leave the processor to everybody else.
NICENESS = 10


class Request:
    """A plan that was asked for.

    Attributes:
        key: Of the plan.
        properties: Of the GPU that it is for.
        is_done: Whether it is built, or has failed.
        stored: The plan; None until it is done, and if it has failed.
    """

    __slots__ = ("is_done", "key", "properties", "stored")

    def __init__(self, key: PlanKey, properties: dict[str, Any]) -> None:
        self.key = key
        self.properties = properties
        self.is_done = False
        self.stored: StoredPlan | None = None


class BackgroundPlanner:
    """Builds plans in the background. Nothing here waits, but for `wait` and `close`."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self._start_afresh()

    def _start_afresh(self) -> None:
        """A forked child has none of its parent's threads, and must not speak to its helpers."""
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._asked: dict[PlanKey, Request] = {}
        self._helpers: list[Helper] = []
        self._threads: list[threading.Thread] = []
        self._closed = False

    def request(self, key: PlanKey, properties: dict[str, Any]) -> Request | None:
        """Has a plan built. Asking again while it is built gives the same request; None if too many are waiting."""
        with self._lock:
            asked = self._asked.get(key)
            if asked is not None or self._closed or len(self._asked) >= MOST_WAITING:
                return asked
            asked = self._asked[key] = Request(key, properties)
            self._queue.put(asked)
            if len(self._threads) < min(self.workers, len(self._asked)):
                thread = threading.Thread(target=self._work, name="cudnn_sdpa plans", daemon=True)
                self._threads.append(thread)
                thread.start()
            return asked

    def wait(self, timeout: float) -> bool:
        """Waits until everything that was asked for is built. For tests and benchmarks."""
        end = time.monotonic() + timeout
        while self._asked and time.monotonic() < end:
            time.sleep(0.01)
        return not self._asked

    def close(self) -> None:
        """Ends the helpers; what is being built is given up."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
            for _ in threads:
                self._queue.put(None)
            for helper in self._helpers:
                helper.kill()
        for thread in threads:
            thread.join(timeout=2.0)

    def _work(self) -> None:
        helper = Helper(NICENESS)
        with self._lock:
            self._helpers.append(helper)
        try:
            while (request := self._next()) is not None:
                request.stored = self._plan(helper, request)
                request.is_done = True
                with self._lock:
                    self._asked.pop(request.key, None)
        finally:
            helper.close()
            with self._lock:
                self._helpers.remove(helper)

    def _next(self) -> Request | None:
        """The next request; None when there has been none for long, or no more are taken."""
        try:
            return self._queue.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            pass
        with self._lock:  # so that no request is made between the last look and the thread's end
            if not self._queue.empty():
                return self._queue.get()
            self._threads = [thread for thread in self._threads if thread is not threading.current_thread()]
            return None

    def _plan(self, helper: Helper, request: Request) -> StoredPlan | None:
        if self._closed:
            return None
        try:
            made = plan_offline(request.key, request.properties, helper)
        except (CudnnSdpaError, OSError, ValueError) as error:
            if not self._closed:
                _log.warning("no plan was built in the background for %s: %s", request.key, error)
            return None
        stored = StoredPlan(
            request.key.identity(), made.engine, made.knobs, made.workspace, made.build_seconds, made.data
        )
        store = store_setting.active()
        if store is not None:
            store.save(request.key, stored)
        return stored


background = BackgroundPlanner()
atexit.register(background.close)
os.register_at_fork(after_in_child=background._start_afresh)
