"""Small tensors that launches on any stream read, made once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cudnn_sdpa.runtime.capture import relaxed_capture

#: Tables that a CUDA graph reads. Nobody can say when it is replayed for the last time.
captured_tables: list[DeviceTables] = []


class DeviceTables:
    """Tensors that were made by kernels on the current stream, and are read by launches on others too.

    Another stream waits for the kernels that made them; and memory that it has read is not given away, after the tables
    are gone, before it is done with it.

    Attributes:
        addresses: Of the tensors, by name.
    """

    __slots__ = ("_captured", "_made", "_streams", "_tensors", "addresses")

    def __init__(self, tensors: Mapping[str, Tensor], stream: int, *, captured: bool = False) -> None:
        """Takes the tensors over, right after they were made on `stream`, the current one.

        Args:
            tensors: The tensors by name.
            stream: The current stream.
            captured: Whether it is being captured: then they are part of the CUDA graph, and of no use outside.
        """
        self._tensors = list({id(tensor): tensor for tensor in tensors.values()}.values())
        self.addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        self._streams = {stream}
        self._captured = captured
        self._made: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        if not captured:
            self._made.record()

    def prepare(self, stream: int) -> None:
        """Makes sure that a launch on `stream`, the current one, may read them now."""
        if stream and not self._captured and torch._C._cuda_isCurrentStreamCapturing():
            self._captured = True
            captured_tables.append(self)
            with relaxed_capture():
                self._made.synchronize()
        if stream not in self._streams:
            self._meet(stream)

    def _meet(self, stream: int) -> None:
        current = torch.cuda.current_stream()
        if not torch.cuda.is_current_stream_capturing():
            self._made.wait(current)
        for tensor in self._tensors:
            tensor.record_stream(current)
        self._streams.add(stream)
