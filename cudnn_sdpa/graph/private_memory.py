"""The library's own GPU memory that outlives a call, in no memory pool of a user or of a CUDA graph.

PyTorch directs a thread's allocations to the pool of a CUDA graph that it captures, or to that of
`torch.cuda.use_mem_pool`, whose contents an engine that sleeps discards.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from cudnn_sdpa.graph import backend

_RELAXED = 2  #: CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def _exchange_capture_mode() -> Callable[[object], int] | None:
    """The driver's `cuThreadExchangeStreamCaptureMode`, which takes a pointer; None without a driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """While active, this thread may load kernels and allocate memory although another thread captures.

    A capture in PyTorch's default mode forbids such calls in all threads of the process: they fail, and the capture
    fails too.
    """
    exchange = _exchange_capture_mode()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


_streams: dict[int, torch.cuda.Stream] = {}


def private_memory(device: int, size: int) -> Tensor:
    """Memory of `size` bytes on a device, as uint8, that launches on any stream may use at once.

    A thread of its own allocates it, whose allocations PyTorch directs nowhere, on a stream that nothing is launched
    on, so that no launch of others is still at work in it. Who frees it waits for the launches that use it, or calls
    `record_stream` for them.
    """
    results: list[Tensor | BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.device(device), relaxed_capture(), torch.cuda.stream(_stream_of(device)):
                # Deterministic PyTorch fills new tensors, by a kernel that nobody waits for, but no storage.
                memory = torch.UntypedStorage(size, device=f"cuda:{device}")  # type: ignore[no-untyped-call]
                results.append(torch.empty(0, dtype=torch.uint8, device="cuda").set_(memory))
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it again
            results.append(error)

    thread = threading.Thread(target=work)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started any more: the interpreter ends, or there is a limit
        work()
    else:
        thread.join()
    (result,) = results
    if isinstance(result, BaseException):
        raise result
    return result


def _stream_of(device: int) -> torch.cuda.Stream:
    stream = _streams.get(device)
    if stream is None:
        raw = backend.new_stream()
        made = torch.cuda.Stream() if raw is None else torch.cuda.ExternalStream(raw)  # type: ignore[no-untyped-call]
        stream = _streams.setdefault(device, made)
    return stream
