"""One cuDNN handle per thread and device, bound to the stream that the thread is on.

A handle is made on first use, under the device's guard. When its thread ends it goes to a pool and serves the next
thread; it is never destroyed, because `cudnnDestroy` synchronizes and would break a CUDA-graph capture that happens to
be running in another thread.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from cudnn_sdpa.errors import ExecutionError
from cudnn_sdpa.graph import backend

#: Workspaces of up to this many bytes are not allocated for each launch on the default stream. Most forward plans want
#: 256 bytes; those of single queries up to a half of this.
SCRATCH_BYTES = 1 << 20


class Slot:
    """A handle, the stream that it was last bound to, and a small workspace for the default stream.

    A slot belongs to one thread, which launches in order, and the default stream runs in order, so that no two
    launches use the workspace at once. No CUDA graph is captured on the default stream, and no memory pool of a
    graph is in force there: on other streams every workspace is allocated for its launch.

    Attributes:
        raw: The `cudnnHandle_t`.
        stream: The stream that it is bound to.
        scratch: Address of the workspace.
    """

    __slots__ = ("_workspace", "handle", "raw", "scratch", "stream")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.raw = backend.raw_handle(handle)
        self.stream = -1
        self.scratch = 0
        self._workspace: torch.Tensor | None = None

    def bind(self, stream: int) -> None:
        """Has the handle launch on `stream`, the current stream of the current device."""
        if stream == 0 and self._workspace is None:
            self._workspace = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device="cuda")
            self.scratch = self._workspace.data_ptr()
        backend.set_stream(self.handle, stream)
        self.stream = stream  # last: whatever fails above is tried again by the next launch


# Slots of threads that have ended, by device, and all slots ever made. Only single, atomic list operations touch
# these: a lock could be held by the very thread whose garbage collection runs `_ThreadSlots.__del__`.
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


def build_handle(device: int) -> Any:
    """The calling thread's handle object for `device`, for building plans."""
    return thread.slots[device].handle


def created_handles() -> int:
    """How many handles this process has made: at most its largest number of threads at once, for each device."""
    return len(_created)
