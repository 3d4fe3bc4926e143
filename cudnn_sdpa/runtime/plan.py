"""A compiled plan: building it on this machine's GPU, and launching it."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from cudnn_sdpa.errors import ExecutionError, PlanBuildError
from cudnn_sdpa.runtime import backend, handles, known_issues, store_setting
from cudnn_sdpa.runtime.capture import relaxed_capture
from cudnn_sdpa.runtime.graph_op import GraphOp
from cudnn_sdpa.runtime.key import PlanKey, Role
from cudnn_sdpa.runtime.layouts import TensorLayout
from cudnn_sdpa.runtime.plan_file import BadPlanFileError, StoredPlan

_current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: torch.cuda.current_stream(device).cuda_stream
)


def _find_allocator() -> Any:
    """`allocate(shape, stride, dtype)` on the current CUDA device.

    What torch.compile's code calls, 0.5 µs less than `torch.empty_strided`, where this PyTorch has it.
    """
    guards = getattr(torch._C, "_dynamo", None)
    private = getattr(getattr(guards, "guards", None), "_empty_strided_cuda", None)
    if private is not None:
        return private
    return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


allocate = _find_allocator()

#: Plans with a launch in a CUDA graph. Nobody can say when a graph is replayed for the last time, so they live as long
#: as the process, whatever the cache does.
captured_plans: list[Plan] = []


class Plan:
    """A compiled plan. It owns its kernels and constants, but no workspace and no handle.

    Attributes:
        key: What it is the plan of.
        engine: Name of cuDNN's engine.
        knobs: The engine's settings.
        workspace: Bytes that a launch allocates beside its outputs.
        build_seconds: How long it took to plan and compile, or to load it.
        loaded: Whether it came out of the plan store.
        last_used: Number of the look-up that found it last; set by the cache.
        place: The number that the cache gave it before its first use.
        held: Whether it is in the plan cache; set by the cache.
        captured: Whether a CUDA graph holds a launch of it; see `captured_plans`.
        constants: Device tensors of the operands whose values the key fixes, by name.
    """

    __slots__ = (
        "_count",
        "_launch",
        "build_seconds",
        "built",
        "captured",
        "constants",
        "device",
        "engine",
        "held",
        "key",
        "knobs",
        "last_used",
        "loaded",
        "place",
        "workspace",
    )

    def __init__(self, key: PlanKey, built: backend.BuiltGraph, constants: dict[str, torch.Tensor]) -> None:
        if key.device is None:
            raise ValueError("a plan that is launched needs a device")
        self.key = key
        self.built = built
        self.engine = built.engine
        self.knobs = built.knobs
        self.workspace = built.workspace
        self.constants = constants
        self.device = key.device
        self.build_seconds = 0.0
        self.loaded = False
        self.last_used = self.place = 0
        self.captured = False
        self.held = False
        self._count = len(key.inputs) + len(key.outputs)
        self._launch = built.launcher(list(range(1, 1 + self._count)))

    def launch(self, pointers: Sequence[int]) -> None:
        """Launches the plan on the current stream of its device, which must be the current device.

        Args:
            pointers: Of all inputs, then all outputs, in the key's order. Nothing is checked here.
        """
        device = self.device
        stream = _current_raw_stream(device)
        slot = handles.thread.slots[device]
        if slot.stream != stream:
            slot.bind(stream)
        if stream and torch._C._cuda_isCurrentStreamCapturing():  # a capture is never on the default stream
            self._keep_for_graphs()
        size = self.workspace
        if stream == 0 and size <= handles.SCRATCH_BYTES:
            scratch = slot.scratch  # saves an allocation, 0.9 µs
        elif size:
            workspace = allocate((size,), (1,), torch.uint8)
            scratch = workspace.data_ptr()
        else:
            scratch = 0
        operands = array("Q", pointers)  # of this call alone: plans are launched by many threads at once
        try:
            self._launch(operands.buffer_info()[0], self._count, scratch, slot.raw, -1)
        except RuntimeError as error:
            raise backend.execution_error(error, str(self.key)) from error

    def _keep_for_graphs(self) -> None:
        if not self.captured:
            fault = known_issues.not_in_capture(self.key)
            if fault:
                raise ExecutionError(f"{self.key.name} cannot be captured in a CUDA graph: {fault}")
            self.captured = True
            captured_plans.append(self)


def load_plan(key: PlanKey) -> Plan | None:
    """The plan of `key` out of the plan store, if there is a store and it has one for this GPU."""
    plans = store_setting.active()
    stored = None if plans is None else plans.load(key)
    if plans is None or stored is None:
        return None
    try:
        return plan_of(key, stored)
    except BadPlanFileError as error:
        plans.reject(key, str(error))
        return None


def plan_of(key: PlanKey, stored: StoredPlan) -> Plan:
    """The plan of `key` out of its stored form.

    Raises:
        BadPlanFileError: cuDNN does not take it here.
        PlanBuildError: A CUDA graph is being captured on this stream.
    """
    assert key.device is not None
    start = time.perf_counter()
    with torch.cuda.device(key.device), relaxed_capture():
        handle = _handle_for(key)
        try:
            built = backend.load_graph(handle, stored.data, stored.engine, stored.knobs)
            if built.workspace != stored.workspace:
                raise ValueError(f"it wants {built.workspace} bytes of workspace, not {stored.workspace}")
        except Exception as error:  # whatever cuDNN says of a file, it can be built again
            raise BadPlanFileError(f"cuDNN does not take it ({error})") from error
        plan = Plan(key, built, _constants_of(key))
    plan.build_seconds, plan.loaded = time.perf_counter() - start, True
    return plan


def build_plan(operation: GraphOp, key: PlanKey) -> Plan:
    """Plans and compiles `key` on the GPU that it names, and keeps the plan in the plan store, if there is one.

    Raises:
        UnsupportedError: cuDNN has no engine for it.
        PlanBuildError: A CUDA graph is being captured on this stream.
    """
    plans = store_setting.active()
    if plans is None:
        return _compile(operation, key)
    with plans.building(key):
        plan = load_plan(key)  # another process may have built it meanwhile
        if plan is None:
            plan = _compile(operation, key)
            plans.save(key, _stored(plan))
        return plan


def _compile(operation: GraphOp, key: PlanKey) -> Plan:
    assert key.device is not None
    start = time.perf_counter()
    with torch.cuda.device(key.device), relaxed_capture():
        built = operation.compile(key, backend.GraphBuilder(handle=_handle_for(key)))
        plan = Plan(key, built, _constants_of(key))
    plan.build_seconds = time.perf_counter() - start
    return plan


def _stored(plan: Plan) -> StoredPlan:
    data = plan.built.serialize()
    return StoredPlan(plan.key.identity(), plan.engine, plan.knobs, plan.workspace, plan.build_seconds, data)


def _handle_for(key: PlanKey) -> Any:
    """The handle to build or load a plan with, on the current device."""
    assert key.device is not None
    if torch.cuda.is_current_stream_capturing():
        why = "A plan cannot be built while a CUDA graph is being captured; make this call once before the capture."
        raise PlanBuildError(key, why)
    return handles.build_handle(key.device)


def _constants_of(key: PlanKey) -> dict[str, torch.Tensor]:
    assert key.device is not None
    fills = [operand for operand in key.inputs if operand.role is Role.FILL]
    return {operand.name: _constant(key.device, operand.layout, operand.fill) for operand in fills}


_constants: dict[tuple[int, TensorLayout, int], torch.Tensor] = {}
_constants_lock = threading.Lock()


def _constant(device: int, layout: TensorLayout, value: int) -> torch.Tensor:
    """A filled tensor that lives as long as the process: when a plan goes, launches of it may still be waiting.

    There is one for each batch size and value, of half a kilobyte on the GPU.
    """
    with _constants_lock:  # two threads must not make two, of which one would go with its plan
        tensor = _constants.get((device, layout, value))
        if tensor is None:
            tensor = torch.full(layout.shape, value, dtype=layout.dtype, device=f"cuda:{device}")
            torch.cuda.current_stream(device).synchronize()  # launches may come on other streams
            _constants[device, layout, value] = tensor
    return tensor
