"""Small tensors that launches on any stream read, made once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cudnn_sdpa.runtime import arena
from cudnn_sdpa.runtime.capture import relaxed_capture

#: Tables that a CUDA graph reads. Nobody can say when it is replayed for the last time.
captured_tables: list[DeviceTables] = []

_ALIGNMENT = 16


class DeviceTables:
    """Tensors that kernels on the current stream have made, and that launches on others read too.

    Another stream waits for the kernels that made them; and memory that it has read is not given away, after the tables
    are gone, before it is done with it.

    Attributes:
        addresses: Of the tensors, by name.
        size: Bytes that they take.
    """

    __slots__ = ("_captured", "_made", "_memory", "_streams", "addresses", "size")

    def __init__(self, tensors: Mapping[str, Tensor], device: int, stream: int, *, captured: bool = False) -> None:
        """Copies tensors right after they were made on `stream`, the current one.

        Args:
            tensors: The tensors by name.
            device: The current device.
            stream: The current stream.
            captured: Whether it is being captured: then they are part of the CUDA graph, and of no use outside.
        """
        self._captured = captured
        self._streams = {stream}
        distinct = {id(tensor): tensor for tensor in tensors.values()}
        sizes = {name: -(-x.numel() * x.element_size() // _ALIGNMENT) * _ALIGNMENT for name, x in distinct.items()}
        self.size = sum(sizes.values())
        self._memory = (
            torch.empty(self.size, dtype=torch.uint8, device="cuda") if captured else arena.take(device, self.size)
        )
        begins, begin = {}, 0
        for name, x in distinct.items():
            begins[name] = begin
            self._memory[begin : begin + x.numel() * x.element_size()].view(x.dtype).copy_(x.flatten())
            begin += sizes[name]
        first = self._memory.data_ptr()
        self.addresses = {name: first + begins[id(tensor)] for name, tensor in tensors.items()}
        self._made: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        if not captured:
            self._memory.record_stream(torch.cuda.current_stream())
            self._made.record()

    def prepare(self, stream: int) -> None:
        """Makes sure that a launch on `stream`, the current one, may read them now."""
        if stream and not self._captured and torch._C._cuda_isCurrentStreamCapturing():
            with relaxed_capture():
                self._made.synchronize()
            captured_tables.append(self)
            self._captured = True
        if stream not in self._streams:
            self._meet(stream)

    def _meet(self, stream: int) -> None:
        current = torch.cuda.current_stream()
        if not torch.cuda.is_current_stream_capturing():
            self._made.wait(current)
        self._memory.record_stream(current)
        self._streams.add(stream)
