"""A compiled plan: building it on this machine's GPU, and launching it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from cudnn_sdpa.errors import ExecutionError
from cudnn_sdpa.graph import backend, handles, known_issues
from cudnn_sdpa.graph.handles import SCRATCH_BYTES
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.plans.file_format import StoredPlan

current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: torch.cuda.current_stream(device).cuda_stream
)

current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


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
        tuned: Whether it was chosen by its time; see `autotune`.
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
        "tuned",
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
        self.tuned = False
        self._count = len(key.inputs) + len(key.outputs)
        self._launch = built.launcher(list(range(1, 1 + self._count)))

    def launch(self, pointers: Sequence[int]) -> None:
        """Launches the plan on the current stream of its device, which must be the current device.

        Args:
            pointers: Of all inputs, then all outputs, in the key's order. Nothing is checked here.
        """
        device = self.device
        stream = current_raw_stream(device)
        slot = handles.thread.slots[device]
        if slot.stream != stream:
            slot.bind(stream)
        if stream and torch._C._cuda_isCurrentStreamCapturing():  # a capture is never on the default stream
            self._keep_for_graphs()
        size = self.workspace
        if stream == 0 and size <= SCRATCH_BYTES:
            scratch = slot.scratch  # saves an allocation, 0.9 µs
        elif size:
            workspace = allocate((size,), (1,), torch.uint8)
            scratch = workspace.data_ptr()
        else:
            scratch = 0
        # Of this call alone: plans are launched by many threads at once.
        operands = pointers if type(pointers) is array else array("Q", pointers)
        try:
            self._launch(operands.buffer_info()[0], self._count, scratch, slot.raw, -1)
        except RuntimeError as error:
            raise backend.execution_error(error, str(self.key)) from error

    def launch_kept(self, operands: array[int], workspace: int) -> None:
        """The same with memory that the caller keeps: saves 1.5 µs.

        Args:
            operands: The pointers.
            workspace: Address of at least `workspace` bytes, which no launch on another stream uses meanwhile.
        """
        stream = current_raw_stream(self.device)
        slot = handles.thread.slots[self.device]
        if slot.stream != stream:
            slot.bind(stream)
        if stream and torch._C._cuda_isCurrentStreamCapturing():
            self._keep_for_graphs()
        try:
            self._launch(operands.buffer_info()[0], self._count, workspace, slot.raw, -1)
        except RuntimeError as error:
            raise backend.execution_error(error, str(self.key)) from error

    def _keep_for_graphs(self) -> None:
        if not self.captured:
            fault = known_issues.not_in_capture(self.key)
            if fault:
                raise ExecutionError(f"{self.key.name} cannot be captured in a CUDA graph: {fault}")
            self.captured = True
            captured_plans.append(self)


def stored_form(plan: Plan) -> StoredPlan:
    """What the plan store keeps of a plan that was built."""
    data = plan.built.serialize()
    known = (plan.key.identity(), plan.engine, plan.knobs, plan.workspace, plan.build_seconds, data)
    return StoredPlan(*known, tuned=plan.tuned)
