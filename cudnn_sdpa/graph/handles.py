"""One cuDNN handle per thread and device, bound to the thread's current stream.

A handle is created on first use, under the device's guard. When its thread ends, it returns to a pool for the next
thread. It is never destroyed: `cudnnDestroy` synchronizes and would break a CUDA-graph capture in another thread.
"""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from cudnn_sdpa.errors import ExecutionError
from cudnn_sdpa.graph import backend
from cudnn_sdpa.graph.backend import Handle
from cudnn_sdpa.graph.private_memory import private_memory
from cudnn_sdpa.settings import renewed_in_children

#: Size of a slot's memory: more than this PyTorch's allocator takes from 20 MiB, which the slot would keep for good.
_SLOT_BYTES = 1 << 20

#: Size of the part of it in which kernels of recorded launches count from zero, each in another place.
ZEROS_BYTES = 1 << 18

#: Size of the scratch memory ahead of it, the workspace of small launches on the default stream. Most forward plans
#: need 256 bytes; those of single queries up to 512 KiB.
SCRATCH_BYTES = _SLOT_BYTES - ZEROS_BYTES

#: Size of a slot's prologue memory, which the library's own kernels fill and a plan on the default stream reads.
FILLED_BYTES = 1 << 18


class Slot:
    """A handle, the stream that it was last bound to, and memory for launches on the default stream.

    A slot belongs to one thread, which launches in order, and the default stream runs in order, so no two launches use
    the scratch memory at once. Behind it lie zeros, which native code clears (`ZEROS_BYTES`). The default stream is
    never captured; on other streams every launch allocates its memory.

    Prologue memory must keep its contents until the plan has read it. Between the kernels' launch and the plan's, the
    same thread may begin another call: a signal handler's, or a finalizer's that the garbage collector runs. So a call
    acquires that memory (`taken`) and releases it, and a call that finds it in use allocates its own.

    Such a nested call may be on another stream, and bind the handle to it. So a launch checks `bound` last (-1 during a
    change), and binds again until no call has intervened.
    """

    __slots__ = (
        "_bindings",
        "_kept",
        "bound",
        "cleared",
        "filled",
        "handle",
        "raw",
        "scratch",
        "taken",
    )

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.raw = backend.raw_handle(handle)
        self.scratch = self.filled = self._bindings = 0
        self.bound = array("q", (-1,))  # these are arrays so that native code reads memory instead of attributes
        self.cleared = array("Q", (0, 0))  # where zeros begin that no launch has counted in, and where they end
        self.taken = bytearray(1)
        self._kept: list[torch.Tensor] = []  # a signal handler's call may add memory of the same use: launches use both

    def bind(self, stream: int) -> None:
        if stream == 0 and not self.scratch:
            self.scratch = self._address_of(_memory(_SLOT_BYTES))
        while self.bound[0] != stream:
            self.bound[0], self._bindings = -1, self._bindings + 1
            this = self._bindings
            backend.set_stream(self.handle, stream)
            # A signal handler may have run when `set_stream` returned, and bound another one.
            if self._bindings == this:
                self.bound[0] = stream  # last, so that the next launch retries what fails above

    def make_filled(self) -> int:
        """Allocates the prologue memory and returns its address. The default stream must be the current one."""
        if not self.filled:
            self.filled = self._address_of(_memory(FILLED_BYTES))
        return self.filled

    def _address_of(self, memory: torch.Tensor) -> int:
        self._kept.append(memory)
        return memory.data_ptr()


def _memory(size: int) -> torch.Tensor:
    return private_memory(torch.cuda.current_device(), size)


# Slots of finished threads by device, and all slots ever made. Atomic list operations are their only accesses: the
# thread whose garbage collection runs `_ThreadSlots.__del__` could itself hold a lock.
_free: dict[int, deque[Slot]] = {}
_created: list[int] = []


class _ThreadSlots(dict[int, Slot]):
    """The slots of one thread by device; returned to the pool when the thread ends."""

    def __missing__(self, device: int) -> Slot:
        try:
            slot = _free.setdefault(device, deque()).pop()
        except IndexError:
            slot = _create(device)
        self[device] = slot
        return slot

    def __del__(self) -> None:
        if _free is not None:  # None late in the interpreter's shutdown
            for device, slot in self.items():
                _free[device].append(slot)


class _Local(threading.local):
    def __init__(self) -> None:
        self.slots = _ThreadSlots()


def _create(device: int) -> Slot:
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise ExecutionError(
                "a cuDNN handle cannot be created while a CUDA graph is being captured; "
                "call the function once on this thread before the capture"
            )
        slot = Slot(backend.create_handle())
    _created.append(device)
    return slot


#: The calling thread's slots by device: `thread.slots[device]`.
thread = _Local()


def build_handle(device: int) -> Handle:
    return thread.slots[device].handle


class _Loader(NamedTuple):
    handle: Handle
    stream: int


_loaders: dict[int, _Loader] = {}
_streams: dict[int, int] = {}  # kept where no handle can be made: streams are never destroyed
_shared: set[int] = set()  # devices on which this is one of the streams that PyTorch hands out in turn
_loading_lock = renewed_in_children(threading.RLock())


@contextlib.contextmanager
def loading_handle(device: int) -> Iterator[Handle]:
    """The handle of `device` that loads plans, for one thread at a time.

    The frontend launches a plan that it loads once, while it captures the handle's stream, and drops the graph. Work
    that another thread enqueues on that stream would be captured too, and never run. If the handle is on the default
    stream, the frontend captures a stream that the default stream waits for: until that ends, CUDA refuses every launch
    on the default stream. So this handle has a stream of its own, for which the default stream does not wait.
    """
    with _loading_lock:
        if device not in _loaders:
            with torch.cuda.device(device):
                if device not in _streams:
                    made = backend.new_stream()
                    if made is None:  # CUDA's runtime is not found
                        _shared.add(device)
                        made = torch.cuda.Stream(device).cuda_stream  # type: ignore[no-untyped-call]
                    _streams[device] = int(made)
                loader = _Loader(backend.create_handle(), _streams[device])
                backend.set_stream(loader.handle, loader.stream)
            _loaders[device] = loader
        loader = _loaders[device]
        try:
            yield loader.handle
        except BaseException:
            backend.end_capture(loader.stream)  # which the frontend leaves open where it has no memory
            raise


@contextlib.contextmanager
def capturing_handle(device: int) -> Iterator[tuple[int, int]]:
    """The raw loading handle, and its stream, which nobody else captures or enqueues work on meanwhile.

    Raises:
        ExecutionError: The stream is one of PyTorch's: what another thread enqueues on it would never run.
    """
    with loading_handle(device) as handle:
        if device in _shared:
            raise ExecutionError("CUDA's runtime is not found, and no stream can be made that nobody else uses")
        yield backend.raw_handle(handle), _loaders[device].stream
