"""A driver without a GPU (`stand_in_gpu.cpp`), and plans whose launches go through it, for tests of recorded launches.

Kernels are C functions over host memory. So captures, launches, their addresses and their order are real, and results
are right only if all of them are.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import real_plans
import torch
from fake_driver import Attribute, Config
from fake_gpu import LIBRARIES
from native_way import native_way

from cudnn_sdpa.engine.native import build, loader
from cudnn_sdpa.engine.recorded import proof, recorder
from cudnn_sdpa.graph import handles
from cudnn_sdpa.graph.key import Role
from cudnn_sdpa.plans.cache import plan_cache

_SOURCE = Path(__file__).with_suffix(".cpp")

#: The stream on which plans are captured.
CAPTURING = 4000

#: Attributes of launches: a kernel that may overlap with the one ahead of it, and the size of clusters.
OVERLAPS, CLUSTERS = 6, 4


@functools.cache
def library() -> ctypes.CDLL:
    """The driver, compiled once for all processes and runs."""
    sources = [_SOURCE, build.SOURCES / "driver.h"]
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
    path = LIBRARIES / f"stand_in_gpu-{digest[:32]}.so"
    if not path.exists():
        LIBRARIES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=LIBRARIES) as folder:
            made = Path(folder, "driver.so")
            command = ["g++", "-std=c++17", "-shared", "-fPIC", "-O1", f"-I{build.SOURCES}", str(_SOURCE)]
            subprocess.run([*command, "-o", str(made)], check=True)
            made.replace(path)
    found = ctypes.CDLL(str(path))
    found.take_launched.restype = ctypes.c_char_p
    found.new_function.restype = ctypes.c_void_p
    found.cuMemsetD32Async.argtypes = [ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p]
    found.own_memory.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    found.hide_sizes.argtypes = found.let_next_begin.argtypes = [ctypes.c_void_p]
    found.unload.argtypes = found.fork_stream.argtypes = found.is_captured.argtypes = [ctypes.c_void_p]
    found.is_captured.restype = ctypes.c_bool
    found.enqueue_host_work.argtypes = [ctypes.c_void_p]
    return found


class Kernel:
    """A kernel whose arguments have these sizes, in bytes."""

    def __init__(self, name: str, run: object, sizes: Sequence[int]) -> None:
        self._run, self._sizes = run, (ctypes.c_size_t * len(sizes))(*sizes)  # kept
        address = ctypes.cast(run, ctypes.c_void_p)  # type: ignore[arg-type]
        self.handle = library().new_function(name.encode(), address, self._sizes, len(sizes))

    def launch(
        self,
        stream: int,
        *arguments: bytes,
        blocks: int = 1,
        attributes: Mapping[int, int] | None = None,
        packed: bool = False,
    ) -> None:
        """Launches it as cuDNN's host code would."""
        given = (Attribute * 4)(*(Attribute(id_, 0, (value,)) for id_, value in (attributes or {}).items()))
        config = Config((blocks, 1, 1), (128, 1, 1), 64, stream, given, len(attributes or {}))
        buffers = [ctypes.create_string_buffer(one, len(one)) for one in (b"".join(arguments),) if packed]
        buffers = buffers or [ctypes.create_string_buffer(one, len(one)) for one in arguments]
        pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        size = ctypes.c_size_t(len(buffers[0]))
        extra = (ctypes.c_void_p * 5)(1, pointers[0], 2, ctypes.addressof(size), None)
        function = ctypes.c_void_p(self.handle)
        given_as = (None, extra) if packed else (pointers, None)
        if error := library().cuLaunchKernelEx(ctypes.byref(config), function, *given_as):
            raise RuntimeError(f"the driver reports error {error}")


def own_kernel(name: str) -> object:
    """A kernel's C function in the library."""
    return getattr(library(), name)


def launched() -> list[str]:
    """What the driver was asked to run since the last time: kernels with their shapes, attributes and arguments."""
    return library().take_launched().decode().splitlines()


class Verdict:
    """What a comparison has found, which is known at once."""

    def __init__(self, flags: torch.Tensor, _: int) -> None:
        self._flags = flags

    def is_known(self) -> bool:
        return True

    def read(self) -> list[bool]:
        found: list[bool] = self._flags.tolist()
        return found


@contextlib.contextmanager
def stand_in_driver(mode: str = loader.ON) -> Iterator[ModuleType]:
    """The native module has this driver's functions, and recording is on."""
    driver = library()

    @contextlib.contextmanager
    def capturing_handle(_: int) -> Iterator[tuple[int, int]]:
        yield _loading_handle().backend_handle, CAPTURING

    with native_way(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(loader.RECORDED_VARIABLE, mode)
        patch.setattr(recorder, "_driver", lambda: driver)
        patch.setattr(proof, "Verdict", Verdict)
        patch.setattr(recorder, "MIN_CALLS", 0)
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 40))
        patch.setattr(handles, "capturing_handle", capturing_handle)
        recorder._connect.cache_clear()
        driver.make_context_current()
        launched()
        module = loader.module()
        assert module is not None
        assert recorder._connect(module) == ""
        try:
            yield module
        finally:
            wait()
            driver.fail_with(0)
            recorder._connect.cache_clear()
            assert driver.open_graphs() == 0


def wait() -> None:
    """Waits for what is recorded in the background."""
    recorder._Background.pool.submit(lambda: None).result()


@functools.cache
def _loading_handle() -> real_plans._Handle:
    handle = real_plans._Handle()
    handle.stream = CAPTURING
    return handle


# Public calls.


class KernelOfPlan(real_plans._Graph):
    """A built graph that is one kernel of the driver's: its arguments are the plan's operands and its workspace.

    A counting one clears its workspace first, and computes nothing if it does not begin with zero.
    """

    executed = 0  #: launches by "cuDNN"
    counts = False

    def executor(self, uids: list[int]) -> Callable[..., None]:
        operands = (*self._plan.key.inputs, *self._plan.key.outputs)
        scalars = [place for place, operand in enumerate(operands) if operand.role is Role.SCALAR]

        def run(arguments: int) -> None:
            argument = (ctypes.c_void_p * (2 + len(scalars))).from_address(arguments)
            pointers = list((ctypes.c_uint64 * len(uids)).from_address(argument[0]))
            for number, place in enumerate(scalars):
                pointers[place] = argument[2 + number]
            counter = ctypes.c_uint32.from_address(ctypes.c_uint64.from_address(argument[1]).value or argument[1])
            if self.counts:
                counter.value += 1
                if counter.value != 1:
                    return
            elif self.workspace:
                ctypes.memset(ctypes.addressof(counter), 0x3C, self.workspace)
            self._plan.launch(pointers)

        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(run)
        kernel = Kernel(self._plan.key.name, function, [8 * len(uids), 8, *[4] * len(scalars)])

        def execute(array: int, count: int, workspace: int, handle: int, index: int) -> None:
            assert index == -1
            assert count == len(uids)
            library().make_context_current()
            pointers = (ctypes.c_uint64 * count).from_address(array)
            values = [bytes((ctypes.c_char * 4).from_address(pointers[place])) for place in scalars]
            words = [0 if place in scalars else word for place, word in enumerate(pointers)]
            block = b"".join(word.to_bytes(8, "little") for word in words)
            stream = real_plans._Handle.all[handle].stream
            KernelOfPlan.executed += stream != CAPTURING
            if self.counts:
                library().cuMemsetD32Async(workspace, 0, 1, stream)
            kernel.launch(stream, block, workspace.to_bytes(8, "little"), *values)

        return execute


@contextlib.contextmanager
def recorded_plans(
    compute: Callable[..., object] | None = None, *, mode: str = loader.ON, **options: object
) -> Iterator[real_plans.Device]:
    """As `real_plans`, with plans that the stand-in launches."""
    with stand_in_driver(mode), pytest.MonkeyPatch.context() as patch:
        patch.setattr(real_plans, "_Graph", KernelOfPlan)
        KernelOfPlan.executed = 0
        with real_plans.real_plans(compute, **options) as device:  # type: ignore[arg-type]
            yield device


def recorders() -> list[recorder.Recorder]:
    """Those of the plans that C++ has launched."""
    return [plan.recorder for plan in plan_cache.plans() if isinstance(plan.recorder, recorder.Recorder)]


def settle(call: Callable[[], object], most: int = 30) -> None:
    """Makes calls until all plans are recorded, or left to cuDNN."""
    for _ in range(12):  # those of gradients are known later
        call()
        wait()
    for _ in range(most):
        if not any(each.native.is_watched for each in recorders()):
            return
        call()
        wait()
    raise AssertionError([str(each) for each in recorders()])


def in_new_thread(work: Callable[[], object]) -> object:
    """What a function gives on a new thread, which has no context yet."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]
