"""Small pieces of GPU memory that outlive a call, out of nobody's private pool.

What a call allocates while CUDA graphs are recorded or warmed up comes out of a private pool, which expects to get all
of it back. So this memory is taken by a thread of its own, on a stream of its own, some hundred pieces at once.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from cudnn_sdpa.runtime.capture import relaxed_capture

#: Bytes that are taken at once.
CHUNK = 512 * 1024

_ALIGNMENT = 256


class _Arena:
    """Memory of one device. It is not used again piece by piece; a chunk goes when all its pieces have gone."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._chunk: Tensor | None = None
        self._used = 0

    def take(self, size: int) -> Tensor:
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._chunk is None or self._used + size > self._chunk.numel():
            self._chunk, self._used = self._fetch(max(size, CHUNK)), 0
        piece = self._chunk[self._used : self._used + size]
        self._used += size
        return piece

    def _fetch(self, size: int) -> Tensor:
        """New memory, by a thread that no private pool concerns."""
        found: list[Tensor | BaseException] = []

        def work() -> None:
            try:
                with torch.cuda.device(self._device), relaxed_capture():
                    self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
                    with torch.cuda.stream(self._stream):
                        found.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that waits
                found.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        (result,) = found
        if isinstance(result, BaseException):
            raise result
        return result


_arenas: dict[int, _Arena] = {}
_lock = threading.Lock()


def take(device: int, size: int) -> Tensor:
    """Bytes on a device, (size rounded up,) uint8, aligned to 256 bytes.

    Who reads or writes them on a stream says so with `record_stream`: they were taken on another one.
    """
    with _lock:
        return _arenas.setdefault(device, _Arena(device)).take(size)
