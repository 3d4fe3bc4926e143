"""Which way calls take while they are measured: natively, or in Python; as recorded, or by their provider."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

from cudnn_sdpa.engine.native import calls, loader
from cudnn_sdpa.engine.recorded.recorder import NOT_YET, Recorder
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.plans.cache import plan_cache

#: Maximum number of seconds that the native module may take to compile.
PATIENCE = 180.0

#: Maximum number of seconds that a plan may take to be recorded.
RECORDING_SECONDS = 15.0


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


@contextmanager
def recording() -> Iterator[None]:
    """Plans of calls within are recorded."""
    before = os.environ.get(loader.RECORDED_VARIABLE)
    os.environ[loader.RECORDED_VARIABLE] = loader.ON
    plan_cache.clear()
    try:
        yield
    finally:
        os.environ.pop(loader.RECORDED_VARIABLE)
        os.environ |= {} if before is None else {loader.RECORDED_VARIABLE: before}
        plan_cache.clear()


def recorders(of: Container[PlanKey] | None = None) -> list[Recorder]:
    """Those of the plans that are held, or of some of them."""
    found = (getattr(plan, "recorder", None) for plan in plan_cache.plans() if of is None or plan.key in of)
    return [each for each in found if isinstance(each, Recorder)]


def until_recorded(call: Callable[[], object], at_least: int = 12) -> list[str]:
    """Makes calls until their plans are recorded, or cannot be; says who launches those that are new.

    Calls of gradients become native some calls later than others. Plans that the calls do not use are not awaited.
    """
    before, end = recorders(), time.monotonic() + RECORDING_SECONDS

    def calls(times: int) -> bool:
        with plan_cache.watch_uses() as used:
            for _ in range(times):
                call()
                for each in recorders():
                    each.native.calls_before = 0
        return any(each.why_not == NOT_YET for each in recorders(used))

    while calls(at_least) and time.monotonic() < end:
        at_least = 1
        time.sleep(0.01)
    return [str(each) for each in recorders() if each not in before]


@contextmanager
def by_provider() -> Iterator[None]:
    """Recorded plans are launched by their provider: cuDNN, or FlashAttention-4's functions."""
    serving = [each.native for each in recorders() if each.native.is_serving]
    for native in serving:
        native.is_serving = False
    try:
        yield
    finally:
        for native in serving:
            native.is_serving = True
