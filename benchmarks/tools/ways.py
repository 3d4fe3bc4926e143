"""Which way calls take while they are measured: natively, or in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cudnn_sdpa.engine.native import calls, loader

#: Maximum number of seconds that the native module may take to compile.
PATIENCE = 180.0


def wait_for_native_calls() -> bool:
    """Waits until the native module is loaded; False if it cannot be, or is switched off."""
    loader.start()
    loader.wait(PATIENCE)
    return loader.module() is not None


@contextmanager
def in_python() -> Iterator[None]:
    """Calls take Python's way."""
    calls.switch(on=False)
    try:
        yield
    finally:
        calls.switch(on=True)
