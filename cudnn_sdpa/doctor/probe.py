"""Collects the facts. A separate process probes the driver, PyTorch's CUDA and cuDNN, any of which may crash.

It prints a line of JSON after each part. If a broken library ends it, the lines printed before are still used.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cudnn_sdpa.doctor.facts import (
    CudnnFacts,
    DriverFacts,
    Facts,
    FoundLibrary,
    Gpu,
    StoreFacts,
    TorchFacts,
    TrialFacts,
)
from cudnn_sdpa.errors import OfflineError
from cudnn_sdpa.graph import backend
from cudnn_sdpa.graph.backend import JsonObject
from cudnn_sdpa.offline import interpreter
from cudnn_sdpa.offline.driver import compiler
from cudnn_sdpa.plans import default_store, private_folders
from cudnn_sdpa.plans.private_folders import UnsafeFolderError

#: A first plan takes a second, importing PyTorch a few, on a slow network disk a minute.
TIMEOUT_SECONDS = 300.0

_PROGRAM = "from cudnn_sdpa.doctor.probe import main; main()"

#: Packages to list, besides those whose name begins with "nvidia-".
_PACKAGES = ("torch", "triton", "cudnn-sdpa")
_VARIABLES = re.compile(
    r"CUDNN_\w+|CUDA_(VISIBLE_DEVICES|HOME|PATH)|NVIDIA_VISIBLE_DEVICES|LD_(LIBRARY_PATH|PRELOAD)|XDG_CACHE_HOME|CC"
)
#: Folders of a system's own libcudnn.
_SYSTEM = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib", "usr/local/cuda*/lib64", "opt/cudnn*/lib*")
_NVIDIA = re.compile(r"/lib(cudnn|cuda|cudart|nvrtc|cublas)\w*\.so[.\d]*$")


def gather(timeout: float = TIMEOUT_SECONDS) -> Facts:
    """The facts of this machine and this environment.

    Raises:
        OfflineError: There is no interpreter for the probing process.
    """
    if reason := interpreter.why_no_python():
        raise OfflineError(f"the doctor examines an installation in a separate process, but {reason}")
    parts, broken_off = examine(timeout)
    packages = importlib.metadata.distributions()
    versions = {str(each.metadata["Name"] or "").lower().replace("_", "-"): each.version for each in packages}
    return Facts(
        platform=sys.platform,
        python=platform.python_version(),
        packages={name: versions[name] for name in sorted(versions) if name.startswith("nvidia-") or name in _PACKAGES},
        environment={name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
        libraries=libraries(),
        c_compiler=compiler(),
        store=store(),
        driver=DriverFacts(**parts["driver"]) if "driver" in parts else None,
        torch=_torch_facts(**parts["torch"]) if "torch" in parts else None,
        cudnn=CudnnFacts(**parts["cudnn"]) if "cudnn" in parts else None,
        trial=TrialFacts(**parts["trial"]) if "trial" in parts else None,
        mapped=tuple(parts.get("mapped", ())),
        broken_off=broken_off,
    )


def _torch_facts(gpus: list[JsonObject], **part: Any) -> TorchFacts:
    return TorchFacts(**part, gpus=tuple(Gpu(gpu["name"], tuple(gpu["capability"])) for gpu in gpus))


def examine(timeout: float) -> tuple[JsonObject, str]:
    """The parts that the probing process printed, and how it ended if it failed."""
    try:
        result = subprocess.run(
            interpreter.command(_PROGRAM),
            env={**os.environ, default_store.VARIABLE: default_store.OFF},  # to test a build, not a load
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        output, errors, code = result.stdout, result.stderr, result.returncode
    except subprocess.TimeoutExpired as error:
        output, errors, code = error.stdout or b"", error.stderr or b"", None
    parts = parts_of(output)
    if code == 0 and "trial" in parts:
        return parts, ""
    how = f"did not end within {timeout:g} s" if code is None else interpreter.describe_exit(code)
    last = errors.decode(errors="replace").strip()[-600:]
    return parts, how + (f"; it printed: {last}" if last else "")


def parts_of(output: bytes) -> JsonObject:
    """The complete lines of the probing process; other output, for instance of site hooks, is skipped."""
    parts: JsonObject = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # not JSON, or an incomplete line
            part = json.loads(line)
            parts |= part if isinstance(part, dict) and set(part) <= {name for name, _ in PARTS} else {}
    return parts


def libraries() -> tuple[FoundLibrary, ...]:
    """Every libcudnn that a process could load, with its origin."""
    origins: dict[str, str] = {}
    variable = "LD_LIBRARY_PATH"
    folders = {Path(entry): variable for entry in os.environ.get(variable, "").split(os.pathsep) if entry}
    for name in ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            package = importlib.metadata.distribution(name)
            origin = f"{name} {package.version}"
            for file in package.files or ():
                if file.name.startswith("libcudnn.so"):
                    folders.setdefault(Path(str(package.locate_file(file))).parent, origin)
    folders.setdefault(Path(sys.prefix) / "lib", "the environment")
    for pattern in _SYSTEM:
        for folder in sorted(Path("/").glob(pattern)):
            folders.setdefault(folder, "the system")
    for folder, origin in folders.items():
        with contextlib.suppress(OSError):  # an unreadable folder; no process could load from it
            for path in sorted(folder.glob("libcudnn.so*")):
                origins.setdefault(str(path), origin)
    return tuple(FoundLibrary(path, origin, os.path.realpath(path)) for path, origin in origins.items())


def store() -> StoreFacts:
    """The plan store as a process would open it; nothing is created."""
    setting = os.environ.get(default_store.VARIABLE, "")
    named = bool(setting) and not default_store.is_off(setting)
    folder = None
    try:
        folder = default_store.folder_of_environment()
        if folder is None:
            return StoreFacts(None)
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not existing.is_dir():
            return StoreFacts(str(folder), named, problem=f"{existing} is not a folder")
        private_folders.check_above(folder)
        if existing == folder:
            os.close(private_folders.open_private(folder, make=False))
        if os.access(existing, os.W_OK | os.X_OK):
            return StoreFacts(str(folder), named)
        if existing == folder and os.access(existing, os.R_OK | os.X_OK):
            plans = [path for path in folder.glob("*.plan") if os.access(path, os.R_OK)]
            note = f"{folder} is not writable; {len(plans)} plans in it can be read"
            return StoreFacts(str(folder), named, note=note)
        return StoreFacts(str(folder), named, problem=f"{existing} is not writable")
    except UnsafeFolderError as error:
        return StoreFacts(None if folder is None else str(folder), named, problem=str(error))
    except OSError as error:  # such as an unreadable parent
        return StoreFacts(str(folder), named, problem=f"{folder}: {error.strerror}")


def main() -> None:
    """Prints the parts, one per line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps libraries' prints out of the answers
    answers.write("\n")  # ends output of site hooks at Python's start
    for name, part in PARTS:
        answers.write(json.dumps({name: part()}) + "\n")
        answers.flush()


def probe_driver() -> dict[str, object]:
    """The driver's version and its GPUs. It may hang or crash."""
    module = Path("/proc/driver/nvidia/version")
    match = re.search(r"\b(\d{3,}\.[\d.]+)\b", module.read_text()) if module.exists() else None
    nodes = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    facts: dict[str, object] = {"release": match[1] if match else "", "nodes": len(nodes)}
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return facts
    version, devices = ctypes.c_int(), ctypes.c_int()
    has_version = library.cuDriverGetVersion(ctypes.byref(version)) == 0
    error = int(library.cuInit(0))  # creates no context, and uses no GPU memory
    if error == 0:
        library.cuDeviceGetCount(ctypes.byref(devices))
    return facts | {
        "loads": True,
        "cuda": version.value if has_version else None,
        "devices": devices.value,
        "error": error,
    }


def probe_torch() -> dict[str, object]:
    """PyTorch's versions, its cuDNN, and the GPUs that it sees."""
    cuda = torch.version.cuda
    gpus: list[dict[str, object]] = []
    facts: dict[str, object] = {"version": torch.__version__, "cuda": cuda, "hip": torch.version.hip, "gpus": gpus}
    try:
        facts["cudnn"] = torch.backends.cudnn.version() if cuda else None  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        facts["cudnn_error"] = _in_one_line(error)
    try:
        for index in range(torch.cuda.device_count()) if cuda and torch.cuda.init() is None else ():  # type: ignore[no-untyped-call]
            capability = torch.cuda.get_device_capability(index)
            gpus.append({"name": torch.cuda.get_device_name(index), "capability": capability})
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        facts["cuda_error"] = _in_one_line(error)
    return facts


def probe_cudnn() -> dict[str, object]:
    """The versions of the frontend and its cuDNN."""
    facts: dict[str, object] = {}
    try:
        facts["frontend"] = backend.frontend_version()
        facts["version"] = backend.cudnn_version()
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        facts["error"] = _in_one_line(error)
    return facts


def probe_call() -> dict[str, object]:
    """One call of `sdpa`: with a GPU, compared with the reference; without one, planned."""
    from cudnn_sdpa.attention.dense.sdpa import sdpa
    from cudnn_sdpa.engine.explain import explain

    on_gpu = torch.version.cuda is not None and torch.cuda.is_available()
    facts: dict[str, object] = {"on": "GPU" if on_gpu else "offline"}
    try:
        q, k, v = (torch.randn(1, 2, 64, 64).to("cuda" if on_gpu else "cpu", torch.float16) for _ in range(3))
        report = explain(sdpa, q, k, v, is_causal=True, verify=on_gpu)
        facts["engine"] = report.engine
        facts["difference"] = max(report.errors.values(), default=None)
        facts["error"] = "; ".join(report.reasons)
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        facts["error"] = _in_one_line(error)
    return facts


def mapped() -> list[str]:
    """Files of NVIDIA's libraries in this process."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line[line.find("/") :] for line in maps.read_text().splitlines() if "/" in line}
    return sorted(path for path in paths if _NVIDIA.search(path))


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


#: The parts of the probing process, in this order: each may crash it.
PARTS: tuple[tuple[str, Callable[[], object]], ...] = (
    ("driver", probe_driver),
    ("torch", probe_torch),
    ("cudnn", probe_cudnn),
    ("mapped", mapped),
    ("trial", probe_call),
    ("mapped", mapped),
)
