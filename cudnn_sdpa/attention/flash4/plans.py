"""Plans of FlashAttention-4's functions: their operations, and the compilation of a kind in a helper process.

A kind is compiled once and kept in the plan store; a plan, of one shape, is made of its functions in microseconds.
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

import torch

from cudnn_sdpa._version import __version__
from cudnn_sdpa.attention.flash4.installed import installed, interface
from cudnn_sdpa.attention.flash4.programs import CAUSAL, ENGINE, Kind, Window, program_of
from cudnn_sdpa.errors import LibraryError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline import interpreter
from cudnn_sdpa.offline.planner import timeout_seconds
from cudnn_sdpa.plans import default_store
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.device_memory import relaxed_capture
from cudnn_sdpa.plans.function_plan import FunctionPlan, FunctionProgram, Library
from cudnn_sdpa.plans.plan import Plan
from cudnn_sdpa.plans.program_plan import ProgramOp
from cudnn_sdpa.plans.store import PlanStore, StoredPlan
from cudnn_sdpa.settings import renewed_in_children

_log = logging.getLogger("cudnn_sdpa")

#: The compute capability for which functions are called as the tests on a GPU have called them.
TESTED_SM = 90

DTYPES = (torch.float16, torch.bfloat16)

#: Head dims are multiples of this, up to `MAX_DIM`.
UNIT, MAX_DIM = 8, 256

#: The head dims of q and v, of those that differ, with which the tests passed on a GPU. With 48 and 80 the gradient of
#: q was wrong (seen with 4.0.0b36); with 64 and 32 no gradient compiles.
LATENT = (192, 128)

_PROGRAM = """
import os
from cudnn_sdpa.attention.flash4.compiler import ENVIRONMENT, main
os.environ.update(ENVIRONMENT)
main()
"""


@dataclass(frozen=True)
class _Identity:
    """The identity of a stored function."""

    kind: Kind
    function: str

    def identity(self) -> dict[str, object]:
        found = {"flash-attn-4": installed().identity, "source": _source(), "sm": TESTED_SM}
        return {"function": self.function, "kind": list(self.kind), "host": platform.machine(), **found}


@functools.cache
def _source() -> str:
    """A digest of this library's part in what is compiled, and of how it is called."""
    digest = hashlib.sha256(__version__.encode())
    for name in ("compiler.py", "programs.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


def kind_of(key: PlanKey) -> Kind:
    layouts = {operand.name: operand.layout for operand in (*key.inputs, *key.outputs)}
    return Kind.of(layouts, key.option_values["window"])  # type: ignore[arg-type]


def names_of(kind: Kind) -> tuple[str, ...]:
    """The functions of a kind."""
    if not kind.is_backward:
        return ("forward",)
    return ("before", "main", "grad_q", *(("grad_k", "grad_v") if kind.group > 1 else ()))


class Functions:
    """Compiled functions of this process, by kind."""

    def __init__(self) -> None:
        self._failed: dict[Kind, str] = {}
        self._broken = ""  # why none can be compiled, whose packages do not import
        self._loaded: dict[Kind, dict[str, Library]] = {}
        self._pending: set[Kind] = set()
        self._lock = renewed_in_children(threading.RLock())  # never held while something is compiled
        self._compiling = renewed_in_children(threading.RLock())
        os.register_at_fork(after_in_child=self._pending.clear)  # their threads are the parent's

    def of(self, kind: Kind) -> Mapping[str, Library]:
        """The functions of a kind: loaded, stored, or compiled now, which takes seconds.

        Raises:
            LibraryError: They cannot be compiled or loaded.
        """
        found = self._loaded.get(kind)
        if found is not None:
            return found
        with self._compiling:
            return self._find(kind) or self._keep(kind, self._compiled(kind))

    def are_ready(self, kind: Kind) -> bool:
        try:
            return kind in self._loaded or self._find(kind) is not None
        except LibraryError:
            return False

    def failure(self, kind: Kind) -> str:
        """Why a kind cannot be had; empty if it can, or may be compiled."""
        failed = self._failed.get(kind, "")
        return failed or (self._broken if self._broken and not self.are_ready(kind) else "")

    def compile_in_background(self, kind: Kind) -> None:
        """Has a thread compile a kind, one after the other; then all calls find their plans again."""
        with self._lock:
            if kind in self._pending or self.failure(kind) or interpreter.why_no_helper():
                return
            self._pending.add(kind)
        threading.Thread(target=self._work, args=(kind,), name="cudnn_sdpa functions", daemon=True).start()

    def compile_into(self, store: PlanStore, kind: Kind) -> bool:
        """Compiles a kind into a store; returns whether any function was missing there."""
        if self.are_in(store, kind):
            return False
        _save(store, kind, self._compiled(kind))
        return True

    @staticmethod
    def are_in(store: PlanStore, kind: Kind) -> bool:
        return all(store.has(_Identity(kind, name)) for name in names_of(kind))

    def _work(self, kind: Kind) -> None:
        try:
            with relaxed_capture():
                self.of(kind)
        except Exception as error:  # noqa: BLE001 - the provider is then left out
            level = logging.DEBUG if self._broken in str(error) and self._failed else logging.WARNING
            _log.log(level, "FlashAttention-4 was not compiled in the background, and is not used: %s", error)
            self._failed.setdefault(kind, str(error))
        finally:
            self._pending.discard(kind)
            plan_cache.forget_calls()

    def _find(self, kind: Kind) -> dict[str, Library] | None:
        store = default_store.active()
        if kind in self._loaded or store is None:
            return self._loaded.get(kind)
        stored = {name: store.load(_Identity(kind, name)) for name in names_of(kind)}
        usable = {name: each for name, each in stored.items() if each is not None and each.knobs.keys() <= _cpu()}
        return self._load(kind, usable) if len(usable) == len(stored) else None

    def _keep(self, kind: Kind, compiled: Mapping[str, StoredPlan]) -> dict[str, Library]:
        store = default_store.active()
        if store is not None:
            _save(store, kind, compiled)
        return self._load(kind, compiled)

    def _load(self, kind: Kind, stored: Mapping[str, StoredPlan]) -> dict[str, Library]:
        with self._lock:
            if kind not in self._loaded:
                try:
                    interface()  # whose symbols they need
                    self._loaded[kind] = {name: Library(each.data) for name, each in stored.items()}
                except OSError as error:
                    raise self._failing(kind, f"its functions cannot be loaded: {error}") from error
            return self._loaded[kind]

    def refuse(self, kind: Kind, why: str) -> None:
        """Leaves a kind out from now on."""
        self._failing(kind, why)
        plan_cache.forget_calls()
        _log.warning("%s", self._failed[kind])

    def _failing(self, kind: Kind, why: str) -> LibraryError:
        """The error of a kind that is not tried again."""
        self._failed[kind] = f"FlashAttention-4 {installed().version} is not used for {kind}: {why}"
        return LibraryError(self._failed[kind])

    def _compiled(self, kind: Kind) -> dict[str, StoredPlan]:
        if failure := self._failed.get(kind) or self._broken:
            raise LibraryError(failure)
        interpreter.check()
        start = time.perf_counter()
        others = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_ATTENTION_")}
        try:
            done = subprocess.run(
                interpreter.command(_PROGRAM),
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
                self._broken = f"FlashAttention-4 {installed().version} cannot be imported: {answer['error']}"
            raise self._failing(kind, answer["error"])
        return _stored_form(kind, {name: base64.b64decode(x) for name, x in answer["functions"].items()}, seconds)


def save(store: PlanStore, kind: Kind, functions: Mapping[str, bytes], seconds: float) -> None:
    """Saves what `compiler.compile_kind` has compiled on this machine."""
    _save(store, kind, _stored_form(kind, functions, seconds))


def _save(store: PlanStore, kind: Kind, compiled: Mapping[str, StoredPlan]) -> None:
    for name, stored in compiled.items():
        store.save(_Identity(kind, name), stored)


def _stored_form(kind: Kind, functions: Mapping[str, bytes], seconds: float) -> dict[str, StoredPlan]:
    return {
        name: StoredPlan(
            _Identity(kind, name).identity(),
            engine=ENGINE,
            knobs=dict.fromkeys(sorted(_cpu()), 1),
            workspace=0,
            build_seconds=seconds / len(functions),
            data=function,
        )
        for name, function in functions.items()
    }


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


functions = Functions()


class Flash4Op(ProgramOp):
    """An operation that FlashAttention-4's functions compute."""

    provider = "fa4"
    program: Callable[[PlanKey], FunctionProgram]

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(f"{_source()} {installed().identity}".encode()).hexdigest()

    def made(self, key: PlanKey) -> Plan:
        return FunctionPlan(key, self.program(key), functions.of(kind_of(key)), interface())

    def compile_into(self, store: PlanStore, key: PlanKey) -> bool:
        return functions.compile_into(store, kind_of(key))

    def is_in(self, store: PlanStore, key: PlanKey) -> bool:
        return functions.are_in(store, kind_of(key))


@Flash4Op
def flash4_forward(key: PlanKey) -> FunctionProgram:
    """The forward pass of dense attention."""
    return program_of(key)


@Flash4Op
def flash4_backward(key: PlanKey) -> FunctionProgram:
    """The backward pass of dense attention."""
    return program_of(key)


def reasons_against(layouts: Mapping[str, TensorLayout], window: Window, target: Target) -> list[str]:
    """Why FlashAttention-4 cannot serve a call with these operands, each (B, H, S, D), or (T, H, D) if packed."""
    if missing := installed().missing:
        return [missing]
    reasons = []
    if target.sm != TESTED_SM:
        reasons.append(f"it was tested on compute capability 9.0 alone, and the GPU has {target.sm / 10:.1f}")
    q, v = layouts["q"], layouts["v"]
    dims, is_packed = (q.shape[-1], v.shape[-1]), len(q.shape) == 3
    if q.dtype not in DTYPES:
        reasons.append(f"its dtypes are float16 and bfloat16, and q has {str(q.dtype).removeprefix('torch.')}")
    if dims[0] != dims[1] and dims != LATENT:
        pairs = f"its head dims of q and v are one, or {LATENT[0]} and {LATENT[1]}"
        reasons.append(f"{pairs}: with {dims[0]} and {dims[1]} its gradients may be wrong")
    if any(dim % UNIT or dim > MAX_DIM for dim in dims):
        reasons.append(f"its head dims are multiples of {UNIT} up to {MAX_DIM}, and not {dims[0]} and {dims[1]}")
    grid = q.shape[1:2] if is_packed else q.shape[:2]
    if max(grid) > known_issues.MAX_GRID and (is_packed or ("grad_q" not in layouts and window != CAUSAL)):
        reasons.append(f"its grids have at most {known_issues.MAX_GRID:,} batch entries or heads")
    if any(bound is not None and bound < 0 for bound in window):
        reasons.append(f"its masks end at the last query and the last key, and this one is the window {window} there")
    for name, layout in layouts.items():
        sizes = zip(layout.shape[:-1], layout.stride[:-1], strict=True)
        if any(size > 1 and not stride for size, stride in sizes):
            reasons.append(f"{name} is expanded: it would be copied")
    if "grad_q" in layouts and dims[0] != dims[1] and q.shape[1] != layouts["k"].shape[1]:
        reasons.append("its gradients of grouped heads need one head dim of q and v")
    if not reasons and (failure := functions.failure(Kind.of(layouts, window))):
        reasons.append(failure)
    return reasons
