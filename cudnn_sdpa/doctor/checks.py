"""Checks of PyTorch, cuDNN, the GPUs, a call and the plan store; each finding comes with its cure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import PurePosixPath

from cudnn_sdpa.doctor.facts import Facts
from cudnn_sdpa.graph.backend import version_string

#: The oldest PyTorch that the library is tested with, and the oldest compute capability that cuDNN has kernels for.
MIN_TORCH = (2, 9)
MIN_CAPABILITY = (8, 0)

_CUDNN = re.compile(r"nvidia-cudnn-cu(\d+)")


class Level(str, Enum):
    """Severity, highest first: something fails, may fail, or is good to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """A problem: what was found, and the cure."""

    level: Level
    title: str
    found: str
    cure: str
    check: str = ""


REINSTALL = "pip uninstall every nvidia-cudnn package and pip install the one that PyTorch requires"
_MIXED = f"Two versions are mixed: remove other CUDA folders from LD_LIBRARY_PATH, or {REINSTALL}."

#: Patterns of libraries' messages, each with its cure; the first match counts.
CURES = {
    r"nvidia-cudnn-frontend cannot be imported \(No module named": "Install it: pip install nvidia-cudnn-frontend.",
    r"nvidia-cudnn-frontend .* is too old": "pip install --upgrade nvidia-cudnn-frontend.",
    r"cuDNN .* is too old": "Remove its folder from LD_LIBRARY_PATH, or upgrade the nvidia-cudnn package.",
    r"undefined symbol|version `\w+.* not found|SUBLIBRARY_|Found \d+ libcudnn|cuDNN version incompatib": _MIXED,
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
    """The cure for a library's message."""
    return next((cure for pattern, cure in CURES.items() if re.search(pattern, message, re.IGNORECASE)), default)


_error, _warning, _note = (partial(Finding, level) for level in Level)


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def platform(facts: Facts) -> Iterator[Finding]:
    """The platform is Linux."""
    if facts.platform != "linux":
        yield _error("cuDNN's plans run on Linux only", facts.platform, "Use Linux, also in WSL.")


#: Parts of the probing process, in their order: what it does, and the cure if that ends it.
_PARTS = {
    "torch": (
        "PyTorch looked for its GPUs",
        "Reboot if nvidia-smi hangs or fails as well; otherwise reinstall PyTorch in a fresh environment.",
    ),
    "cudnn": ("cuDNN was loaded", f"Remove CUDA folders from LD_LIBRARY_PATH, or {REINSTALL}."),
    "trial": ("a call of sdpa was tested", "Report it with the output of `doctor --json`."),
}


def broken_off(facts: Facts) -> Iterator[Finding]:
    """The probing process ran to its end."""
    if facts.broken_off:
        part = next((part for part in _PARTS if getattr(facts, part) is None), "trial")
        what, cure = _PARTS[part]
        yield _error(f"A process ended while {what}", facts.broken_off, cure_of(facts.broken_off, cure))


def torch(facts: Facts) -> Iterator[Finding]:
    """PyTorch is new enough, and its build matches the machine."""
    torch = facts.torch
    version = torch.version if torch else facts.packages.get("torch", "")
    if version and _major_minor(version) < MIN_TORCH:
        yield _error("PyTorch is too old", f"torch {version}; 2.9 or newer is needed", "pip install --upgrade torch.")
    if torch is None or torch.cuda is not None:
        return
    if torch.hip is not None:
        cure = "Use a machine with an NVIDIA GPU and PyTorch's CUDA build."
        yield _error("This PyTorch is for AMD GPUs", f"torch {version}", cure)
    elif facts.gpu_nodes:
        title = "This PyTorch has no CUDA, so the GPU is not used"
        cure = "Install PyTorch's CUDA build (pytorch.org/get-started shows the command)."
        yield _error(title, f"torch {version}, {facts.gpu_nodes} NVIDIA GPU(s)", cure)
    else:
        cure = "Nothing: CPU tensors run the reference, and plans can be compiled for other machines."
        yield _note("No GPU here, and PyTorch's CPU build", f"torch {version}", cure)


def gpus(facts: Facts) -> Iterator[Finding]:
    """A CUDA build of PyTorch sees GPUs, of a generation that has kernels."""
    torch = facts.torch
    if torch is None or torch.cuda is None:
        return
    if not torch.gpus:
        name = "CUDA_VISIBLE_DEVICES"
        setting = f"{name}={facts.environment[name]!r}" if name in facts.environment else ""
        driver = f"kernel module {facts.driver or 'none'}, {facts.gpu_nodes} GPU(s) in /dev"
        default = f"Check whether nvidia-smi lists a GPU, and unset {name}; after an update of the driver, reboot."
        found = "; ".join(filter(None, (torch.cuda_error, driver, setting)))
        yield _error("PyTorch sees no GPU", found, cure_of(torch.cuda_error, default))
    old = [gpu for gpu in torch.gpus if gpu.capability < MIN_CAPABILITY]
    for gpu in dict.fromkeys(old):
        found = f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}; 8.0 or newer is needed"
        cure = "Use a GPU of the Ampere generation or newer, or fallback('torch')."
        finding = _error if len(old) == len(torch.gpus) else _warning
        yield finding("A GPU is too old for cuDNN's attention", found, cure)


def packages(facts: Facts) -> Iterator[Finding]:
    """The cuDNN packages are for one CUDA: PyTorch's."""
    installed = {match[1]: name for name in facts.packages if (match := _CUDNN.fullmatch(name))}
    required = facts.torch.cuda.split(".")[0] if facts.torch and facts.torch.cuda else None
    found = " and ".join(f"{name} {facts.packages[name]}" for name in sorted(installed.values()))
    if len(installed) > 1:
        keep = f"nvidia-cudnn-cu{required}" if required else "the one that you want"
        cure = f"pip uninstall {' '.join(sorted(installed.values()))}, then pip install {keep}."
        yield _error("cuDNN for CUDA 12 and for 13 are installed over each other", found, cure)
    elif facts.torch and installed and required and required not in installed:
        cure = f"pip uninstall {' '.join(installed.values())}, then pip install 'cudnn-sdpa[cu{required}]'."
        found += f", and PyTorch for CUDA {facts.torch.cuda}"
        yield _error("cuDNN is for another CUDA than PyTorch", found, cure)


def cudnn(facts: Facts) -> Iterator[Finding]:
    """The frontend and its cuDNN can be loaded, all of it from one folder, and are those that PyTorch uses."""
    torch, ours = facts.torch, facts.cudnn
    if ours is not None and ours.error:
        cure = cure_of(ours.error, f"Remove CUDA folders from LD_LIBRARY_PATH, or {REINSTALL}.")
        yield _error("cuDNN cannot be used", ours.error, cure)
    mapped = map(PurePosixPath, facts.mapped)
    folders = {str(path.parent) for path in mapped if path.name.startswith("libcudnn")}
    if len(folders) > 1:
        cure = "Keep one: remove the other's folder from LD_LIBRARY_PATH, or uninstall the other package."
        yield _error("Parts of several cuDNNs are in one process", "; ".join(sorted(folders)), cure)
    if torch is not None and torch.cudnn_error:
        cure = cure_of(torch.cudnn_error, "Remove the folder with the other cuDNN from LD_LIBRARY_PATH.")
        yield _error("PyTorch refuses its cuDNN", torch.cudnn_error, cure)
    elif torch and ours and torch.cudnn and ours.version and torch.cudnn != ours.version:
        found = f"PyTorch's is {version_string(torch.cudnn)}, this library's {version_string(ours.version)}"
        cure = "Remove the other one's folder from LD_LIBRARY_PATH, or install the cuDNN that PyTorch requires."
        yield _error("PyTorch and this library use two cuDNNs", found, cure)
    for folder, target in facts.overriding.items():
        if not folders or folders & {folder, target}:
            cure = "Remove it from LD_LIBRARY_PATH unless it is intended: it precedes the pip package."
            yield _warning("cuDNN comes from LD_LIBRARY_PATH", folder, cure)


def trial(facts: Facts) -> Iterator[Finding]:
    """A call works, and its result is correct."""
    trial = facts.trial
    if trial is None:
        return
    if trial.error and facts.cudnn is not None and not facts.cudnn.error:
        default = "Fix the problems above first; if there are none, report the output of `doctor --json`."
        cure = cure_of(trial.error, default)
        if trial.on == "GPU":
            yield _error("A call of sdpa fails on the GPU", trial.error, cure)
        else:
            yield _warning("No plan can be made for another machine", trial.error, cure)
    elif trial.difference is not None and not trial.difference < 1e-2:
        found = f"relative error {trial.difference:.1e}, {trial.engine}"
        cure = "Do not use this cuDNN on this GPU: install another version, and report the output of `doctor --json`."
        yield _error("sdpa gives wrong results on this GPU", found, cure)


def store(facts: Facts) -> Iterator[Finding]:
    """Plans are stored for later processes."""
    store = facts.store
    if store.problem and not store.is_readable:
        cure = "Set CUDNN_SDPA_PLAN_DIR to a folder that only you can write to, or to 'off' to store no plans."
        finding = _error if facts.environment.get("CUDNN_SDPA_PLAN_DIR") else _warning
        yield finding("Plans cannot be stored: every process builds its own", store.problem, cure)
    elif store.problem:
        cure = "Nothing, if this is intended, as in an image: every process builds the plans that are missing."
        yield _note("Plans are read, but new ones are not stored", store.problem, cure)
    elif store.folder is None:
        cure = "Unset CUDNN_SDPA_PLAN_DIR to store plans in your cache folder."
        yield _note("Plans are not stored: every process builds its own", "CUDNN_SDPA_PLAN_DIR='off'", cure)


def native(facts: Facts) -> Iterator[Finding]:
    """Calls on a GPU go through the native module, unless the user has switched it off."""
    if facts.torch and facts.torch.gpus and facts.native.startswith("Python") and not facts.native.endswith("=off"):
        cure = "Do what it says, then run `python -m cudnn_sdpa build-native`; without it only speed is lost."
        yield _note("Calls go through Python, not C++", facts.native.removeprefix("Python: "), cure)


#: Causes before their effects.
CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...]
CHECKS = platform, broken_off, torch, gpus, packages, cudnn, trial, store, native


def examine(facts: Facts) -> list[Finding]:
    """The findings of all checks, the most severe first."""
    findings = [replace(finding, check=check.__name__) for check in CHECKS for finding in check(facts)]
    return sorted(findings, key=lambda finding: list(Level).index(finding.level))


def is_well(findings: list[Finding]) -> bool:
    """Whether there are no errors; warnings and notes do not count."""
    return all(finding.level is not Level.ERROR for finding in findings)
