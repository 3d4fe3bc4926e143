"""Asks a helper process for plans. One helper serves this process; it starts with the first question."""

from __future__ import annotations

import atexit
import base64
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cudnn_sdpa.errors import OfflineError, UnsupportedError
from cudnn_sdpa.offline import driver
from cudnn_sdpa.runtime.key import PlanKey

_PACKAGE = Path(__file__).parent.parent

#: A plan takes 0.3 to 1 s; the first one also the start of Python and PyTorch.
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class OfflinePlan:
    """A plan that was compiled without its GPU.

    Attributes:
        engine: cuDNN's engine.
        knobs: The engine's settings.
        workspace: Bytes that a launch needs beside its operands.
        build_seconds: Time that planning and compiling took.
        data: The plan in cuDNN's serialized form.
        libraries: Which file each NVIDIA library of the helper was loaded from.
        note: Why the GPU itself would make a much faster one; empty if it would not.
    """

    engine: str
    knobs: dict[str, int]
    workspace: int
    build_seconds: float
    data: bytes
    libraries: dict[str, str]
    note: str = ""


#: What the helper runs. Its search path is this process's, without the folder that the user happens to be in.
_PROGRAM = """
import os, signal, sys
os.nice({niceness})
signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the program, which ends this process if it ends
sys.path[:] = {path!r}
from cudnn_sdpa.offline.worker import main
main()
"""


class Helper:
    """A helper process and the conversation with it."""

    def __init__(self, niceness: int = 0) -> None:
        """It starts with the first request.

        Args:
            niceness: By how much it stands back for other processes.
        """
        self._niceness = niceness
        self.forget()

    def forget(self) -> None:
        """Starts afresh, as a forked child must: the parent's helper is the parent's."""
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._asked = 0

    def ask(self, request: dict[str, Any], timeout: float = TIMEOUT_SECONDS) -> dict[str, Any]:
        """Sends one request and waits for its answer.

        Raises:
            OfflineError: The helper cannot be started, crashed, or did not answer in time. The next request gets a
                new one.
        """
        with self._lock:
            try:
                return self._ask(request, timeout)
            except BaseException:  # also an interrupt: a late answer must not meet the next question
                self.close()
                raise

    def _ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        process = self._start()
        assert process.stdin is not None
        self._asked += 1
        try:
            process.stdin.write(json.dumps({**request, "number": self._asked}).encode() + b"\n")
            process.stdin.flush()
            line = self._read_line(process, timeout)
        except (OSError, TimeoutError) as error:
            raise self._failed(f"does not answer ({error})") from error
        if not line:
            raise self._failed(_describe_exit(process.wait()))
        answer: dict[str, Any] = json.loads(line)
        if answer.pop("number") != self._asked:
            raise self._failed("answered another question")
        return answer

    def close(self) -> None:
        """Ends the helper, if there is one."""
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
        """Ends the helper for good, while another thread waits for its answer or starts it, which gets an error."""
        self._ended.set()
        process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            if self._ended.is_set():
                raise OfflineError("the helper process that plans with cuDNN has been ended")
            environment = driver.helper_environment()
            path = [str(Path(entry).resolve()) for entry in sys.path if entry] + [str(_PACKAGE.parent)]
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the helper
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=path, niceness=self._niceness)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env=environment,
            )
            if self._ended.is_set():  # meanwhile
                self._process.kill()
        return self._process

    @staticmethod
    def _read_line(process: subprocess.Popen[bytes], timeout: float) -> bytes:
        assert process.stdout is not None
        line = bytearray()
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], timeout)
            if not ready:
                raise TimeoutError(f"{timeout:g} s have passed")
            part = os.read(process.stdout.fileno(), 1 << 20)
            if not part:
                return b""
            line += part
        return bytes(line)

    def _failed(self, what: str) -> OfflineError:
        said = ""
        if self._errors is not None:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()[-600:]
        return OfflineError(f"the helper process that plans with cuDNN {what}" + (f"; it said: {said}" if said else ""))


def _describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


_helper = Helper()
atexit.register(_helper.close)
os.register_at_fork(after_in_child=_helper.forget)


def plan_offline(key: PlanKey, properties: dict[str, Any], helper: Helper = _helper) -> OfflinePlan:
    """Plans and compiles `key` for the GPU that `properties` describes, in a helper process.

    Args:
        key: The key; its target was made from `properties`.
        properties: In the form of cuDNN's device-properties JSON.
        helper: The process to ask, if not the one that serves this process.

    Raises:
        UnsupportedError: cuDNN has no plan, with its reasons.
        OfflineError: There was no answer: no C compiler, no cuDNN, or a crash.
    """
    answer = _answer(helper, key, properties)
    data = base64.b64decode(answer.pop("plan"))
    return OfflinePlan(data=data, **answer)


def plan_to_keep(key: PlanKey, properties: dict[str, Any], helper: Helper) -> OfflinePlan:
    """The same, if the GPU shall load this plan instead of building one.

    Raises:
        UnsupportedError: cuDNN has no plan, with its reasons.
        OfflineError: There was no answer, or it is a plan that is much slower than one built on the GPU.
    """
    made = plan_offline(key, properties, helper)
    if made.note:
        what = f"{key.name} is left to be built on the GPU, by the first call or by warmup"
        raise OfflineError(f"{what}: {made.note}")
    return made


def engine_offline(key: PlanKey, properties: dict[str, Any]) -> str:
    """The engine that cuDNN's heuristics propose for `key`, without compiling it; the same errors as `plan_offline`."""
    engine: str = _answer(_helper, key, properties, heuristics=True)["engine"]
    return engine


def _answer(helper: Helper, key: PlanKey, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = helper.ask({"key": key.to_json(), "properties": properties, **more})
    if "error" in answer:
        if answer["reasons"] is None:
            raise OfflineError(answer["error"])
        raise UnsupportedError(key.name, answer["reasons"])
    return answer
