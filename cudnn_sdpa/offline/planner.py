"""Requests plans from a helper process. One helper serves this process; it starts with the first request."""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import logging
import math
import os
import selectors
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO

from cudnn_sdpa.errors import OfflineError, UnsupportedError
from cudnn_sdpa.graph.backend import DeviceProperties
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import JsonObject
from cudnn_sdpa.offline import driver, interpreter
from cudnn_sdpa.plans.store import StoredPlan

_log = logging.getLogger("cudnn_sdpa")

#: Environment variable with the timeout of a helper's answer, in seconds.
TIMEOUT_VARIABLE = "CUDNN_SDPA_HELPER_TIMEOUT"

#: Default timeout. A plan takes 0.3 to 1 s, the first one also the start of Python and PyTorch.
TIMEOUT_SECONDS = 300.0

#: Maximum number of bytes of other output to skip before a helper's answer.
_MAX_NOISE = 64 << 20


@dataclass(frozen=True)
class OfflinePlan(StoredPlan):
    """A plan compiled without its GPU.

    `libraries` are the helper's NVIDIA libraries with their files. `note` is the reason for which a plan built on the
    GPU would be much faster; empty if it would not.
    """

    libraries: dict[str, str] = field(default_factory=dict)
    note: str = ""


#: The helper's program. It ends with the parent, also when that is killed, and also while it imports PyTorch: its input
#: then has no writer. `PR_SET_PDEATHSIG` would end it with the parent's thread that has started it.
_PROGRAM = """
import os, select, signal, threading
def end_with_parent():
    poll = select.poll()
    poll.register(0, 0)  # reports the end of the last writer alone
    poll.poll()
    os._exit(1)
threading.Thread(target=end_with_parent, daemon=True).start()
os.nice({niceness})
signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent; when it ends, so does this process
from cudnn_sdpa.offline.worker import main
main()
"""


def timeout_seconds() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if text:
        try:
            if (seconds := float(text)) > 0 and not math.isinf(seconds):
                return seconds
        except ValueError:
            pass
        message = "%s: got %r; expected a positive number of seconds; using %g"
        _log.warning(message, TIMEOUT_VARIABLE, text, TIMEOUT_SECONDS)
    return TIMEOUT_SECONDS


class Helper:
    """A helper process and its request pipe; the first request starts it."""

    def __init__(self, niceness: int = 0) -> None:
        self._niceness = niceness
        self.forget()

    def forget(self) -> None:
        """Drops the helper without ending it, in a forked child: it belongs to the parent."""
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._lock = threading.RLock()
        self._is_asked = False
        self._killed = threading.Event()
        self._requests = 0

    def ask(self, request: Mapping[str, object], timeout: float | None = None) -> JsonObject:
        """Sends one request and waits for its answer. After an error, the next request starts a new helper."""
        with self._lock:
            if self._is_asked:
                why = "this thread waits for its answer already, and a signal handler or finalizer has interrupted it"
                raise OfflineError(f"the helper process that plans with cuDNN cannot be asked: {why}")
            self._is_asked = True
            try:
                return self._ask(request, timeout_seconds() if timeout is None else timeout)
            except BaseException:  # also an interrupt: the next request must not read a late answer
                self.close()
                raise
            finally:
                self._is_asked = False

    def _ask(self, request: Mapping[str, object], timeout: float) -> JsonObject:
        process = self._start()
        assert process.stdin is not None
        self._requests += 1
        try:
            with contextlib.suppress(BrokenPipeError):  # the helper has ended, which reading will show
                process.stdin.write(json.dumps({**request, "number": self._requests}).encode() + b"\n")
                process.stdin.flush()
            answer = self._read_answer(process, timeout)
        except (OSError, TimeoutError) as error:
            raise self._failed(f"does not answer ({error})") from error
        if answer is None:
            raise self._failed(interpreter.exit_reason(process.wait()))
        if answer.pop("number") != self._requests:
            raise self._failed("answered a different request")
        return answer

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def kill(self) -> None:
        """Ends the helper for good; a thread that waits for its answer or starts it gets an error."""
        self._killed.set()
        process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            if self._killed.is_set():
                raise OfflineError("the helper process that plans with cuDNN has been ended")
            interpreter.check()
            try:
                environment = {**driver.helper_environment(), interpreter.IN_HELPER: "1"}
                self._errors = _stderr_file()
                self._process = subprocess.Popen(
                    interpreter.command(_PROGRAM.format(niceness=self._niceness)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    bufsize=0,
                    env=environment,
                )
            except OSError as error:  # missing interpreter, too many open files or processes, no memory
                raise OfflineError(f"the helper process that plans with cuDNN cannot be started: {error}") from error
            if self._killed.is_set():  # another thread has killed it meanwhile
                self._process.kill()
        return self._process

    @staticmethod
    def _read_answer(process: subprocess.Popen[bytes], timeout: float) -> JsonObject | None:
        """The next answer; None if the helper ends. Skips output of site hooks at Python's start."""
        assert process.stdout is not None
        end, output, searched = time.monotonic() + timeout, bytearray(), 0
        with selectors.PollSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while searched < _MAX_NOISE:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise TimeoutError(f"{timeout:g} s have passed")
                part = os.read(process.stdout.fileno(), 1 << 20)
                if not part:
                    return None
                output += part
                while (newline := output.find(b"\n")) >= 0:
                    answer = _parse_answer(bytes(output[:newline]))
                    if answer is not None:
                        return answer
                    del output[: newline + 1]
                    searched += newline + 1
        raise TimeoutError("it keeps printing other output")

    def _failed(self, how: str) -> OfflineError:
        output = ""
        if self._errors is not None:
            self._errors.seek(0)
            output = self._errors.read().decode(errors="replace").strip()[-600:]
        message = f"the helper process that plans with cuDNN {how}"
        return OfflineError(f"{message}; it printed: {output}" if output else message)


def _parse_answer(line: bytes) -> JsonObject | None:
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and "number" in answer else None


def _stderr_file() -> IO[bytes] | None:
    """A file for the helper's stderr, quoted if it fails; None, this process's stderr, if it cannot be created."""
    try:
        return tempfile.TemporaryFile()
    except OSError:  # a container without writable storage
        return os.fdopen(os.memfd_create("cudnn_sdpa helper"), "w+b") if hasattr(os, "memfd_create") else None


_helper = Helper()
atexit.register(_helper.close)
os.register_at_fork(after_in_child=_helper.forget)


def plan_offline(key: PlanKey, properties: DeviceProperties, helper: Helper = _helper) -> OfflinePlan:
    """Plans and compiles `key` for the GPU that `properties` describes, in a helper process.

    Raises:
        UnsupportedError: cuDNN has no plan; lists its reasons.
        OfflineError: There was no answer: no C compiler, no cuDNN, or a crash.
    """
    answer = _answer(helper, key, properties)
    return OfflinePlan(identity=key.identity(), data=base64.b64decode(answer.pop("plan")), **answer)


def engine_offline(key: PlanKey, properties: DeviceProperties) -> str:
    engine: str = _answer(_helper, key, properties, heuristics=True)["engine"]
    return engine


def _answer(helper: Helper, key: PlanKey, properties: DeviceProperties, *, heuristics: bool = False) -> JsonObject:
    answer = helper.ask({"key": key.to_json(), "properties": properties, "heuristics": heuristics})
    if "error" in answer:
        if answer["reasons"] is None:
            raise OfflineError(answer["error"])
        raise UnsupportedError(key.name, answer["reasons"])
    return answer
