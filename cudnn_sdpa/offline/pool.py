"""Parallel planning in several helper processes."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from cudnn_sdpa.errors import CudnnSdpaError, OfflineError, OptionError, PlanBuildError
from cudnn_sdpa.graph.diagnostics import shortened
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.offline import interpreter
from cudnn_sdpa.offline.planner import Helper, OfflinePlan, plan_to_keep

Made = TypeVar("Made")

#: A request whose answer shows that a helper has started.
READY = {"ready": True}

#: Maximum default number of helper processes: each takes about 500 MB.
MAX_WORKERS = 8


def default_workers(plans: int) -> int:
    """Default number of helper processes for this many plans."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_WORKERS, cores, plans))


def check_workers(workers: int | None, fewest: int) -> None:
    """Checks a number of helper processes.

    Raises:
        OptionError: It is invalid.
    """
    if workers is not None and (type(workers) is not int or workers < fewest):
        raise OptionError("workers", repr(workers), f"an integer of at least {fewest}, or None for one per core")


def plan_all(
    keys: Sequence[PlanKey],
    properties: dict[str, Any],
    workers: int | None = None,
    here: Callable[[PlanKey], Made] | None = None,
) -> Iterator[tuple[PlanKey, OfflinePlan | Made | CudnnSdpaError]]:
    """Plans and compiles keys for the GPU that `properties` describes, and yields them as they are ready.

    A failed plan is yielded with its error; the others continue.

    Args:
        keys: The keys; their target was made from `properties`.
        properties: In the form of cuDNN's device-properties JSON.
        workers: Number of helper processes; None is one per core, at most eight. 0 leaves all to `here`.
        here: Plans a key in this process. It takes keys from the front, while helpers, which need seconds to start,
            take them from the back.

    Raises:
        OptionError: `workers` is invalid; without `here` it must be at least 1.
        OfflineError: No helper process can start, and there is no `here`.
    """
    check_workers(workers, 1 if here is None else 0)
    return _plan_all(keys, properties, workers, here) if keys else iter(())


def _plan_all(
    keys: Sequence[PlanKey],
    properties: dict[str, Any],
    workers: int | None,
    here: Callable[[PlanKey], Made] | None,
) -> Iterator[tuple[PlanKey, OfflinePlan | Made | CudnnSdpaError]]:
    if here is None:
        interpreter.check()
    elif interpreter.why_no_helper():
        workers = 0
    waiting, made = deque(keys), queue.SimpleQueue[tuple[PlanKey, OfflinePlan | Made | BaseException]]()

    helpers = [Helper() for _ in range(default_workers(len(keys)) if workers is None else workers)]
    of_all = (waiting, made, properties, here is not None)
    threads = [threading.Thread(target=_work, args=(helper, *of_all), daemon=True) for helper in helpers]
    try:
        for thread in threads:
            thread.start()
        for _ in keys:
            key, result = _next(waiting, made, here)
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
            yield key, _typed(key, result) if isinstance(result, Exception) else result
    finally:
        waiting.clear()
        for helper in helpers:
            helper.kill()
        for thread in threads:
            thread.join()
        for helper in helpers:
            helper.close()


def _work(
    helper: Helper,
    waiting: deque[PlanKey],
    made: queue.SimpleQueue[tuple[PlanKey, Any]],
    properties: dict[str, Any],
    starts_first: bool,
) -> None:
    """Plans keys with a helper until none are left; with `starts_first` it takes the first key once it has started."""
    if starts_first:
        try:
            helper.ask(READY)
        except OfflineError:  # others will plan all keys
            return
    while waiting:
        with contextlib.suppress(IndexError):  # another has taken the last key
            key = waiting.pop()
            try:
                made.put((key, plan_to_keep(key, properties, helper)))
            except BaseException as error:  # noqa: BLE001 - the waiting thread gets it
                made.put((key, error))


def _next(
    waiting: deque[PlanKey],
    made: queue.SimpleQueue[tuple[PlanKey, Any]],
    here: Callable[[PlanKey], Made] | None,
) -> tuple[PlanKey, Any]:
    """A helper's finished plan or, if there is none, one made here."""
    with contextlib.suppress(queue.Empty):
        return made.get_nowait()
    if here is not None:
        with contextlib.suppress(IndexError):
            key = waiting.popleft()
            try:
                return key, here(key)
            except Exception as error:  # noqa: BLE001 - such as a manifest's options that its operation does not have
                return key, error
    return made.get()


def _typed(key: PlanKey, error: Exception) -> CudnnSdpaError:
    if isinstance(error, CudnnSdpaError):
        return error
    found = PlanBuildError(key, f"It could not be built ({type(error).__name__}: {shortened(str(error))}).")
    found.__cause__ = error
    return found
