"""The native way of calls in tests: the module is compiled once and loaded once for each process."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

import pytest

from cudnn_sdpa.engine.native import build, calls, loader


def is_off() -> bool:
    """Whether the GPU suite was asked to call by Python alone."""
    return os.environ.get("CUDNN_SDPA_TEST_NATIVE") == "off"


@functools.cache
def _load() -> str:
    """Loads the module; gives what is wrong if it cannot be."""
    try:
        build.check()
    except build.CompileError as error:
        return str(error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(loader.VARIABLE, loader.ON)
        loader.start()
    return ""


@contextlib.contextmanager
def native_way(*, on: bool = True) -> Iterator[None]:
    """Calls take the native way, or Python's; where there is no compiler a test is skipped, but fails if CI is set."""
    if on and (wrong := _load()):
        if os.environ.get("CI"):
            pytest.fail(f"CI is set, and the native way cannot be tested: {wrong}")
        pytest.skip(wrong)
    calls.switch(on=on)
    try:
        yield
    finally:
        calls.switch(on=False)
