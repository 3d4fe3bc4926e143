"""Many plans at once, by several helper processes."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from cudnn_sdpa.errors import CudnnSdpaError
from cudnn_sdpa.offline.planner import Helper, OfflinePlan, plan_offline
from cudnn_sdpa.runtime.key import PlanKey

#: Most helper processes that are started without being asked for more: each takes some 500 MB.
MOST_WORKERS = 8


def default_workers(plans: int) -> int:
    """How many helper processes to start for so many plans."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, cores, plans))


def plan_all(
    keys: Sequence[PlanKey], properties: dict[str, Any], workers: int | None = None
) -> Iterator[tuple[PlanKey, OfflinePlan | CudnnSdpaError]]:
    """Plans and compiles keys for the GPU that `properties` describes, and gives them as they are ready.

    A plan that fails comes with its error, and stops no other one.

    Args:
        keys: The keys; their target was made from `properties`.
        properties: In the form of cuDNN's device-properties JSON.
        workers: Helper processes; None is one for each core, and at most eight.
    """
    if not keys:
        return
    workers = default_workers(len(keys)) if workers is None else workers
    helpers = [Helper() for _ in range(workers)]
    idle: queue.SimpleQueue[Helper] = queue.SimpleQueue()
    for helper in helpers:
        idle.put(helper)

    def work(key: PlanKey) -> OfflinePlan:
        helper = idle.get()
        try:
            return plan_offline(key, properties, helper)
        finally:
            idle.put(helper)

    try:
        with ThreadPoolExecutor(workers) as threads:
            futures = {threads.submit(work, key): key for key in keys}
            try:
                for future in as_completed(futures):
                    error = future.exception()
                    if isinstance(error, CudnnSdpaError):
                        yield futures[future], error
                    else:
                        yield futures[future], future.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
    finally:
        for helper in helpers:
            helper.close()
