"""Parallel planning in several helper processes."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from cudnn_sdpa.errors import CudnnSdpaError, OfflineError, OptionError, PlanBuildError
from cudnn_sdpa.graph.backend import DeviceProperties
from cudnn_sdpa.graph.diagnostics import shortened
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.offline import interpreter
from cudnn_sdpa.offline.planner import Helper, OfflinePlan, plan_to_keep

#: A plan made in this process, for instance one that is loaded on its GPU.
Made = TypeVar("Made")

#: The result for a key: a helper's plan, this process's, or an error.
Outcome: TypeAlias = OfflinePlan | Made | BaseException

#: A request to test whether a helper has started.
READY = {"ready": True}

#: Maximum default number of helper processes: each takes about 500 MB.
MAX_WORKERS = 8


def default_workers(plans: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_WORKERS, cores, plans))


def check_workers(workers: int | None, min_workers: int) -> None:
    """Checks a number of helper processes.

    Raises:
        OptionError: The number is invalid.
    """
    if workers is not None and (type(workers) is not int or workers < min_workers):
        raise OptionError("workers", repr(workers), f"an integer of at least {min_workers}, or None for one per core")


def plan_all(
    keys: Sequence[PlanKey],
    properties: DeviceProperties,
    workers: int | None = None,
    here: Callable[[PlanKey], Made] | None = None,
) -> Iterator[tuple[PlanKey, OfflinePlan | Made | CudnnSdpaError]]:
    """Plans and compiles keys for the GPU that `properties` describes, and yields them as they are ready.

    A failed plan is yielded with its error; the others continue.

    Args:
        keys: The keys; their target was made from `properties`.
        properties: In the form of cuDNN's device-properties JSON.
        workers: Number of helper processes; None is one per core, at most eight. With 0, `here` plans all keys.
        here: Plans a key in this process. It works from the front of `keys`; helpers, which need seconds to start, work
            from the back.

    Raises:
        OptionError: `workers` is invalid; without `here` it must be at least 1.
        OfflineError: No helper process can start, and there is no `here`.
    """
    check_workers(workers, 1 if here is None else 0)
    return _plan_all(keys, properties, workers, here) if keys else iter(())


def _plan_all(
    keys: Sequence[PlanKey],
    properties: DeviceProperties,
    workers: int | None,
    here: Callable[[PlanKey], Made] | None,
) -> Iterator[tuple[PlanKey, OfflinePlan | Made | CudnnSdpaError]]:
    if here is None:
        interpreter.check()
    elif interpreter.why_no_helper():
        workers = 0
    pending, done = deque(keys), queue.SimpleQueue[tuple[PlanKey, Outcome[Made]]]()

    helpers = [Helper() for _ in range(default_workers(len(keys)) if workers is None else workers)]
    shared = {"pending": pending, "done": done, "properties": properties, "start_first": here is not None}
    threads = [threading.Thread(target=_work, args=(helper,), kwargs=shared, daemon=True) for helper in helpers]
    try:
        for thread in threads:
            thread.start()
        for _ in keys:
            key, result = _next(pending, done, here)
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
            yield key, _as_our_error(key, result) if isinstance(result, Exception) else result
    finally:
        # A thread that waits for an answer ends when its helper is killed, and uses the pipes until then.
        pending.clear()
        for helper in helpers:
            helper.kill()
        for thread in threads:
            thread.join()
        for helper in helpers:
            helper.close()


def _work(
    helper: Helper,
    *,
    pending: deque[PlanKey],
    done: queue.SimpleQueue[tuple[PlanKey, Outcome[Made]]],
    properties: DeviceProperties,
    start_first: bool,
) -> None:
    """Plans keys with a helper until none is left; with `start_first`, only after the helper has started."""
    if start_first:
        try:
            helper.ask(READY)
        except OfflineError:  # this process plans all keys
            return
    while pending:
        with contextlib.suppress(IndexError):  # another thread has taken the last key
            key = pending.pop()
            try:
                done.put((key, plan_to_keep(key, properties, helper)))
            except BaseException as error:  # noqa: BLE001 - the waiting thread gets it
                done.put((key, error))


def _next(
    pending: deque[PlanKey],
    done: queue.SimpleQueue[tuple[PlanKey, Outcome[Made]]],
    here: Callable[[PlanKey], Made] | None,
) -> tuple[PlanKey, Outcome[Made]]:
    """A helper's finished plan or, if there is none, one made here."""
    with contextlib.suppress(queue.Empty):
        return done.get_nowait()
    if here is not None:
        with contextlib.suppress(IndexError):
            key = pending.popleft()
            try:
                return key, here(key)
            except Exception as error:  # noqa: BLE001 - such as a manifest's options that its operation does not have
                return key, error
    return done.get()


def _as_our_error(key: PlanKey, error: Exception) -> CudnnSdpaError:
    if isinstance(error, CudnnSdpaError):
        return error
    ours = PlanBuildError(key, f"It could not be built ({type(error).__name__}: {shortened(str(error))}).")
    ours.__cause__ = error
    return ours
