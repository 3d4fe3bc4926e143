"""Recording of plans: when it happens, what disqualifies a plan, and what `explain` says of it.

cuDNN's `execute` takes longer on the host than the launches that it makes, and so do the functions of FlashAttention-4
and of cuDNN's frontend. So what a plan launches is read from captured graphs (`captures`), and launched by C++ with the
addresses of each call (`engine/native/recorded.h`).

A plan that C++ has launched many times asks for the recording, which a thread makes in the background. A later call is
launched both ways, and its results are compared bit by bit (`proof`). A call that finds the GPU done with that has the
verdict read. If the bits are the same, the recorded launch serves from then on. Until then, and for good if anything is
not as expected, cuDNN or these functions launch the plan. No call waits for the GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch

from cudnn_sdpa.engine.native import loader
from cudnn_sdpa.engine.recorded import captures, proof
from cudnn_sdpa.errors import ExecutionError
from cudnn_sdpa.graph import backend, known_issues
from cudnn_sdpa.graph.private_memory import relaxed_capture
from cudnn_sdpa.plans.plan import Plan, current_raw_stream
from cudnn_sdpa.settings import renewed_in_children

_log = logging.getLogger("cudnn_sdpa")

#: Bytes of results and workspace of the largest plan that is recorded. For more the GPU takes so long that it never
#: waits for the host, and the proof takes three times as much.
MAX_BYTES = 64 << 20

#: Launches of a plan by C++ before one asks for a recording, but for `verify`. A recording takes as much of the host's
#: time, with the GIL, as some hundred recorded launches save: too much for each of many shapes that are rarely seen.
MIN_CALLS = 100

#: Comparisons after which a recorded launch is wrong that has differed in all of them. One difference may be due to
#: kernels that now and then add in another order.
MAX_DIFFERENT = 3

#: Calls after which a plan is no longer tried whose operands always lie at other addresses, or whose results tell
#: nothing.
MAX_TRIES = 16

#: Maximum number of seconds that the interpreter waits at its end for calls that record.
PATIENCE = 2.0

#: Why a plan is not launched as recorded until it is, or until that fails.
NOT_YET = "it is not recorded yet"

#: A stage of the recording: what a call of the plan does for it. A method, not bound, as recorders are freed with
#: their plans.
_Stage = Callable[["Recorder", Plan, Sequence[int], Sequence[int]], None]


class Recorder:
    """The recording of one plan. It holds no plan: each call gives it.

    Attributes:
        name: The plan's operation.
        launched_by: Who launches the plan where it is not recorded.
        native: The launches in the native module.
        why_not: Why it is not recorded; empty if the recorded launch serves.
    """

    def __init__(self, module: ModuleType, name: str, launched_by: str = "cuDNN") -> None:
        self.name, self.launched_by = name, launched_by
        self.native: Any = module.Recorded()
        self.why_not = NOT_YET
        self.native.calls_before = 0 if loader.recorded_mode() == loader.VERIFY else MIN_CALLS
        self._missing = _connect(module)
        self._stage: _Stage = Recorder._begin
        self._tries = self._different = 0
        self._lock = threading.Lock()

    def __str__(self) -> str:
        if self.why_not:
            return f"by {self.launched_by}, because {self.why_not}"
        memsets = self.native.names.count("memset")
        verified = f", each compared with {self.launched_by}'s" * self.native.is_watched
        kernels, but = len(self.native.names) - memsets, ", none on the default stream" * self.native.takes_zeros
        return f"as recorded (kernels: {kernels}, memsets: {memsets}{but}){verified}"

    def watch(self, plan: Plan, pointers: Sequence[int], sizes: Sequence[int]) -> None:
        """Launches the plan, and brings the recording to its next stage, if this thread can.

        Args:
            plan: The plan.
            pointers: The addresses of its operands.
            sizes: Bytes of each output.
        """
        is_captured = current_raw_stream(plan.device) and torch._C._cuda_isCurrentStreamCapturing()
        if is_captured or not self._lock.acquire(blocking=False):
            plan.launch(pointers)
            return
        try:
            self._stage(self, plan, pointers, sizes)
        finally:
            self._lock.release()

    def _begin(self, plan: Plan, pointers: Sequence[int], sizes: Sequence[int]) -> None:
        plan.launch(pointers)
        self._stage = Recorder._wait
        if reason := self._missing or _why_not(plan, sizes):
            self._leave(reason)
            return
        try:
            self.native.take_context()
        except RuntimeError as error:
            self._leave(str(error))
            return
        values = captures.scalars_at(plan, pointers)
        self._in_background(functools.partial(self._record, plan, values, sizes))

    def _wait(self, plan: Plan, pointers: Sequence[int], _: Sequence[int]) -> None:
        plan.launch(pointers)

    def _record(self, plan: Plan, values: Sequence[float], sizes: Sequence[int]) -> None:
        try:
            with torch.cuda.device(plan.device), backend.no_error_left():
                if reason := _why_not_now(plan, sizes):
                    self._leave(reason)
                    return
                captures.record(self.native, plan, values, sizes)
        except Exception as error:  # noqa: BLE001 - whatever it is, calls are launched as before
            self._leave(str(error) or type(error).__name__)
        else:
            self._stage = Recorder._prove

    def _prove(self, plan: Plan, pointers: Sequence[int], sizes: Sequence[int]) -> None:
        plan.launch(pointers)
        self._tries += 1
        try:
            if self.native.serves(pointers):
                with relaxed_capture():  # other threads may capture, and calls like this one allocate less
                    verdict = proof.Verdict(proof.compare(self.native, plan, pointers, sizes), plan.device)
                self._stage = functools.partial(Recorder._await, verdict=verdict)
            elif self._tries > MAX_TRIES:
                self._leave("no call has the alignment and the host scalars that were recorded")
        except Exception as error:  # noqa: BLE001 - the call itself is launched
            self._leave(f"it cannot be proved: {error}")

    def _await(self, plan: Plan, pointers: Sequence[int], _: Sequence[int], *, verdict: proof.Verdict) -> None:
        plan.launch(pointers)
        try:
            with relaxed_capture():
                is_known = verdict.is_known()
        except Exception as error:  # noqa: BLE001 - the call itself is launched
            self._leave(f"it cannot be proved: {error}")
            return
        if is_known:
            self._stage = Recorder._wait
            self._in_background(functools.partial(self._conclude, plan.device, verdict))

    def _conclude(self, device: int, verdict: proof.Verdict) -> None:
        try:
            with torch.cuda.device(device):
                varies, differs, tells, is_wrong_with_zeros = verdict.read()
        except Exception as error:  # noqa: BLE001 - whatever it is, calls are launched as before
            self._leave(f"it cannot be proved: {error}")
            return
        self._different += differs
        if varies:
            self._leave("its results differ in bits from launch to launch")
        elif self._different == MAX_DIFFERENT:
            self._leave("its recorded launch had other results", logging.WARNING)
        elif self._different and not differs:
            self._leave("its recorded launch had other results at times")
        elif tells and not differs:
            self.native.takes_zeros = bool(self.native.zeros) and not is_wrong_with_zeros
            self._serve()
        elif self._tries > MAX_TRIES:
            self._leave("a result of its first calls was all zeros")
        else:
            self._stage = Recorder._prove

    def _in_background(self, work: Callable[[], None]) -> None:
        try:
            _Background.submit(work)
        except RuntimeError as error:  # the interpreter ends, or there is a limit of threads
            self._leave(f"nothing can be recorded in the background: {error}")

    def _serve(self) -> None:
        self.native.is_watched = loader.recorded_mode() == loader.VERIFY  # first: a call may be on its way to a stage
        self.native.is_serving, self.why_not, self._stage = True, "", Recorder._verify
        _log.info("%s is launched %s", self.name, self)

    def _leave(self, why: str, level: int = logging.INFO) -> None:
        self.why_not, self._stage, self.native.is_watched = why, Recorder._wait, False
        _log.log(level, "%s is launched by %s, and not as recorded, because %s", self.name, self.launched_by, why)

    def _verify(self, plan: Plan, pointers: Sequence[int], sizes: Sequence[int]) -> None:
        plan.launch(pointers)
        if self.native.error:  # which the launch above has not
            self._leave(f"CUDA reports error {self.native.error} for its recorded launch", logging.WARNING)
        elif self.native.is_watched and self.native.serves(pointers):
            for _ in range(MAX_DIFFERENT):
                with relaxed_capture():
                    varies, differs, _, differs_with_zeros = proof.compare(self.native, plan, pointers, sizes).tolist()
                if varies or not (differs or (differs_with_zeros and self.native.takes_zeros)):
                    return
            raise ExecutionError(
                f"the recorded launch of {plan.key.name} has other results than {self.launched_by}'s; "
                f"{loader.RECORDED_VARIABLE}={loader.OFF} avoids recorded launches. {plan.key}"
            )


def _why_not(plan: Plan, sizes: Sequence[int]) -> str:
    if reason := plan.why_not_recorded():
        return reason
    if bugs := known_issues.not_in_capture(plan.key):
        return f"it cannot be captured in a CUDA graph: {bugs}"
    if bugs := known_issues.not_recorded(plan.key):
        return f"a known issue forbids it: {bugs}"
    size = plan.workspace + sum(sizes)
    if size > MAX_BYTES:
        return f"its results and its workspace have {size} bytes; more than {MAX_BYTES} are not recorded"
    return ""


def _why_not_now(plan: Plan, sizes: Sequence[int]) -> str:
    """The reason against a recording now: an evicted plan, or a GPU with little free memory.

    PyTorch's allocator would free all that it has cached, and tell its observers, before it reports a full GPU.
    """
    if not plan.held:
        return "it is evicted"
    needed = captures.SPREAD + 4 * (plan.workspace + sum(sizes))
    free, _ = torch.cuda.mem_get_info(plan.device)
    return "" if free >= needed else f"the GPU has {free} bytes of free memory; recording it takes {needed}"


_lock = renewed_in_children(threading.RLock())


def recorder_of(plan: Plan, module: ModuleType) -> Recorder:
    """The recorder of a plan, made by its first recipe."""
    with _lock:
        if not isinstance(plan.recorder, Recorder):
            plan.recorder = Recorder(module, plan.key.name, plan.launched_by)
        return plan.recorder


@functools.cache
def _connect(module: ModuleType) -> str:
    """Gives the module the driver's functions; says what is missing."""
    names, library = module.driver_functions(), _driver()
    if library is None:
        return "there is no NVIDIA driver"
    if missing := [name for name in names if not hasattr(library, name)]:
        return f"the NVIDIA driver has no {missing[0]}; those of CUDA 12.4 and newer have"
    module.set_driver({name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names})
    return ""


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


class _Background:
    """The thread that records; a forked child has another one."""

    pool: ThreadPoolExecutor
    asked_before: int  #: calls of a parent's threads, which do not live here, and never end

    @classmethod
    def start_afresh(cls) -> None:
        module = loader.module()
        cls.asked_before = 0 if module is None else module.asking()
        cls.pool = ThreadPoolExecutor(1, thread_name_prefix="cudnn_sdpa recording")

    @classmethod
    def submit(cls, work: Callable[[], None]) -> None:
        """The recording thread does the work, and frees what only the work has held, such as an evicted plan."""
        waiting = [work]

        def run() -> None:
            with relaxed_capture():  # as CUDA unloads a plan's kernels, which another thread's capture would forbid
                if waiting:
                    waiting.pop()()

        try:
            cls.pool.submit(run)
        except RuntimeError:  # the pool has it nevertheless, until a thread can start
            waiting.clear()
            raise

    @classmethod
    def end(cls) -> None:
        """No call enters Python from C++ any more, and those that have leave it: the interpreter would end in them."""
        cls.pool.shutdown(wait=False, cancel_futures=True)
        module = loader.module()
        if module is not None:
            module.end_recordings()
            until = time.monotonic() + PATIENCE
            while module.asking() > cls.asked_before and time.monotonic() < until:
                time.sleep(1e-4)


_Background.start_afresh()
os.register_at_fork(after_in_child=_Background.start_afresh)
with contextlib.suppress(AttributeError, RuntimeError):  # joined at exit, the thread would first do all that waits
    threading._register_atexit(_Background.end)  # type: ignore[attr-defined]
