"""A compiled plan: building it on this machine's GPU, and launching it."""

from __future__ import annotations

import functools
import threading
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cudnn_sdpa.errors import ExecutionError
from cudnn_sdpa.runtime import backend, handles, known_issues, store_setting, trials, tuning
from cudnn_sdpa.runtime.capture import relaxed_capture
from cudnn_sdpa.runtime.handles import SCRATCH_BYTES
from cudnn_sdpa.runtime.key import PlanKey
from cudnn_sdpa.runtime.plan_file import StoredPlan

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

#: For each GPU: plans that are timed at the same time disturb each other.
_tuning_locks: dict[int, threading.RLock] = {}


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
        rivals: What else there is for the key, before that is decided.
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
        "rivals",
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
        self.rivals: list[Rival] = []
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


class Rival(NamedTuple):
    """Another configuration for a plan's key: its plan, or why there is none."""

    configuration: backend.Configuration
    plan: Plan | str


class UntunedPlan(Plan):
    """A plan with rivals. Its first launch under `autotune` takes the best over, and makes a plain `Plan` of it.

    Until then launches hold a lock, so that no thread meets a plan half replaced; afterwards they are a plain plan's.
    """

    __slots__ = ()

    def launch(self, pointers: Sequence[int]) -> None:
        """As a plain plan's. The first one under `autotune` waits for the GPU, and leaves the winner's results."""
        with _tuning_locks.setdefault(self.device, threading.RLock()):
            if type(self) is UntunedPlan:
                self._settle(pointers)
            Plan.launch(self, pointers)

    def launch_kept(self, operands: array[int], workspace: int) -> None:
        """As `launch`: another workspace may be wanted in the end."""
        self.launch(operands)

    def _settle(self, pointers: Sequence[int]) -> None:
        stream = current_raw_stream(self.device)
        capturing = stream and torch._C._cuda_isCurrentStreamCapturing()
        if capturing and not tuning.must_not_change(self.key):
            return  # the first launch outside the capture decides
        with relaxed_capture():  # plans are let go here, too
            try:
                if capturing:
                    why = "it was first launched into a CUDA graph, and must not change"
                    tuning.note(self.key, candidates(self), reason=why)
                elif tuning.is_in_force():
                    self._tune(pointers)
            finally:
                self.rivals = []
                self.__class__ = Plan  # type: ignore[assignment]

    def _tune(self, pointers: Sequence[int]) -> None:
        field = [self, *(rival.plan for rival in self.rivals)]
        launches = [plan if isinstance(plan, str) else functools.partial(Plan.launch, plan, pointers) for plan in field]
        try:
            outputs = trials.output_tensors(self.key, pointers, torch.device("cuda", self.device))
            outcomes = trials.compare(launches, outputs, repeatable=tuning.must_not_change(self.key))
        except Exception as error:  # noqa: BLE001 - nobody's launch fails because plans cannot be compared
            tuning.note(self.key, candidates(self), reason=str(error) or type(error).__name__)
            return
        winner = field[number := trials.fastest(outcomes)]
        tuning.note(self.key, candidates(self), outcomes, number)
        if isinstance(winner, Plan) and winner is not self:
            self._take_over(winner)
        self.tuned = True
        if (plans := store_setting.active()) is not None:
            plans.save(self.key, stored_form(self))

    def _take_over(self, winner: Plan) -> None:
        for name in ("built", "engine", "knobs", "workspace", "_launch"):
            mine = getattr(self, name)
            setattr(self, name, getattr(winner, name))
            setattr(winner, name, mine)
        if self.captured:
            captured_plans.append(winner)  # which is now what the CUDA graph launches


def candidates(plan: Plan) -> list[tuning.AutotuneCandidate]:
    """A plan that holds cuDNN's first choice, and its rivals, for a report."""
    rivals = (tuning.AutotuneCandidate(*rival.configuration) for rival in plan.rivals)
    return [tuning.AutotuneCandidate(plan.engine, plan.knobs), *rivals]


def stored_form(plan: Plan) -> StoredPlan:
    """What the plan store keeps of a plan that was built."""
    data = plan.built.serialize()
    known = (plan.key.identity(), plan.engine, plan.knobs, plan.workspace, plan.build_seconds, data)
    return StoredPlan(*known, tuned=plan.tuned)
