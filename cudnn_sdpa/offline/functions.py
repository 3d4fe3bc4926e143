"""Functions that other libraries' compilers make in helper processes, by kind: in this process, and in the plan store.

A kind is compiled once, without a GPU; a plan, of one shape, is made of its functions in microseconds.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from cudnn_sdpa._version import __version__
from cudnn_sdpa.errors import LibraryError, UnsupportedError
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.private_memory import relaxed_capture
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline import interpreter
from cudnn_sdpa.offline.installation import Installed, interface_of
from cudnn_sdpa.offline.planner import timeout_seconds
from cudnn_sdpa.plans import default_store, providers
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.function_plan import FunctionPlan, FunctionProgram, Interface, Library
from cudnn_sdpa.plans.plan import Plan
from cudnn_sdpa.plans.program_plan import ProgramOp
from cudnn_sdpa.plans.providers import CUDNN, DEFAULT, FASTEST
from cudnn_sdpa.plans.store import PlanStore, StoredPlan
from cudnn_sdpa.settings import renewed_in_children

_log = logging.getLogger("cudnn_sdpa")

#: A kind: a NamedTuple that JSON can hold.
KindT = TypeVar("KindT", bound=tuple[Any, ...])


@dataclass(frozen=True)
class FunctionIdentity:
    """The identity of a stored function: its kind, and what compiled it."""

    kind: tuple[Any, ...]
    function: str
    compiler: str

    def identity(self) -> dict[str, object]:
        found = {"function": self.function, "kind": list(self.kind), "host": platform.machine()}
        return {**found, "compiler": self.compiler}


class CompiledFunctions(Generic[KindT]):
    """A library's compiled functions in this process, by kind.

    Attributes:
        sources: The files of this project on which the functions and their arguments depend.
        library: The library's name in messages.
        engine: What is stored as the engine of its functions.
        helper: The program of a helper process, which calls `function_compiler.answer`.
        variables: How the environment variables begin that a helper process does not get.
        limit: The number of kinds that are kept in a process, where programs may need any number.
    """

    sources: ClassVar[tuple[Path, ...]]
    library: ClassVar[str]
    engine: ClassVar[str]
    helper: ClassVar[str]
    variables: ClassVar[str]
    limit: ClassVar[int | None] = None

    def __init__(self) -> None:
        self._failed: dict[KindT, str] = {}
        self._broken = ""  # why none can be compiled, whose packages do not import
        self._loaded: dict[KindT, dict[str, Library]] = {}
        self._pending: dict[KindT, None] = {}  # in order; a thread compiles the first
        self._was_warned = False
        self._lock = renewed_in_children(threading.RLock())  # never held while something is compiled
        self._compiling = renewed_in_children(threading.RLock())
        os.register_at_fork(after_in_child=self._pending.clear)  # their threads are the parent's

    def installed(self) -> Installed:
        """The library's installation."""
        raise NotImplementedError

    @functools.cached_property
    def _source(self) -> str:
        digest = hashlib.sha256(__version__.encode())
        for path in self.sources:
            digest.update(path.read_bytes())
        return digest.hexdigest()

    @property
    def compiler(self) -> str:
        """The library's versions and files, and this project's part in what is compiled."""
        return f"{self.installed().identity} {self._source}"

    def interface(self) -> Interface:
        """The C interface of the functions."""
        return interface_of(self.installed().tvm_ffi, self.installed().runtime)

    def kind_of(self, key: PlanKey) -> KindT:
        """The kind of a plan's functions, by its key."""
        raise NotImplementedError

    def names_of(self, kind: KindT) -> tuple[str, ...]:
        """The functions of a kind."""
        raise NotImplementedError

    def identity_of(self, kind: KindT, function: str) -> FunctionIdentity:
        return FunctionIdentity(kind, function, self.compiler)

    def library_of(self, data: bytes) -> Library:
        """A function, loaded."""
        self.interface()  # whose symbols it needs
        return Library(data)

    def of(self, kind: KindT) -> Mapping[str, Library]:
        """The functions of a kind: loaded, stored, or compiled now, which takes seconds.

        Raises:
            LibraryError: They cannot be compiled or loaded.
        """
        found = self._loaded.get(kind)
        if found is not None:
            return found
        with self._compiling:
            return self._find(kind) or self._keep(kind, self._compiled(kind))

    def are_ready(self, kind: KindT) -> bool:
        try:
            return kind in self._loaded or self._find(kind) is not None
        except LibraryError:
            return False

    def failure(self, kind: KindT) -> str:
        """Why a kind cannot be had; empty if it can, or may be compiled."""
        failed = self._failed.get(kind, "")
        if not failed and self.limit is not None and kind not in self._loaded and kind not in self._pending:
            number = len(self._loaded) + len(self._pending)
            failed = f"{self.limit} of its kinds are kept, and not more" if number >= self.limit else ""
        return failed or (self._broken if self._broken and not self.are_ready(kind) else "")

    def ready(
        self,
        key: PlanKey,
        *,
        of_cudnn: Callable[[Target, int | None], PlanKey],
        has_plan: Callable[[PlanKey], bool],
        others: tuple[str, ...] = (CUDNN, DEFAULT, FASTEST),
    ) -> PlanKey:
        """This key, or that of cuDNN's plan, if one of `others` is in force: see `dense.specs.ready`."""
        kind = self.kind_of(key)
        has_other, is_ready = not set(others).isdisjoint(providers.active()), self.are_ready(kind)
        is_captured = torch.cuda.is_current_stream_capturing()
        if not has_other or plan_cache.peek(key) is not None or (is_ready and not is_captured):
            return key
        try:
            other = of_cudnn(key.target, key.device)
        except UnsupportedError:
            return key
        if not (is_captured or plan_cache.builds_are_forbidden):
            self.compile_in_background(kind)
            return other
        return other if has_plan(other) else key  # what was warmed up before a kind was compiled

    def compile_in_background(self, kind: KindT) -> None:
        """Has a thread compile kinds, one after the other; after each, all calls find their plans again."""
        with self._lock:
            if kind in self._pending or self.failure(kind) or interpreter.why_no_helper():
                return
            self._pending[kind] = None
            if len(self._pending) > 1:
                return  # the thread that compiles the first will compile this one
        threading.Thread(target=self._work, name="cudnn_sdpa functions", daemon=True).start()

    def compile_into(self, store: PlanStore, kind: KindT) -> bool:
        """Compiles a kind into a store; returns whether any function was missing there."""
        if self.are_in(store, kind):
            return False
        self._save(store, kind, self._compiled(kind))
        return True

    def are_in(self, store: PlanStore, kind: KindT) -> bool:
        return all(store.has(self.identity_of(kind, name)) for name in self.names_of(kind))

    def save(self, store: PlanStore, kind: KindT, functions: Mapping[str, bytes], seconds: float) -> None:
        """Saves what was compiled on this machine."""
        self._save(store, kind, self._stored_form(kind, functions, seconds))

    def _work(self) -> None:
        kind = next(iter(self._pending), None)
        while kind is not None:
            try:
                with relaxed_capture():
                    self.of(kind)
            except Exception as error:  # noqa: BLE001 - the provider is then left out
                level = logging.DEBUG if self._broken and self._was_warned else logging.WARNING
                self._was_warned = True
                _log.log(level, "%s was not compiled in the background, and is not used: %s", self.library, error)
                self._failed.setdefault(kind, str(error))
            with self._lock:
                self._pending.pop(kind, None)
                kind = next(iter(self._pending), None)
            plan_cache.forget_calls()

    def _find(self, kind: KindT) -> dict[str, Library] | None:
        store = default_store.active()
        if kind in self._loaded or store is None:
            return self._loaded.get(kind)
        stored = {name: store.load(self.identity_of(kind, name)) for name in self.names_of(kind)}
        usable = {name: each for name, each in stored.items() if each is not None and each.knobs.keys() <= _cpu()}
        return self._load(kind, usable) if len(usable) == len(stored) else None

    def _keep(self, kind: KindT, compiled: Mapping[str, StoredPlan]) -> dict[str, Library]:
        store = default_store.active()
        if store is not None:
            self._save(store, kind, compiled)
        return self._load(kind, compiled)

    def _load(self, kind: KindT, stored: Mapping[str, StoredPlan]) -> dict[str, Library]:
        with self._lock:
            if kind not in self._loaded:
                try:
                    self._loaded[kind] = {name: self.library_of(each.data) for name, each in stored.items()}
                except OSError as error:
                    raise self._failing(kind, f"its functions cannot be loaded: {error}") from error
            return self._loaded[kind]

    def refuse(self, kind: KindT, why: str) -> None:
        """Leaves a kind out from now on."""
        self._failing(kind, why)
        plan_cache.forget_calls()
        _log.warning("%s", self._failed[kind])

    def _failing(self, kind: KindT, why: str) -> LibraryError:
        """The error of a kind that is not tried again."""
        self._failed[kind] = f"{self.library} {self.installed().version} is not used for {kind}: {why}"
        return LibraryError(self._failed[kind])

    def _compiled(self, kind: KindT) -> dict[str, StoredPlan]:
        if failure := self._failed.get(kind) or self._broken:
            raise LibraryError(failure)
        if missing := self.installed().missing:  # manifests of other machines name kinds, too
            raise LibraryError(f"{self.library} cannot be used: {missing}")
        interpreter.check()
        start = time.perf_counter()
        others = {name: value for name, value in os.environ.items() if not name.startswith(self.variables)}
        try:
            done = subprocess.run(
                interpreter.command(self.helper),
                input=json.dumps(kind),
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_seconds(),
                env={**others, interpreter.IN_HELPER: "1"},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise self._failing(kind, f"its helper process does not answer: {error}") from error
        seconds = time.perf_counter() - start
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            answer = {"error": f"its helper process {interpreter.exit_reason(done.returncode)}: {done.stderr[-600:]}"}
        if "error" in answer:
            if answer["error"].startswith(("ImportError", "ModuleNotFoundError")):
                self._broken = f"{self.library} {self.installed().version} cannot be imported: {answer['error']}"
            raise self._failing(kind, answer["error"])
        return self._stored_form(kind, {name: base64.b64decode(x) for name, x in answer["functions"].items()}, seconds)

    def _save(self, store: PlanStore, kind: KindT, compiled: Mapping[str, StoredPlan]) -> None:
        for name, stored in compiled.items():
            store.save(self.identity_of(kind, name), stored)

    def _stored_form(self, kind: KindT, functions: Mapping[str, bytes], seconds: float) -> dict[str, StoredPlan]:
        return {
            name: StoredPlan(
                self.identity_of(kind, name).identity(),
                engine=self.engine,
                knobs=dict.fromkeys(sorted(_cpu()), 1),
                workspace=0,
                build_seconds=seconds / len(functions),
                data=function,
            )
            for name, function in functions.items()
        }


class CompiledOp(ProgramOp):
    """An operation of a library's compiled functions."""

    functions: ClassVar[CompiledFunctions[Any]]
    program: Callable[[PlanKey], FunctionProgram]

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.functions.compiler.encode()).hexdigest()

    def made(self, key: PlanKey) -> Plan:
        libraries = self.functions.of(self.functions.kind_of(key))
        return FunctionPlan(key, self.program(key), libraries, self.functions.interface())

    def ready(
        self, key: PlanKey, *, of_cudnn: Callable[[Target, int | None], PlanKey], has_plan: Callable[[PlanKey], bool]
    ) -> PlanKey:
        return self.functions.ready(key, of_cudnn=of_cudnn, has_plan=has_plan)

    def is_compiled(self, key: PlanKey) -> bool:
        return self.functions.are_ready(self.functions.kind_of(key))

    def compile_into(self, store: PlanStore, key: PlanKey) -> bool:
        return self.functions.compile_into(store, self.functions.kind_of(key))

    def is_in(self, store: PlanStore, key: PlanKey) -> bool:
        return self.functions.are_in(store, self.functions.kind_of(key))


#: Extensions of instruction sets that the compiler uses for the processor that it runs on, as the system names them.
#: AMD's SSE4A is left out: no function of the tests' kinds has such an instruction, and Intel's processors have none.
_EXTENSIONS = re.compile(
    r"ssse3|sse4_[12]|avx\w*|amx\w*|bmi[12]|fma|f16c|movbe|popcnt|abm|adx|"
    r"asimd\w*|sve\w*|sme\d*|fp|fphp|atomics|lrcpc|crc32"
)


@functools.cache
def _cpu() -> frozenset[str]:
    """The processor's extensions, which host code that was compiled here may need, as the system names them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, found = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(each for each in found.split() if _EXTENSIONS.fullmatch(each))
    return frozenset()
