"""A compiled plan and its launch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from cudnn_sdpa.errors import ExecutionError
from cudnn_sdpa.graph import backend, handles, known_issues
from cudnn_sdpa.graph.handles import SCRATCH_BYTES
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.plans.store import StoredPlan

current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: torch.cuda.current_stream(device).cuda_stream
)

current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

#: Allocates an uninitialized tensor on the current CUDA device: (shape, stride, dtype).
Allocator: TypeAlias = Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]


def _find_allocator() -> Allocator:
    """The allocator of torch.compile's code, if this PyTorch has it: 0.5 µs faster than `torch.empty_strided`."""
    guards = getattr(torch._C, "_dynamo", None)
    private: Allocator | None = getattr(getattr(guards, "guards", None), "_empty_strided_cuda", None)
    if private is not None:
        return private
    return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


allocate = _find_allocator()

#: PyTorch's allocator begins memory at multiples of this.
_APART = 512


def side_by_side(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Byte offsets of memory of these sizes in one allocation, and its size."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(-(-end // _APART) * _APART)
        end = offsets[-1] + size
    return offsets, end


#: Plans with a launch in a CUDA graph. A graph may be replayed at any time, so they live as long as the process, even
#: after eviction.
captured_plans: list[Plan] = []


class Plan:
    """A compiled plan. It owns its kernels and constants, but no handle and no workspace.

    Each launch uses the calling thread's handle. Its workspace comes from PyTorch's allocator and goes back at once,
    for later work on the same stream; on the default stream, a small one is the thread's scratch memory. So any number
    of threads and streams can launch one plan at once.

    The cache sets `held`, `last_used` and `added_at`, numbers of uses; the native module sets `native_use`, which is
    part of `last_used`; `captured_plans` sets `captured`, whether a CUDA graph contains a launch. `constants` are
    device tensors for operands whose values the key fixes. `recorder` says who launches the plan where launches are
    recorded (`engine/recorded`).
    """

    __slots__ = (
        "_execute",
        "_last_used",
        "added_at",
        "build_seconds",
        "built",
        "captured",
        "constants",
        "count",
        "device",
        "engine",
        "held",
        "key",
        "knobs",
        "loaded",
        "native_use",
        "recorder",
        "tuned",
        "workspace",
    )

    def __init__(self, key: PlanKey, built: backend.BuiltGraph, constants: dict[str, Tensor]) -> None:
        if key.device is None:
            raise ValueError("launching a plan needs a device")
        self.key = key
        self.built = built
        self.engine = built.engine
        self.knobs = built.knobs
        self.workspace = built.workspace
        self.constants = constants
        self.device = key.device
        self.build_seconds = 0.0
        self.loaded = False
        self._start_counting()
        self.captured = False
        self.held = False
        self.tuned = False
        self.recorder: object = None
        self.count = len(key.inputs) + len(key.outputs)
        self._execute = built.executor(list(range(1, 1 + self.count)))

    #: Whether its launches may be recorded, as making them takes the host longer than what they launch.
    can_be_recorded = True

    @property
    def launched_by(self) -> str:
        """The name of the library that launches it where its launches are not recorded."""
        return "cuDNN"

    def execution(self, native: Any, handle: int, stream: int) -> tuple[Any, int]:
        """The function that executes the plan on a stream while it is recorded, as `backend.Execute`, and its handle.

        Args:
            native: The launches in the native module.
            handle: cuDNN's, bound to the stream.
            stream: The stream.
        """
        return self._execute, handle

    def why_not_recorded(self) -> str:
        """The reason against recording its launches; empty if there is none."""
        return ""

    def _start_counting(self) -> None:
        self._last_used = self.added_at = 0
        self.native_use = array("Q", (0,))

    @property
    def last_used(self) -> int:
        return max(self._last_used, self.native_use[0] << 64)

    @last_used.setter
    def last_used(self, use: int) -> None:
        self._last_used = use

    def launch(self, pointers: Sequence[int]) -> None:
        """Launches the plan on the current stream of its device, which must be the current device.

        `pointers` are the unchecked addresses of all inputs, then all outputs, in the key's order.
        """
        device = self.device
        stream = current_raw_stream(device)
        slot = handles.thread.slots[device]
        if stream and torch._C._cuda_isCurrentStreamCapturing():  # a capture is never on the default stream
            self.keep_for_graphs()
        size = workspace = 0 if stream == 0 and self.workspace <= SCRATCH_BYTES else self.workspace
        if size:
            allocated = allocate((size,), (1,), torch.uint8)
            workspace = allocated.data_ptr()
        # Local to this call: many threads launch a plan at once.
        operands = pointers if type(pointers) is array else array("Q", pointers)
        address, bound = operands.buffer_info()[0], slot.bound
        while bound[0] != stream:  # last: what an allocation frees, or a signal's handler, may launch on another stream
            slot.bind(stream)
        if stream == 0 and not size:
            workspace = slot.scratch  # saves an allocation, 0.9 µs
        try:  # positional, as the frontend's compiled function takes them: see `backend.Execute`
            self._execute(address, self.count, workspace, slot.raw, -1)
        except RuntimeError as error:
            self.refuse(error)

    def take_filled(self) -> handles.Slot | None:
        """Takes the memory that kernels fill before a launch; None if the call must allocate its own.

        The caller sets `taken[0]` of the slot to 0 once the plan is launched.
        """
        if current_raw_stream(self.device):
            return None
        slot = handles.thread.slots[self.device]
        if slot.taken[0]:
            return None
        if not slot.filled:
            slot.make_filled()
        slot.taken[0] = 1
        return slot

    def refuse(self, error: RuntimeError) -> NoReturn:
        raise backend.execution_error(error, str(self.key)) from error

    def keep_for_graphs(self) -> None:
        if not self.captured:
            bugs = known_issues.not_in_capture(self.key)
            if bugs:
                raise ExecutionError(f"{self.key.name} cannot be captured in a CUDA graph: {bugs}")
            self.captured = True
            captured_plans.append(self)


def stored_form(plan: Plan) -> StoredPlan:
    return StoredPlan(
        identity=plan.key.identity(),
        engine=plan.engine,
        knobs=plan.knobs,
        workspace=plan.workspace,
        build_seconds=plan.build_seconds,
        data=plan.built.serialize(),
        tuned=plan.tuned,
    )
