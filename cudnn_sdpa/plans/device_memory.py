"""Small device tensors that outlive a call (constants, tables), in chunks of private memory for some hundred."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from cudnn_sdpa.graph.key import PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.private_memory import private_memory, relaxed_capture
from cudnn_sdpa.settings import renewed_in_children

#: Bytes of a chunk.
CHUNK = 512 * 1024

_ALIGNMENT = 256


class _Arena:
    """Chunks of one device.

    No lock is held while one is allocated: a finalizer or a signal's handler may need memory meanwhile, on this thread
    or on the one that allocates.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._chunk: Tensor | None = None
        self._used = 0

    def take(self, size: int) -> Tensor:
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        with _arenas_lock:
            chunk, begin = self._chunk, self._used
            self._used = begin + size  # at once: a signal's handler may take the next
            if chunk is not None and begin + size <= chunk.numel():
                return chunk[begin : begin + size]
        chunk = private_memory(self._device, max(size, CHUNK))
        with _arenas_lock:
            self._chunk, self._used = chunk, size
        return chunk[:size]


_arenas: dict[int, _Arena] = {}
_arenas_lock = renewed_in_children(threading.RLock())


def take_memory(device: int, size: int) -> Tensor:
    """Memory on a device as uint8, aligned to 256 bytes, its size rounded up.

    The memory was allocated on another stream, so the caller calls `record_stream`.
    """
    return _arenas.setdefault(device, _Arena(device)).take(size)


# Small tensors that launches on any stream read, created once.


#: Tables that a CUDA graph reads, kept since it may be replayed at any time.
captured_tables: list[DeviceTables] = []

_TABLE_ALIGNMENT = 16


class DeviceTables:
    """Tensors written by kernels on one stream and read by launches on others.

    Another stream waits for the kernels that write them, and their memory is not reused before that stream has
    finished reading.
    """

    __slots__ = ("_captured", "_memory", "_streams", "_written", "addresses", "size")

    def __init__(self, tensors: Mapping[str, Tensor], device: int, stream: int, *, captured: bool = False) -> None:
        """Copies tensors that were just written on `stream`, the current one.

        If it is being captured, the copies belong to the CUDA graph and are unusable outside.
        """
        self._captured = captured
        self._streams = {stream}
        distinct = {id(tensor): tensor for tensor in tensors.values()}
        sizes = {
            key: -(-x.numel() * x.element_size() // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT for key, x in distinct.items()
        }
        self.size = sum(sizes.values())
        self._memory = (
            torch.empty(self.size, dtype=torch.uint8, device="cuda") if captured else take_memory(device, self.size)
        )
        offsets, offset = {}, 0
        for key, x in distinct.items():
            offsets[key] = offset
            self._memory[offset : offset + x.numel() * x.element_size()].view(x.dtype).copy_(x.flatten())
            offset += sizes[key]
        first = self._memory.data_ptr()
        self.addresses = {name: first + offsets[id(tensor)] for name, tensor in tensors.items()}
        self._written: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        if not captured:
            self._memory.record_stream(torch.cuda.current_stream())
            self._written.record()

    def prepare(self, stream: int) -> None:
        if stream and not self._captured and torch._C._cuda_isCurrentStreamCapturing():
            with relaxed_capture():
                self._written.synchronize()
            captured_tables.append(self)
            self._captured = True
        if stream not in self._streams:
            current = torch.cuda.current_stream()
            if not torch.cuda.is_current_stream_capturing():
                self._written.wait(current)
            self._memory.record_stream(current)
            self._streams.add(stream)


# Device tensors for operands whose values the plan's key fixes.


_constants: dict[tuple[int, TensorLayout, int], Tensor] = {}


def constants_of(key: PlanKey) -> dict[str, Tensor]:
    assert key.device is not None
    fills = [operand for operand in key.inputs if operand.role is Role.FILL]
    return {operand.name: _constant(key.device, operand.layout, operand.fill) for operand in fills}


def _constant(device: int, layout: TensorLayout, value: int) -> Tensor:
    """A filled tensor that lives as long as the process: launches of an evicted plan may still be pending.

    Each layout and value has one tensor, mostly of 512 bytes on the GPU.
    """
    key = device, layout, value
    tensor = _constants.get(key)
    if tensor is None:
        size = math.prod(layout.shape) * layout.dtype.itemsize
        made = take_memory(device, size)[:size].view(layout.dtype).view(layout.shape).fill_(value)
        torch.cuda.current_stream(device).synchronize()  # launches may follow on other streams
        tensor = _constants.setdefault(key, made)  # another thread's, or it would be freed with its plan
    return tensor
