"""Work that must not disturb a CUDA-graph capture in another thread."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_RELAXED = 2  #: CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def _exchange() -> Any:
    """The driver's `cuThreadExchangeStreamCaptureMode`; None without a driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """While it is in force, this thread may load kernels and allocate memory although another thread captures.

    A capture in PyTorch's default mode forbids such calls to all threads of the process: they fail, and so does the
    capture.
    """
    exchange = _exchange()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
