"""Builds plans before they are needed: `warmup` on a GPU, `compile_plans` for a GPU elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch

from cudnn_sdpa.errors import CudnnSdpaError, DeviceError, OptionError
from cudnn_sdpa.graph.definition import find_operation
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target, live_properties, live_target, load_properties
from cudnn_sdpa.offline.pool import check_workers, plan_all
from cudnn_sdpa.plans.build import build_plan, load_plan, plan_of
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.default_store import active, open_store
from cudnn_sdpa.plans.file_format import BadPlanFileError
from cudnn_sdpa.plans.kernel_plan import KernelOp
from cudnn_sdpa.plans.manifest import PlanManifest
from cudnn_sdpa.plans.plan import Plan
from cudnn_sdpa.plans.store import PlanStore

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
        stored = plan_or_error.stored_form(key)
        try:
            plan_cache.put(plan_of(key, stored))
        except BadPlanFileError as error:
            report.failed[str(key)] = f"a helper process built it, but on this GPU {error}"
            continue
        report.built += 1
        if store is not None:
            store.save(key, stored)
    report.seconds = time.perf_counter() - start
    return report


def _is_for_this_process(key: PlanKey) -> bool:
    """Whether helpers, which see no GPU, would make a slower plan or none."""
    return key.is_gpu_specific or isinstance(find_operation(key.operation, only_imported=True), KernelOp)


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
        if isinstance(operation, KernelOp):
            (built if operation.compile_into(store, key) else held).append(key)
        elif store.load(key) is not None:
            held.append(key)
        else:
            missing.append(key)
    for key, plan_or_error in _shown(plan_all(missing, properties, workers), len(missing), progress):
        if isinstance(plan_or_error, CudnnSdpaError):
            report.failed[str(key)] = str(plan_or_error)
        elif store.save(key, plan_or_error.stored_form(key)):
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
    return operation.is_in(store, key) if isinstance(operation, KernelOp) else store.has(key)


def _not_kept(store: PlanStore) -> str:
    """The failure of a plan that was built, but is not in the folder."""
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
