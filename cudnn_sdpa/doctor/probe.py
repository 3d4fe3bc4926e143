"""Collects the facts. The driver, PyTorch's CUDA and cuDNN, which may crash, are probed in a separate process.

That process prints a line of JSON after each part. A broken library may end it: the lines before that are still read.
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
from cudnn_sdpa.offline import interpreter
from cudnn_sdpa.offline.driver import compiler
from cudnn_sdpa.plans import default_store, private_folders
from cudnn_sdpa.plans.private_folders import UnsafeFolderError

#: A first plan takes a second, PyTorch some more; on a slow network disk a minute goes by.
TIMEOUT_SECONDS = 300.0

_PROGRAM = "from cudnn_sdpa.doctor.probe import main; main()"

#: Packages that matter beside those whose name begins with "nvidia-".
_PACKAGES = ("torch", "triton", "cudnn-sdpa")
_VARIABLES = re.compile(
    r"CUDNN_\w+|CUDA_(VISIBLE_DEVICES|HOME|PATH)|NVIDIA_VISIBLE_DEVICES|LD_(LIBRARY_PATH|PRELOAD)|XDG_CACHE_HOME|CC"
)
#: Where a system's own libcudnn lies.
_SYSTEM = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib", "usr/local/cuda*/lib64", "opt/cudnn*/lib*")
_NVIDIA = re.compile(r"/lib(cudnn|cuda|cudart|nvrtc|cublas)\w*\.so[.\d]*$")


def gather(timeout: float = TIMEOUT_SECONDS) -> Facts:
    """The facts of this machine and this environment.

    Raises:
        OfflineError: There is no interpreter for the process in which libraries are tried.
    """
    if reason := interpreter.why_no_python():
        raise OfflineError(f"the doctor examines an installation in a process of its own, but {reason}")
    parts, broken_off = examine(timeout)
    found = importlib.metadata.distributions()
    versions = {str(each.metadata["Name"] or "").lower().replace("_", "-"): each.version for each in found}
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


def _torch_facts(gpus: list[dict[str, Any]], **part: Any) -> TorchFacts:
    return TorchFacts(**part, gpus=tuple(Gpu(gpu["name"], tuple(gpu["capability"])) for gpu in gpus))


def examine(timeout: float) -> tuple[dict[str, Any], str]:
    """What the examining process said, and how it ended if not well."""
    try:
        result = subprocess.run(
            interpreter.command(_PROGRAM),
            env={**os.environ, default_store.VARIABLE: default_store.OFF},  # it shall build a plan, not find one
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        output, said, code = result.stdout, result.stderr, result.returncode
    except subprocess.TimeoutExpired as error:
        output, said, code = error.stdout or b"", error.stderr or b"", None
    parts = parts_of(output)
    if code == 0 and "trial" in parts:
        return parts, ""
    how = f"did not end within {timeout:g} s" if code is None else interpreter.describe_exit(code)
    last = said.decode(errors="replace").strip()[-600:]
    return parts, how + (f"; it said: {last}" if last else "")


def parts_of(output: bytes) -> dict[str, Any]:
    """The lines that the examining process got through; what else is there, as a site prints it, is passed over."""
    parts: dict[str, Any] = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # no JSON, or a line that was broken off
            said = json.loads(line)
            parts |= said if isinstance(said, dict) and set(said) <= {name for name, _ in PARTS} else {}
    return parts


def libraries() -> tuple[FoundLibrary, ...]:
    """Every libcudnn that a process could load, with the place that it was found by."""
    found: dict[str, str] = {}
    variable = "LD_LIBRARY_PATH"
    folders_of = {Path(entry): variable for entry in os.environ.get(variable, "").split(os.pathsep) if entry}
    for name in ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            package = importlib.metadata.distribution(name)
            origin = f"{name} {package.version}"
            for file in package.files or ():
                if file.name.startswith("libcudnn.so"):
                    folders_of.setdefault(Path(str(package.locate_file(file))).parent, origin)
    folders_of.setdefault(Path(sys.prefix) / "lib", "the environment")
    for pattern in _SYSTEM:
        for folder in sorted(Path("/").glob(pattern)):
            folders_of.setdefault(folder, "the system")
    for folder, origin in folders_of.items():
        with contextlib.suppress(OSError):  # a folder that may not be looked into; no process could load from it
            for path in sorted(folder.glob("libcudnn.so*")):
                found.setdefault(str(path), origin)
    return tuple(FoundLibrary(path, origin, os.path.realpath(path)) for path, origin in found.items())


def store() -> StoreFacts:
    """The plan store as a process would open it; nothing is made."""
    setting = os.environ.get(default_store.VARIABLE, "")
    named = bool(setting) and not default_store.is_off(setting)
    folder = None
    try:
        folder = default_store.folder_of_environment()
        if folder is None:
            return StoreFacts(None)
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            return StoreFacts(str(folder), named, f"{there} is no folder")
        private_folders.check_above(folder)
        if there == folder:
            os.close(private_folders.open_private(folder, make=False))
        if os.access(there, os.W_OK | os.X_OK):
            return StoreFacts(str(folder), named)
        if there == folder and os.access(there, os.R_OK | os.X_OK):
            plans = [path for path in folder.glob("*.plan") if os.access(path, os.R_OK)]
            return StoreFacts(
                str(folder), named, note=f"{folder} is not writable; {len(plans)} plans in it can be read"
            )
        return StoreFacts(str(folder), named, f"{there} is not writable")
    except UnsafeFolderError as error:
        return StoreFacts(None if folder is None else str(folder), named, str(error))
    except OSError as error:  # such as a parent that this user may not look into
        return StoreFacts(str(folder), named, f"{folder}: {error.strerror}")


def main() -> None:
    """Prints what was found out, one part a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print where they like; the answers' channel is ours alone
    answers.write("\n")  # ends what a site may have printed when Python started
    for name, part in PARTS:
        answers.write(json.dumps({name: part()}) + "\n")
        answers.flush()


def ask_driver() -> dict[str, Any]:
    """The driver's version and its GPUs. It may hang or crash."""
    module = Path("/proc/driver/nvidia/version")
    match = re.search(r"\b(\d{3,}\.[\d.]+)\b", module.read_text()) if module.exists() else None
    nodes = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    found: dict[str, Any] = {"release": match[1] if match else "", "nodes": len(nodes)}
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return found
    version, devices = ctypes.c_int(), ctypes.c_int()
    answered = library.cuDriverGetVersion(ctypes.byref(version)) == 0
    error = int(library.cuInit(0))  # makes no context, and takes no memory of a GPU
    if error == 0:
        library.cuDeviceGetCount(ctypes.byref(devices))
    return found | {
        "loads": True,
        "cuda": version.value if answered else None,
        "devices": devices.value,
        "error": error,
    }


def ask_torch() -> dict[str, Any]:
    """PyTorch's versions, its cuDNN, and the GPUs that it sees."""
    cuda = torch.version.cuda
    found: dict[str, Any] = {"version": torch.__version__, "cuda": cuda, "hip": torch.version.hip, "gpus": []}
    try:
        found["cudnn"] = torch.backends.cudnn.version() if cuda else None  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        found["cudnn_error"] = _in_one_line(error)
    try:
        for index in range(torch.cuda.device_count()) if cuda and torch.cuda.init() is None else ():  # type: ignore[no-untyped-call]
            gpu = {"name": torch.cuda.get_device_name(index), "capability": torch.cuda.get_device_capability(index)}
            found["gpus"].append(gpu)
    except Exception as error:  # noqa: BLE001 - the same
        found["cuda_error"] = _in_one_line(error)
    return found


def ask_cudnn() -> dict[str, Any]:
    """The frontend and the cuDNN behind it."""
    found: dict[str, Any] = {}
    try:
        found["frontend"] = backend.frontend_version()
        found["version"] = backend.cudnn_version()
    except Exception as error:  # noqa: BLE001 - the same
        found["error"] = _in_one_line(error)
    return found


def make_a_call() -> dict[str, Any]:
    """One call of `sdpa`: compared with the reference on a GPU, planned for one without."""
    from cudnn_sdpa.attention.dense.sdpa import sdpa
    from cudnn_sdpa.engine.explain import explain

    on_gpu = torch.version.cuda is not None and torch.cuda.is_available()
    found: dict[str, Any] = {"on": "GPU" if on_gpu else "offline"}
    try:
        q, k, v = (torch.randn(1, 2, 64, 64).to("cuda" if on_gpu else "cpu", torch.float16) for _ in range(3))
        report = explain(sdpa, q, k, v, is_causal=True, verify=on_gpu)
        found["engine"] = report.engine
        found["difference"] = max(report.errors.values(), default=None)
        found["error"] = "; ".join(report.reasons)
    except Exception as error:  # noqa: BLE001 - the same
        found["error"] = _in_one_line(error)
    return found


def mapped() -> list[str]:
    """Files of NVIDIA's libraries in this process."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line[line.find("/") :] for line in maps.read_text().splitlines() if "/" in line}
    return sorted(path for path in paths if _NVIDIA.search(path))


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


#: What the examining process finds out, in this order: each may crash it.
PARTS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("driver", ask_driver),
    ("torch", ask_torch),
    ("cudnn", ask_cudnn),
    ("mapped", mapped),
    ("trial", make_a_call),
    ("mapped", mapped),
)
