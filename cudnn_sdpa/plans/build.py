"""Builds plans on this machine's GPU, or loads them from the plan store."""

from __future__ import annotations

import re
import time

import torch

from cudnn_sdpa.errors import ExecutionError, PlanBuildError
from cudnn_sdpa.graph import backend, handles
from cudnn_sdpa.graph.backend import Handle
from cudnn_sdpa.graph.definition import GraphDefinition
from cudnn_sdpa.graph.diagnostics import shortened
from cudnn_sdpa.graph.heuristics import build_others
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.plans import autotune, default_store
from cudnn_sdpa.plans.autotune import AutotuneCandidate, UntunedPlan
from cudnn_sdpa.plans.device_memory import constants_of, relaxed_capture
from cudnn_sdpa.plans.file_format import BadPlanFileError, StoredPlan
from cudnn_sdpa.plans.kernel_plan import KernelOp
from cudnn_sdpa.plans.plan import Plan, stored_form
from cudnn_sdpa.plans.store import PlanStore


def load_plan(key: PlanKey) -> Plan | None:
    """The plan of `key` from the plan store, if it has one for this GPU; under `autotune` only a tuned one."""
    store = _store()
    if store is None:
        return None
    only_tuned = bool(autotune.in_force) and not autotune.not_tunable(key)
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
    """Plans and compiles `key` on its GPU, and saves the plan in the plan store, if there is one."""
    if isinstance(operation, KernelOp):
        _refuse_while_capturing(key)
        return operation.plan(key)
    plan = _compile(operation, key)
    if (store := _store()) is not None:
        store.save(key, stored_form(plan))
    return plan


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
    return UntunedPlan([plan, *(Plan(plan.key, built, plan.constants) for built in others)])


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
