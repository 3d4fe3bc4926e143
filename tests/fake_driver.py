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


@dataclass
class Launch:
    """What the driver was asked to launch; the stream and the argument are as they were, the rest is the plan's."""

    name: str
    blocks: int
    threads: int
    shared: int
    stream: int
    fields: list[int]

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


class FakeDriver:
    """The driver, for kernels whose argument has so many words.

    Attributes:
        launches: All launches that were asked for.
        statuses: What the next launches answer, the first first; then 0, and the kernel runs.
        made_current: How often the context of a thread was set.
    """

    def __init__(self, words: int) -> None:
        self.launches: list[Launch] = []
        self.statuses: list[int] = []
        self.made_current, self._words = 0, words
        self._kernels: dict[int, CpuKernel] = {}
        self._loaded: dict[Kernel, LoadedKernel] = {}
        self.cuLaunchKernel = LAUNCH(self._launch)

    def on(self, kernel: Kernel, device: int) -> LoadedKernel:
        """In place of `Kernel.on`."""
        if kernel not in self._loaded:
            number = 1 + len(self._loaded)
            self._kernels[number] = CpuKernel(kernel)
            self._loaded[kernel] = LoadedKernel(kernel.name, number, device, kernel.shared)
        return self._loaded[kernel]

    def _launch(self, function: int, *given: int | None) -> int:
        kernel = self._kernels[function]
        launch = Launch.of(kernel.name, given, self._words)
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
