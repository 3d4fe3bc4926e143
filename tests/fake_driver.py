"""CUDA's driver in place of the real one: it runs the library's own kernels on the CPU, and notes how it was called."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from fake_gpu import CpuKernel

from cudnn_sdpa.plans import nvrtc
from cudnn_sdpa.plans.nvrtc import Kernel, LoadedKernel

#: `cuLaunchKernel`: function, grid, block, shared memory, stream, arguments, extra.
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *(ctypes.c_uint,) * 7, *(ctypes.c_void_p,) * 3)


class Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


#: `cuLaunchKernelEx`: configuration, function, arguments, extra.
LAUNCH_EX = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Config), *(ctypes.c_void_p,) * 3)

#: `cuStreamIsCapturing`: stream, and where the answer goes.
CAPTURING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))

#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
OVERLAPS = 6


@dataclass
class Launch:
    """What the driver was asked to launch; the stream and the argument are as they were, the rest is the plan's."""

    name: str
    blocks: int
    threads: int
    shared: int
    stream: int
    fields: list[int]
    overlaps: bool = False

    @classmethod
    def of(cls, name: str, given: Sequence[int | None], words: int) -> Launch:
        """A launch with what `cuLaunchKernel` is given behind the function."""
        blocks, *more_blocks, threads, y, z, shared, stream, arguments, extra = given
        assert [*more_blocks, y, z, extra] == [1, 1, 1, 1, None]
        assert blocks is not None
        assert threads is not None
        assert shared is not None
        assert arguments is not None
        fields = list((ctypes.c_int64 * words).from_address(ctypes.c_uint64.from_address(arguments).value))
        return cls(name, blocks, threads, shared, stream or 0, fields)

    @classmethod
    def of_ex(cls, name: str, config: Config, arguments: int, words: int) -> Launch:
        """A launch with what `cuLaunchKernelEx` is given."""
        grid, block = (config.grid[i] for i in range(3)), (config.block[i] for i in range(3))
        launch = cls.of(name, (*grid, *block, config.shared, config.stream, arguments, None), words)
        given = [config.attributes[i] for i in range(config.count)]
        assert all((x.id, list(x.value)) == (OVERLAPS, [1] + [0] * 15) for x in given)
        launch.overlaps = bool(given)
        return launch


class FakeDriver:
    """The driver, for kernels whose argument has so many words.

    Attributes:
        launches: All launches that were asked for.
        statuses: What the next launches answer, the first first; then 0, and the kernel runs.
        made_current: How often the context of a thread was set.
        sm: The GPU's compute capability.
        captured: The streams that are captured.
    """

    def __init__(self, words: int) -> None:
        self.launches: list[Launch] = []
        self.statuses: list[int] = []
        self.made_current, self.sm, self._words = 0, 90, words
        self.captured: set[int] = set()
        self._kernels: dict[int, CpuKernel] = {}
        self._loaded: dict[Kernel, LoadedKernel] = {}
        self.cuLaunchKernel, self.cuLaunchKernelEx = LAUNCH(self._launch), LAUNCH_EX(self._launch_ex)
        self.cuStreamIsCapturing = CAPTURING(self._is_capturing)

    def on(self, kernel: Kernel, device: int) -> LoadedKernel:
        """In place of `Kernel.on`."""
        if kernel not in self._loaded:
            number = 1 + len(self._loaded)
            self._kernels[number] = CpuKernel(kernel)
            overlaps = kernel.overlaps(self.sm)
            self._loaded[kernel] = LoadedKernel(kernel.name, number, device, kernel.shared, overlaps=overlaps)
        return self._loaded[kernel]

    def _launch(self, function: int, *given: int | None) -> int:
        return self._run(self._kernels[function], Launch.of(self._kernels[function].name, given, self._words))

    def _launch_ex(self, config: Any, function: int, arguments: int, extra: int | None) -> int:
        assert extra is None
        kernel = self._kernels[function]
        return self._run(kernel, Launch.of_ex(kernel.name, config.contents, arguments, self._words))

    def _is_capturing(self, stream: int | None, answer: Any) -> int:
        answer[0] = int(stream in self.captured)
        return 0

    def _run(self, kernel: CpuKernel, launch: Launch) -> int:
        self.launches.append(launch)
        status = self.statuses.pop(0) if self.statuses else 0
        if not status:
            kernel.launch(launch.blocks, launch.threads, array("q", launch.fields))
        return status

    def cuGetErrorName(self, status: int, name: Any) -> int:  # noqa: N802 - the driver's own names
        name._obj.value = f"CUDA_ERROR_{status}".encode()
        return 0

    def cuDeviceGet(self, *_: object) -> int:  # noqa: N802
        return 0

    def cuDevicePrimaryCtxRetain(self, *_: object) -> int:  # noqa: N802
        return 0

    def cuCtxSetCurrent(self, *_: object) -> int:  # noqa: N802
        self.made_current += 1
        return 0


@contextmanager
def fake_driver(words: int) -> Iterator[FakeDriver]:
    """Within a fake GPU: kernels are launched by this driver, as natively so in Python."""
    driver = FakeDriver(words)

    def on(kernel: Kernel, device: int) -> LoadedKernel:
        return driver.on(kernel, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "_driver", lambda: driver)
        patch.setattr(Kernel, "on", on)
        yield driver
