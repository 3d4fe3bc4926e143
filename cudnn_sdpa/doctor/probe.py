"""The facts about an installation. A separate process probes PyTorch's CUDA and cuDNN, either of which may crash.

It sends a line of JSON after each part. If a broken library ends it, the lines sent before are still used.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from cudnn_sdpa.attention.flash4.installed import installed
from cudnn_sdpa.attention.frontend import installed as frontend
from cudnn_sdpa.engine import cpu_target, explain
from cudnn_sdpa.engine.native import loader
from cudnn_sdpa.errors import OfflineError, OptionError
from cudnn_sdpa.graph import backend
from cudnn_sdpa.graph.layouts import JsonObject
from cudnn_sdpa.graph.target import check_name
from cudnn_sdpa.offline import function_compiler, interpreter, planner
from cudnn_sdpa.plans import default_store, private_folders, providers, shape_policy
from cudnn_sdpa.plans.cache import capacity_from_environment
from cudnn_sdpa.plans.private_folders import UnsafeFolderError

#: A first plan takes a second, an import of PyTorch a few, on a slow network disk a minute.
TIMEOUT_SECONDS = 300.0

_PROGRAM = "from cudnn_sdpa.doctor.probe import main; main()"

#: Packages to list, besides those whose name begins with "nvidia-".
_PACKAGES = ("torch", "triton", "cudnn-sdpa", "flash-attn-4")
_VARIABLES = re.compile(
    r"CUDNN_\w+|CUDA_(VISIBLE_DEVICES|HOME|PATH)|NVIDIA_VISIBLE_DEVICES|LD_(LIBRARY_PATH|PRELOAD)|XDG_CACHE_HOME|CC|CXX"
)
#: Readers of this library's variables with a limited set of values.
_READ: dict[str, Callable[[], object]] = {
    "CUDNN_SDPA_CACHE_SIZE": capacity_from_environment,
    "CUDNN_SDPA_CPU_CHECKS": cpu_target.of_environment,
    planner.TIMEOUT_VARIABLE: planner.timeout_seconds,
    loader.VARIABLE: loader.mode,
    loader.RECORDED_VARIABLE: loader.recorded_mode,
    shape_policy.VARIABLE: shape_policy.of_environment,
    providers.VARIABLE: providers.of_environment,
    explain.TARGET_VARIABLE: lambda: check_name(
        os.environ.get(explain.TARGET_VARIABLE) or "h200", explain.TARGET_VARIABLE
    ),
}
#: Variables that accept any value, and those of this project's tests.
_OTHERS = (
    *("DEBUG", "IN_HELPER", "NATIVE_DIR", "PLAN_DIR", "TRANSFORMERS", "TRUSTED_FOLDERS", "UNTESTED_PROVIDERS"),
    *("COMPILED_PLANS", "GPU_REPORT", "NEEDS_BROWSER", "TEST_NATIVE", "TEST_PLANS"),
)
_NVIDIA = re.compile(r"/lib(cudnn|cuda|cudart|nvrtc|cublas)\w*\.so[.\d]*$")


@dataclass(frozen=True)
class Gpu:
    name: str
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.major}.{self.minor}"


@dataclass(frozen=True)
class Facts:
    """All facts. Those of the probing process keep their defaults if it ended before."""

    python: str
    packages: dict[str, str]
    environment: dict[str, str]
    driver: str  # version of NVIDIA's kernel module
    gpu_nodes: int  # GPUs of the machine or container, visible to PyTorch or not
    native: str  # see `loader.forecast`
    torch: str  # version
    cuda: str | None  # version that PyTorch was built for
    hip: str | None
    flash4: str = ""  # versions of FlashAttention-4 and of what it needs
    flash4_missing: str = ""  # why it cannot be used
    frontend_kernels: str = ""  # versions of the frontend and of what its own kernels need
    frontend_missing: str = ""  # why they cannot be used
    compiler_missing: str = ""  # why functions of both cannot be linked
    plan_store: str | None = None  # None if it is off, or the user has no cache folder
    plan_store_problem: str = ""  # why plans cannot be saved
    plan_store_is_readable: bool = False  # although they cannot be saved
    refused_settings: tuple[str, ...] = ()  # values of this library's variables that calls refuse
    ignored_settings: tuple[str, ...] = ()  # invalid ones replaced by defaults, and unknown names

    broken_off: str = ""  # end of the probing process, if it failed
    broken_in: str = ""  # its part of PARTS
    gpus: tuple[Gpu, ...] = ()
    gpus_error: str = ""
    torch_cudnn: int | None = None
    torch_cudnn_error: str = ""
    frontend: str = ""
    cudnn: int | None = None
    cudnn_error: str = ""
    engine: str = ""  # of the call
    difference: str = ""  # largest relative error, as text because JSON has no NaN; empty without a GPU
    call_error: str = ""
    mapped: tuple[str, ...] = ()  # NVIDIA's libraries in the probing process


def gather(timeout: float = TIMEOUT_SECONDS) -> Facts:
    if reason := interpreter.why_no_python():
        raise OfflineError(f"the doctor examines an installation in a separate process, but {reason}")
    found = probed(timeout)
    packages = importlib.metadata.distributions()
    versions = {str(each.metadata["Name"] or "").lower().replace("_", "-"): each.version for each in packages}
    return Facts(
        python=platform.python_version(),
        packages={name: versions[name] for name in sorted(versions) if name.startswith("nvidia-") or name in _PACKAGES},
        environment={name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
        driver=driver(),
        gpu_nodes=gpu_nodes(),
        native=loader.forecast(),
        flash4=installed().identity,
        flash4_missing=installed().missing,
        frontend_kernels=frontend.installed().identity,
        frontend_missing=frontend.installed().missing,
        compiler_missing=function_compiler.why_no_compiler(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        gpus=tuple(Gpu(**gpu) for gpu in found.pop("gpus", ())),
        **store(),
        **settings(),
        **found,
    )


def probed(timeout: float) -> JsonObject:
    """Facts of the probing process, and its end if it failed."""
    reader, writer = os.pipe()  # libraries print to the standard streams
    with os.fdopen(reader) as answers:
        try:
            result = subprocess.run(
                interpreter.command(_PROGRAM, str(writer)),
                env={**os.environ, default_store.VARIABLE: default_store.OFF},  # to test a build, not a load
                capture_output=True,
                timeout=timeout,
                check=False,
                pass_fds=[writer],
            )
            how, errors = interpreter.exit_reason(result.returncode), result.stderr
        except subprocess.TimeoutExpired as error:
            how, errors = f"did not end within {timeout:g} s", error.stderr or b""
        finally:
            os.close(writer)
        parts = [json.loads(line) for line in answers]
    found: JsonObject = {name: value for part in parts for name, value in part.items()}
    if len(parts) < len(PARTS) or how != interpreter.exit_reason(0):  # a library can end it with 0
        last = errors.decode(errors="replace").strip()[-600:]
        found["broken_off"] = how + (f"; it printed: {last}" if last else "")
        found["broken_in"] = list(PARTS)[min(len(parts), len(PARTS) - 1)]
    return found


def settings() -> JsonObject:
    refused: list[str] = []
    ignored: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("cudnn_sdpa")
    handler.emit = lambda record: ignored.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        for read in _READ.values():
            try:
                read()
            except OptionError as error:  # noqa: PERF203 - a few, once
                refused.append(str(error))
    finally:
        log.removeHandler(handler)
    known = {*_READ, *(f"CUDNN_SDPA_{name}" for name in _OTHERS)}
    unknown = [name for name in sorted(os.environ) if name.startswith("CUDNN_SDPA_") and name not in known]
    ignored += [f"{name}: nothing reads it" for name in unknown]
    return {"refused_settings": tuple(refused), "ignored_settings": tuple(ignored)}


def driver() -> str:
    """The version of NVIDIA's kernel module; empty if it is not loaded."""
    module = Path("/proc/driver/nvidia/version")
    match = re.search(r"\b(\d{3,}\.[\d.]+)\b", module.read_text()) if module.exists() else None
    return match[1] if match else ""


def gpu_nodes() -> int:
    """The number of GPUs in /dev; WSL has one node for all."""
    return sum(re.fullmatch(r"nvidia\d+|dxg", path.name) is not None for path in Path("/dev").iterdir())


def store() -> JsonObject:
    facts: JsonObject = {}
    try:
        folder = default_store.folder_of_environment()
        if folder is None:
            return facts
        facts["plan_store"] = str(folder)
        private_folders.check_above(folder)
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if existing == folder:
            os.close(private_folders.open_private(folder, make=False))
        if not os.access(existing, os.W_OK | os.X_OK):
            facts["plan_store_problem"] = f"{existing} is not writable"
            facts["plan_store_is_readable"] = existing == folder and os.access(existing, os.R_OK | os.X_OK)
    except (UnsafeFolderError, OSError) as error:  # OSError: such as an unreadable parent
        facts["plan_store_problem"] = str(error)
    return facts


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for part in PARTS.values():
            print(json.dumps(part()), file=answers, flush=True)


@contextlib.contextmanager
def _error_in(facts: dict[str, object], name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        facts[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"


def probe_torch() -> dict[str, object]:
    gpus: list[dict[str, object]] = []
    facts: dict[str, object] = {"gpus": gpus}
    if torch.version.cuda is None:
        return facts
    with _error_in(facts, "torch_cudnn_error"):
        facts["torch_cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    with _error_in(facts, "gpus_error"):
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            gpus.append({"name": gpu.name, "major": gpu.major, "minor": gpu.minor})
    return facts


def probe_cudnn() -> dict[str, object]:
    facts: dict[str, object] = {}
    with _error_in(facts, "cudnn_error"):
        facts["frontend"] = backend.frontend_version()
        facts["cudnn"] = backend.cudnn_version()
    return {**facts, "mapped": mapped()}


def probe_call() -> dict[str, object]:
    """One call of `sdpa`: with a GPU, compared with the reference; without one, planned."""
    from cudnn_sdpa.attention.dense.sdpa import sdpa
    from cudnn_sdpa.engine.explain import explain

    on_gpu = torch.version.cuda is not None and torch.cuda.is_available()
    facts: dict[str, object] = {}
    with _error_in(facts, "call_error"):
        q, k, v = (torch.randn(1, 2, 64, 64).to("cuda" if on_gpu else "cpu", torch.float16) for _ in range(3))
        report = explain(sdpa, q, k, v, is_causal=True, verify=on_gpu)
        facts["engine"] = report.engine
        facts["call_error"] = "; ".join(report.reasons)
        if "out" in report.errors:
            facts["difference"] = f"{report.errors['out']:.1e}"
    return {**facts, "mapped": mapped()}


def mapped() -> list[str]:
    return sorted(path for path in set(backend.mapped_files()) if _NVIDIA.search(path))


#: The parts of the probing process, in this order: each may crash it.
PARTS: dict[str, Callable[[], object]] = {"torch": probe_torch, "cudnn": probe_cudnn, "call": probe_call}
