"""Builds plans before they are needed: `warmup` on a GPU, `compile_plans` for a GPU elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch

from cudnn_sdpa.errors import CudnnSdpaError, DeviceError, OfflineError, OptionError, PlanBuildError
from cudnn_sdpa.graph.backend import DeviceProperties
from cudnn_sdpa.graph.definition import find_operation
from cudnn_sdpa.graph.diagnostics import shortened
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target, live_properties, live_target, load_properties
from cudnn_sdpa.offline import interpreter
from cudnn_sdpa.offline.planner import Helper, OfflinePlan, plan_offline
from cudnn_sdpa.plans.cache import build_plan, load_plan, plan_cache, plan_of
from cudnn_sdpa.plans.default_store import active, open_store
from cudnn_sdpa.plans.manifest import PlanManifest
from cudnn_sdpa.plans.plan import Plan
from cudnn_sdpa.plans.program_plan import ProgramOp
from cudnn_sdpa.plans.store import BadPlanFileError, PlanStore

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
    if workers is not None and (type(workers) is not int or workers < min_workers):
        raise OptionError("workers", repr(workers), f"an integer of at least {min_workers}, or None for one per core")


def plan_all(
    keys: Sequence[PlanKey],
    properties: DeviceProperties,
    workers: int | None = None,
    here: Callable[[PlanKey], Made] | None = None,
) -> Iterator[tuple[PlanKey, OfflinePlan | Made | CudnnSdpaError]]:
    """Plans and compiles keys for the GPU that `properties` describes, and yields them as they are ready.

    A failed plan is yielded with its error; the others continue. `workers` is as for `warmup`. `here` plans a key in
    this process, from the front of `keys`; helpers, which need seconds to start, work from the back.
    """
    if not keys:
        return
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
                plan = plan_offline(key, properties, helper)
                if plan.note:  # the GPU would build a much faster one
                    why = f"{key.name} must be built on the GPU, by the first call or by warmup: {plan.note}"
                    raise OfflineError(why)
                done.put((key, plan))
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


_log = logging.getLogger("cudnn_sdpa")

T = TypeVar("T")


@dataclass
class WarmupReport:
    """The result of `warmup` or `compile_plans`.

    Attributes:
        held: Plans that were already in memory.
        loaded: Plans loaded from the plan store.
        built: Plans built.
        failed: Plans that could not be built, as text, with the reason; for `compile_plans` also those that the folder
            could not keep, and those that must be built on the GPU, because cuDNN makes them much faster there.
        seconds: Time taken.
    """

    held: int = 0
    loaded: int = 0
    built: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def warmup(
    manifest: PlanManifest | str | Path,
    *,
    device: int | None = None,
    progress: bool = False,
    workers: int | None = None,
) -> WarmupReport:
    """Loads or builds the plans of a manifest in this process, so that no call waits for one.

    Stored plans are loaded; this process and helper processes build the rest and save them in the store if there is
    one. Helpers use no GPU memory, and need seconds to start. From Hopper on, only this process builds plans of norms,
    gated activations, convolutions and custom graphs, because cuDNN has faster kernels for them when it sees the GPU.

    Args:
        manifest: A manifest, or the path of one.
        device: Index of the GPU; None is the current one.
        progress: Whether to show a progress bar on the terminal.
        workers: Number of helper processes; None is one per core, at most eight; 0 builds all plans in this process.

    Returns:
        A report. A plan that cannot be built is listed with the reason; the others continue.

    Raises:
        OptionError: The manifest cannot be read or names a missing operation, or `workers` is invalid.
        DeviceError: There is no GPU.

    Examples:
        >>> import cudnn_sdpa
        >>> report = cudnn_sdpa.warmup("plans.json")  # doctest: +SKIP
    """
    plans = _manifest(manifest)
    check_workers(workers, 0)
    if not torch.cuda.is_available():
        raise DeviceError("device", "no NVIDIA GPU visible to PyTorch", "a GPU; compile plans without one instead")
    start, report = time.perf_counter(), WarmupReport()
    device = torch.cuda.current_device() if device is None else device
    keys = plans.keys(live_target(device), device)
    missing = []
    for key in keys:
        if plan_cache.peek(key) is not None:
            report.held += 1
        elif (plan := load_plan(key)) is not None:
            plan_cache.put(plan)
            report.loaded += 1
        else:
            missing.append(key)
    store = active()
    own = [key for key in missing if _is_for_this_process(key)]
    shared = [key for key in missing if key not in own]
    properties = live_properties(device)
    results = chain(plan_all(shared, properties, workers, _build), plan_all(own, properties, 0, _build))
    for key, plan_or_error in _shown(results, len(missing), progress):
        if isinstance(plan_or_error, CudnnSdpaError):
            report.failed[str(key)] = str(plan_or_error)
            continue
        if isinstance(plan_or_error, Plan):  # already in the store
            plan_cache.put(plan_or_error)
            report.built += 1
            continue
        try:
            plan_cache.put(plan_of(key, plan_or_error))
        except BadPlanFileError as error:
            report.failed[str(key)] = f"a helper process built it, but on this GPU {error}"
            continue
        report.built += 1
        if store is not None:
            store.save(key, plan_or_error)
    report.seconds = time.perf_counter() - start
    return report


def _is_for_this_process(key: PlanKey) -> bool:
    """Helpers, which see no GPU, would make a slower plan or none."""
    return key.is_gpu_specific or isinstance(find_operation(key.operation, only_imported=True), ProgramOp)


def _build(key: PlanKey) -> Plan:
    return build_plan(find_operation(key.operation, only_imported=True), key)


def compile_plans(
    manifest: PlanManifest | str | Path,
    target: str,
    folder: str | Path,
    *,
    progress: bool = False,
    workers: int | None = None,
) -> WarmupReport:
    """Compiles the plans of a manifest for a GPU, without having it, into a folder for `use_plan_store`.

    The plans serve machines with that GPU and the versions of this package, cuDNN and its frontend installed here.

    Args:
        manifest: A manifest, or the path of one.
        target: The GPU: a name such as "h200", or the path of a file that `python -m cudnn_sdpa device --json` wrote.
        folder: Output folder, created if missing.
        progress: Whether to show a progress bar on the terminal.
        workers: Number of helper processes; None is one per core, at most eight.

    Returns:
        A report. Plans that the folder does not have in the end are among the failed ones.

    Raises:
        OptionError: The manifest or the target cannot be read, the manifest names a missing operation, the folder
            cannot be used or is open to others, or `workers` is not a positive integer.
        OfflineError: No helper process can be started here, for example in a frozen program.
    """
    start, report = time.perf_counter(), WarmupReport()
    properties = load_properties(target)
    check_workers(workers, 1)
    if folder is None:
        raise OptionError("folder", "None", "the path of a folder")
    store = open_store(folder, "folder")
    missing, held, built = list[PlanKey](), list[PlanKey](), list[PlanKey]()
    for key in _manifest(manifest).keys(Target.from_properties(properties), None):
        operation = find_operation(key.operation, only_imported=True)
        if isinstance(operation, ProgramOp):
            try:
                (built if operation.compile_into(store, key) else held).append(key)
            except CudnnSdpaError as error:
                report.failed[str(key)] = str(error)
        elif store.load(key) is not None:
            held.append(key)
        else:
            missing.append(key)
    for key, plan_or_error in _shown(plan_all(missing, properties, workers), len(missing), progress):
        if isinstance(plan_or_error, CudnnSdpaError):
            report.failed[str(key)] = str(plan_or_error)
        elif store.save(key, plan_or_error):
            built.append(key)
        else:
            report.failed[str(key)] = _not_kept(store)
    for key in chain(held, built):
        if not _is_in(store, key):
            report.failed[str(key)] = _not_kept(store)
    report.held, report.built = (sum(str(key) not in report.failed for key in keys) for keys in (held, built))
    report.seconds = time.perf_counter() - start
    return report


def _is_in(store: PlanStore, key: PlanKey) -> bool:
    operation = find_operation(key.operation, only_imported=True)
    return operation.is_in(store, key) if isinstance(operation, ProgramOp) else store.has(key)


def _not_kept(store: PlanStore) -> str:
    evicted = f"later plans have taken its place (it holds {store.capacity:,} bytes, as far as the disk has room)"
    return f"{store.folder} does not have it: {store.write_error or evicted}"


def _manifest(manifest: PlanManifest | str | Path) -> PlanManifest:
    loaded = manifest if isinstance(manifest, PlanManifest) else PlanManifest.load(manifest)
    if not len(loaded):
        _log.warning("the manifest has no plans; nothing to do")
    return loaded


def _shown(results: Iterable[T], count: int, progress: bool) -> Iterable[T]:
    if not progress:
        return results
    from rich.progress import track

    return track(results, "plans", total=count)
