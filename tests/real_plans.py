"""Real plans on a fake GPU: `Plan` objects, slots and streams, with a stand-in for cuDNN's launch alone.

The fake plans of `fake_gpu` replace `Plan`. Here only the function is replaced that gets an array of raw pointers: it
notes what it was given, overwrites its workspace, and computes the plan's results at its pointers. So which pointer,
workspace, handle and stream a launch gets is tested, on both ways.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fake_gpu import TARGET, Compute, FakePlan, gpu_on_the_cpu, poisoned

from cudnn_sdpa.graph import backend, handles
from cudnn_sdpa.graph.backend import BuiltGraph, DeviceProperties
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline.planner import plan_offline
from cudnn_sdpa.plans.plan import Plan

_handles = itertools.count(7001)


class _Handle:
    """A handle, and the stream that it is bound to. Slots keep it as long as the process lives."""

    def __init__(self) -> None:
        self.backend_handle, self.stream = next(_handles), -1
        _Handle.all[self.backend_handle] = self

    all: dict[int, _Handle] = {}  # noqa: RUF012 - of all devices


@dataclass
class RawLaunch:
    """A launch of a plan.

    Attributes:
        key: Its key.
        pointers: The addresses of its operands, by UID.
        workspace: The address of its workspace.
        handle: The number of its handle.
        stream: The stream to which that was bound.
        thread: The thread.
    """

    key: PlanKey
    pointers: dict[int, int]
    workspace: int
    handle: int
    stream: int
    thread: int = field(default_factory=threading.get_ident)


class _Graph(BuiltGraph):
    """A built graph that the stand-in launches; with `properties` cuDNN has planned it, without its GPU."""

    def __init__(self, device: Device, key: PlanKey, compute: Compute, properties: DeviceProperties | None) -> None:
        if properties is None:
            super().__init__(None, "eng9", {}, device.workspace)
        else:
            planned = plan_offline(key, properties)
            super().__init__(None, planned.engine, planned.knobs, planned.workspace)
        self._device, self._plan = device, FakePlan(key, compute)

    def executor(self, uids: list[int]) -> Callable[..., None]:
        def launch(array: int, count: int, workspace: int, handle: int, index: int) -> None:
            assert index == -1
            assert count == len(uids)
            pointers = list((ctypes.c_uint64 * count).from_address(array))
            note = RawLaunch(
                self._plan.key,
                dict(zip(uids, pointers, strict=True)),
                workspace,
                handle,
                _Handle.all[handle].stream,
            )
            self._device.launches.append(note)
            if self._device.refuses is not None:
                raise self._device.refuses
            self._device.during_launch()
            if self.workspace:
                assert workspace
                assert workspace % 16 == 0
                ctypes.memset(workspace, 0xA5, self.workspace)
            self._plan.launch(pointers)

        return launch


class Device:
    """The fake GPU under real plans.

    Attributes:
        workspace: Size of the workspace of plans that are built.
        launches: All launches.
        refuses: What launches raise.
        during_launch: Called in each launch, before it computes.
        capturing: Whether the current stream is captured.
    """

    def __init__(self, workspace: int) -> None:
        self.workspace, self.capturing = workspace, False
        self.refuses: BaseException | None = None
        self.during_launch: Callable[[], object] = lambda: None
        self.launches: list[RawLaunch] = []
        self._streams = threading.local()

    def current_stream(self, _: int = 0) -> int:
        return int(getattr(self._streams, "current", 0))

    @contextlib.contextmanager
    def stream(self, number: int) -> Iterator[None]:
        before = self.current_stream()
        self._streams.current = number
        try:
            yield
        finally:
            self._streams.current = before

    @property
    def last(self) -> RawLaunch:
        return self.launches[-1]


def _set_stream(handle: _Handle, stream: int) -> None:
    handle.stream = stream


def _memory(size: int) -> torch.Tensor:
    """Memory of a slot, at an address as aligned as a GPU's, full of what no result may contain."""
    memory = torch.full((size + 512,), 0x5A, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 512 :][:size]


@contextlib.contextmanager
def real_plans(
    compute: Compute | None = None,
    *,
    workspace: int = 64,
    allocate: Callable[..., torch.Tensor] = poisoned,
    properties: DeviceProperties | None = None,
) -> Iterator[Device]:
    """CPU tensors are on the first GPU, whose plans are real and compute in plain PyTorch.

    Args:
        compute: As for `gpu_on_the_cpu`.
        workspace: Size of the workspace of plans.
        allocate: In place of PyTorch's allocator.
        properties: Of the GPU for which cuDNN plans, which then says how large workspaces are; None for no planning.
    """
    device = Device(workspace)
    target = TARGET if properties is None else Target.from_properties(properties)

    def plan_of(key: PlanKey, compute: Compute) -> Any:
        plan = Plan(key, _Graph(device, key, compute, properties), {})
        plan.constants = FakePlan(key, compute).constants
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "create_handle", _Handle)
        patch.setattr(backend, "set_stream", _set_stream)
        patch.setattr(handles, "_memory", _memory)
        patch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: device.capturing, raising=False)
        options = {"current_stream": device.current_stream, "allocate": allocate, "target": target}
        with gpu_on_the_cpu(compute, plan_of=plan_of, **options):
            yield device
