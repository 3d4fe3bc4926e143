"""Collects the facts. A separate process probes PyTorch's CUDA and cuDNN, either of which may crash.

It prints a line of JSON after each part. If a broken library ends it, the lines printed before are still used.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from cudnn_sdpa._json import JsonObject
from cudnn_sdpa.doctor.facts import CudnnFacts, Facts, Gpu, StoreFacts, TorchFacts, TrialFacts
from cudnn_sdpa.engine.native import loader
from cudnn_sdpa.errors import OfflineError
from cudnn_sdpa.graph import backend
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
    r"CUDNN_\w+|CUDA_(VISIBLE_DEVICES|HOME|PATH)|NVIDIA_VISIBLE_DEVICES|LD_(LIBRARY_PATH|PRELOAD)|XDG_CACHE_HOME|CC|CXX"
)
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
        overriding=overriding(),
        driver=driver(),
        gpu_nodes=gpu_nodes(),
        c_compiler=compiler(),
        native=loader.forecast(),
        store=store(),
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
    how = f"did not end within {timeout:g} s" if code is None else interpreter.exit_reason(code)
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


def overriding() -> dict[str, str]:
    """Folders on LD_LIBRARY_PATH that have a libcudnn, with their real paths."""
    found = {}
    for folder in map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))):
        with contextlib.suppress(OSError):  # an unreadable folder; no process could load from it
            if any(folder.glob("libcudnn.so*")):
                found[str(folder)] = os.path.realpath(folder)
    return found


def driver() -> str:
    """The version of NVIDIA's kernel module; empty if it is not loaded."""
    module = Path("/proc/driver/nvidia/version")
    match = re.search(r"\b(\d{3,}\.[\d.]+)\b", module.read_text()) if module.exists() else None
    return match[1] if match else ""


def gpu_nodes() -> int:
    """The number of GPUs in /dev; WSL has one node for all."""
    return sum(re.fullmatch(r"nvidia\d+|dxg", path.name) is not None for path in Path("/dev").iterdir())


def store() -> StoreFacts:
    """The plan store as a process would open it; nothing is created."""
    folder = None
    try:
        folder = default_store.folder_of_environment()
        if folder is None:
            return StoreFacts(None)
        private_folders.check_above(folder)
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if existing == folder:
            os.close(private_folders.open_private(folder, make=False))
        if os.access(existing, os.W_OK | os.X_OK):
            return StoreFacts(str(folder))
        is_readable = existing == folder and os.access(existing, os.R_OK | os.X_OK)
        return StoreFacts(str(folder), f"{existing} is not writable", is_readable)
    except (UnsafeFolderError, OSError) as error:  # OSError: such as an unreadable parent
        return StoreFacts(None if folder is None else str(folder), str(error))


def main() -> None:
    """Prints the parts, one per line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps libraries' prints out of the answers
    answers.write("\n")  # ends output of site hooks at Python's start
    for name, part in PARTS:
        answers.write(json.dumps({name: part()}) + "\n")
        answers.flush()


@contextlib.contextmanager
def _error_in(facts: dict[str, object], name: str) -> Iterator[None]:
    """Whatever is raised becomes a fact, in one line."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        facts[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"


def probe_torch() -> dict[str, object]:
    """PyTorch's versions, its cuDNN, and the GPUs that it sees."""
    cuda = torch.version.cuda
    gpus: list[dict[str, object]] = []
    facts: dict[str, object] = {"version": torch.__version__, "cuda": cuda, "hip": torch.version.hip, "gpus": gpus}
    if cuda is None:
        return facts
    with _error_in(facts, "cudnn_error"):
        facts["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    with _error_in(facts, "cuda_error"):
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            capability = torch.cuda.get_device_capability(index)
            gpus.append({"name": torch.cuda.get_device_name(index), "capability": capability})
    return facts


def probe_cudnn() -> dict[str, object]:
    """The versions of the frontend and its cuDNN."""
    facts: dict[str, object] = {}
    with _error_in(facts, "error"):
        facts["frontend"] = backend.frontend_version()
        facts["version"] = backend.cudnn_version()
    return facts


def probe_call() -> dict[str, object]:
    """One call of `sdpa`: with a GPU, compared with the reference; without one, planned."""
    from cudnn_sdpa.attention.dense.sdpa import sdpa
    from cudnn_sdpa.engine.explain import explain

    on_gpu = torch.version.cuda is not None and torch.cuda.is_available()
    facts: dict[str, object] = {"on": "GPU" if on_gpu else "offline"}
    with _error_in(facts, "error"):
        q, k, v = (torch.randn(1, 2, 64, 64).to("cuda" if on_gpu else "cpu", torch.float16) for _ in range(3))
        report = explain(sdpa, q, k, v, is_causal=True, verify=on_gpu)
        facts["engine"] = report.engine
        facts["error"] = "; ".join(report.reasons)
        facts["difference"] = report.errors.get("out")
    return facts


def mapped() -> list[str]:
    """Files of NVIDIA's libraries in this process."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line[line.find("/") :] for line in maps.read_text().splitlines() if "/" in line}
    return sorted(path for path in paths if _NVIDIA.search(path))


#: The parts of the probing process, in this order: each may crash it.
PARTS: tuple[tuple[str, Callable[[], object]], ...] = (
    ("torch", probe_torch),
    ("cudnn", probe_cudnn),
    ("mapped", mapped),
    ("trial", probe_call),
    ("mapped", mapped),
)
