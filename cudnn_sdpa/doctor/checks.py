"""Checks of PyTorch, cuDNN, the GPUs, a call and the plan store; each finding comes with its cure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from cudnn_sdpa._version import __version__
from cudnn_sdpa.graph.backend import version_string

if TYPE_CHECKING:
    from cudnn_sdpa.doctor.probe import Facts  # imports PyTorch; `cure_of` is used where that fails

#: The oldest PyTorch that the library is tested with, and the oldest generation of GPUs that cuDNN has kernels for.
MIN_TORCH = (2, 9)
MIN_MAJOR = 8


class Level(str, Enum):
    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    level: Level
    title: str
    found: str
    cure: str
    check: str = ""


REINSTALL = "pip uninstall every nvidia-cudnn package and pip install the one that PyTorch requires"
ONE_CUDNN = f"Keep one cuDNN: remove CUDA folders from LD_LIBRARY_PATH, or {REINSTALL}."

#: Patterns of libraries' messages, each with its cure; the first match counts.
CURES = {
    r"nvidia-cudnn-frontend cannot be imported \(No module named": "Install it: pip install nvidia-cudnn-frontend.",
    r"nvidia-cudnn-frontend .* is too old": "pip install --upgrade nvidia-cudnn-frontend.",
    r"cuDNN .* is too old": "Remove its folder from LD_LIBRARY_PATH, or upgrade the nvidia-cudnn package.",
    r"undefined symbol|version `\w+.* not found|SUBLIBRARY_|Found \d+ libcudnn|cuDNN version incompatib": ONE_CUDNN,
    r"libnvrtc|NVRTC": "pip install nvidia-cuda-nvrtc-cu12 for CUDA 12, or nvidia-cuda-nvrtc for 13.",
    r"libcublas": "pip install nvidia-cublas-cu12 for CUDA 12, or nvidia-cublas for 13.",
    r"libcudnn\S* (cannot|could not) be loaded|libcudnn\S*: cannot open|Unable to (dynamically )?load libcudnn": (
        "Install cuDNN for PyTorch's CUDA: pip install 'cudnn-sdpa[cu12]' or 'cudnn-sdpa[cu13]'."
    ),
    r"static TLS block": "Import torch before other libraries, or start Python with LD_PRELOAD set to that library.",
    r"file too short|invalid ELF header": f"The file is damaged: {REINSTALL}.",
    r"driver on your system is too old|driver version is insufficient": (
        "Update NVIDIA's driver (525 for CUDA 12, 580 for CUDA 13), or install a PyTorch for an older CUDA."
    ),
    r"no NVIDIA driver": "Install NVIDIA's driver; in a container, start it with GPUs (docker run --gpus all).",
    r"No CUDA GPUs": "Unset CUDA_VISIBLE_DEVICES; in a container, start it with GPUs (docker run --gpus all).",
    r"Error 802|system not yet initialized": (
        "Start NVIDIA's fabric manager (systemctl start nvidia-fabricmanager): the GPUs wait for it."
    ),
    r"Error 803|driver combination": "Reboot, or reload the kernel module: the driver has been updated.",
    r"Error 804|forward compatibility": "Remove the cuda-compat folder from LD_LIBRARY_PATH.",
    r"no kernel image": "Install a PyTorch that was built for this GPU.",
    r"out of memory": "Another program uses the GPU's memory (nvidia-smi shows which): end it, or use another GPU.",
    r"C compiler": "Install a C compiler (on Debian: apt-get install gcc libc6-dev).",
    r"XDG_CACHE_HOME": "Set XDG_CACHE_HOME to a folder that only you can write to.",
}


def cure_of(message: str, default: str) -> str:
    return next((cure for pattern, cure in CURES.items() if re.search(pattern, message, re.IGNORECASE)), default)


_error, _warning, _note = (partial(Finding, level) for level in Level)


#: An activity for each part of the probing process, and the cure if the process ends in it.
_PARTS = {
    "torch": (
        "PyTorch looked for its GPUs",
        "Reboot if nvidia-smi hangs or fails as well; otherwise reinstall PyTorch in a fresh environment.",
    ),
    "cudnn": ("cuDNN was loaded", ONE_CUDNN),
    "call": ("a call of sdpa was tested", "Report it with the output of `doctor --json`."),
}


def broken_off(facts: Facts) -> Iterator[Finding]:
    if facts.broken_off:
        what, cure = _PARTS[facts.broken_in]
        yield _error(f"A process ended while {what}", facts.broken_off, cure_of(facts.broken_off, cure))


def torch(facts: Facts) -> Iterator[Finding]:
    if tuple(int(part) for part in re.findall(r"\d+", facts.torch)[:2]) < MIN_TORCH:
        found = f"torch {facts.torch}; 2.9 or newer is needed"
        yield _error("PyTorch is too old", found, "pip install --upgrade torch.")
    if facts.cuda is None and (facts.hip or facts.gpu_nodes):
        found = f"torch {facts.torch}, {facts.gpu_nodes} NVIDIA GPU(s)"
        cure = "With an NVIDIA GPU, install PyTorch's CUDA build (pytorch.org/get-started shows the command)."
        yield _error("This PyTorch has no CUDA, so no GPU is used", found, cure)


def gpus(facts: Facts) -> Iterator[Finding]:
    if facts.cuda is None or facts.broken_in == "torch":
        return
    if not facts.gpus:
        name = "CUDA_VISIBLE_DEVICES"
        setting = f"{name}={facts.environment[name]!r}" if name in facts.environment else ""
        driver = f"kernel module {facts.driver or 'none'}, {facts.gpu_nodes} GPU(s) in /dev"
        default = f"Check whether nvidia-smi lists a GPU, and unset {name}; after an update of the driver, reboot."
        found = "; ".join(filter(None, (facts.gpus_error, driver, setting)))
        yield _error("PyTorch sees no GPU", found, cure_of(facts.gpus_error, default))
    old = [gpu for gpu in facts.gpus if gpu.major < MIN_MAJOR]
    if old:
        found = f"{'; '.join(dict.fromkeys(map(str, old)))}; 8.0 or newer is needed"
        cure = "Use a GPU of the Ampere generation or newer, or fallback('torch')."
        finding = _error if len(old) == len(facts.gpus) else _warning
        yield finding("A GPU is too old for cuDNN's attention", found, cure)


def packages(facts: Facts) -> Iterator[Finding]:
    installed = sorted(name for name in facts.packages if name.startswith("nvidia-cudnn-cu"))
    fitting = f"nvidia-cudnn-cu{facts.cuda.split('.')[0]}" if facts.cuda else max(installed, default="")
    if installed not in ([], [fitting]):
        found = " and ".join(f"{name} {facts.packages[name]}" for name in installed)
        found += f", PyTorch for CUDA {facts.cuda or 'none'}"
        cure = f"pip uninstall {' '.join(installed)}, then pip install {fitting}."
        yield _error("cuDNN is installed for another CUDA, or twice", found, cure)


def other_providers(facts: Facts) -> Iterator[Finding]:
    named = {name.strip() for name in facts.environment.get("CUDNN_SDPA_PROVIDERS", "").split(",")}
    for by, what, missing in (
        ({"fa4", "fastest"}, "FlashAttention-4, which cannot be used", facts.flash4_missing),
        ({"frontend"}, "cuDNN's frontend, whose own kernels cannot be used", facts.frontend_missing),
        ({"fa4", "fastest", "frontend"}, "providers whose functions cannot be linked", facts.compiler_missing),
    ):
        if missing and by & named:
            found, _, cure = missing.rpartition("; ")
            yield _warning(f"CUDNN_SDPA_PROVIDERS asks for {what}", found, f"{cure}.")


def cudnn(facts: Facts) -> Iterator[Finding]:
    if facts.cudnn_error:
        yield _error("cuDNN cannot be used", facts.cudnn_error, cure_of(facts.cudnn_error, ONE_CUDNN))
    if facts.torch_cudnn_error:
        yield _error("PyTorch refuses its cuDNN", facts.torch_cudnn_error, cure_of(facts.torch_cudnn_error, ONE_CUDNN))
    folders = {folder for folder, _, name in (path.rpartition("/") for path in facts.mapped) if "libcudnn" in name}
    found = sorted(folders) if len(folders) > 1 else []
    if facts.torch_cudnn and facts.cudnn and facts.torch_cudnn != facts.cudnn:
        found.append(f"PyTorch's is {version_string(facts.torch_cudnn)}, this library's {version_string(facts.cudnn)}")
    if found:
        yield _error("Two cuDNNs are in one process", "; ".join(found), ONE_CUDNN)


def call(facts: Facts) -> Iterator[Finding]:
    if facts.call_error and facts.cudnn:
        default = "Fix the problems above first; if there are none, report the output of `doctor --json`."
        cure = cure_of(facts.call_error, default)
        if facts.gpus:
            yield _error("A call of sdpa fails on the GPU", facts.call_error, cure)
        else:
            yield _warning("No plan can be made for another machine", facts.call_error, cure)
    elif facts.difference and not float(facts.difference) < 1e-2:
        found = f"relative error {facts.difference}, {facts.engine}"
        cure = "Do not use this cuDNN on this GPU: install another version, and report the output of `doctor --json`."
        yield _error("sdpa gives wrong results on this GPU", found, cure)


def settings(facts: Facts) -> Iterator[Finding]:
    for problem in facts.refused_settings:
        yield _error("Calls refuse the value of an environment variable", problem, "Correct it, or unset it.")
    for problem in facts.ignored_settings:
        yield _warning("An environment variable is ignored", problem, "Correct it, or unset it.")


def store(facts: Facts) -> Iterator[Finding]:
    if not facts.plan_store_problem:
        return
    if facts.plan_store_is_readable:
        cure = "Nothing, if this is intended, as in an image: every process builds the plans that are missing."
        yield _note("Plans are read, but new ones are not stored", facts.plan_store_problem, cure)
    else:
        cure = "Set CUDNN_SDPA_PLAN_DIR to a folder that only you can write to, or to 'off' to store no plans."
        finding = _error if facts.environment.get("CUDNN_SDPA_PLAN_DIR") else _warning
        yield finding("Plans cannot be stored: every process builds its own", facts.plan_store_problem, cure)


def native(facts: Facts) -> Iterator[Finding]:
    if facts.gpus and facts.native.startswith("Python") and not facts.native.endswith("=off"):
        cure = "Do what it says, then run `python -m cudnn_sdpa build-native`; without it only speed is lost."
        yield _note("Calls go through Python, not C++", facts.native.removeprefix("Python: "), cure)


#: In the order of causes before effects.
CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...]
CHECKS = settings, broken_off, torch, gpus, packages, cudnn, call, store, native, other_providers


def examine(facts: Facts) -> list[Finding]:
    findings = [replace(finding, check=check.__name__) for check in CHECKS for finding in check(facts)]
    return sorted(findings, key=lambda finding: list(Level).index(finding.level))


def is_well(findings: list[Finding]) -> bool:
    return all(finding.level is not Level.ERROR for finding in findings)


def as_json(facts: Facts, findings: list[Finding]) -> str:
    report = {
        "cudnn_sdpa": __version__,
        "ok": is_well(findings),
        "findings": [asdict(each) for each in findings],
        "facts": asdict(facts),
    }
    return json.dumps(report, indent=1)


def as_text(facts: Facts, findings: list[Finding]) -> str:
    lines = [f"{name:<14}{value}" for name, value in _summary(facts)]
    for finding in findings:
        lines += ["", f"{finding.level.value}: {finding.title}", f"  {finding.found}", f"  cure: {finding.cure}"]
    errors = sum(finding.level is Level.ERROR for finding in findings)
    last = "No problems found." if errors == 0 else f"{errors} problem{'s' * (errors > 1)} found."
    return "\n".join([*lines, "", last])


def _summary(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "cudnn_sdpa", f"{__version__}, Python {facts.python}"
    its_cudnn = f", cuDNN {version_string(facts.torch_cudnn)}" if facts.torch_cudnn else ""
    yield "PyTorch", f"{facts.torch}, CUDA {facts.cuda or 'none'}{its_cudnn}"
    yield "cuDNN", version_string(facts.cudnn) if facts.cudnn else "none"
    yield "frontend", facts.frontend or "none"
    if "nvidia-cutlass-dsl" in facts.packages:  # which compiles them, and which others install, too
        yield "its kernels", facts.frontend_missing or facts.frontend_kernels
    for path in facts.mapped:
        yield "loaded", path
    yield "driver", facts.driver or "no kernel module"
    for gpu in facts.gpus or ("none found; CPU tensors run the reference",):
        yield "GPU", str(gpu)
    if facts.engine:
        how = f"relative error {facts.difference}" if facts.difference else "planned for another machine"
        yield "a call", f"{facts.engine}, {how}"
    yield "calls", facts.native
    if "flash-attn-4" in facts.packages:
        yield "flash-attn-4", facts.flash4_missing or facts.flash4
    yield "plan store", facts.plan_store or "none"
    for name, value in facts.environment.items():
        yield "environment", f"{name}={value}"
