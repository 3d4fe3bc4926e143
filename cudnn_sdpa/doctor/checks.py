"""Checks of PyTorch, cuDNN, the driver, the GPUs, the compilers and the plan store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import PurePosixPath

from cudnn_sdpa.doctor.facts import Facts
from cudnn_sdpa.graph.backend import MIN_FRONTEND, version_string

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
        "Update NVIDIA's driver, or install a PyTorch for an older CUDA."
    ),
    r"no NVIDIA driver": "Install NVIDIA's driver; in a container, start it with GPUs (docker run --gpus all).",
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


def broken_off(facts: Facts) -> Iterator[Finding]:
    """The probing process ran to its end."""
    if not facts.broken_off:
        return
    part, cure = "a call of sdpa was tested", "Report it with the output of `doctor --json`."
    if facts.driver is None:
        part = "NVIDIA's driver was queried for its GPUs"
        cure = "Reboot. nvidia-smi should hang or fail as well, and dmesg may show what happened to the driver."
    elif facts.torch is None:
        part, cure = "PyTorch was queried for its versions and GPUs", "Reinstall PyTorch in a fresh environment."
    elif facts.cudnn is None:
        part, cure = "cuDNN was loaded", f"Remove CUDA folders from LD_LIBRARY_PATH, or {REINSTALL}."
    yield _error(f"A process ended while {part}", facts.broken_off, cure_of(facts.broken_off, cure))


def torch(facts: Facts) -> Iterator[Finding]:
    """PyTorch is new enough, and its build matches the machine."""
    torch = facts.torch
    version = torch.version if torch else facts.packages.get("torch", "")
    if version and _major_minor(version) < MIN_TORCH:
        yield _error("PyTorch is too old", f"torch {version}; 2.9 or newer is needed", "pip install --upgrade torch.")
    if torch is None or torch.cuda is not None:
        return
    gpus = facts.driver.devices or facts.driver.nodes if facts.driver else 0
    if torch.hip is not None:
        cure = "Use a machine with an NVIDIA GPU and PyTorch's CUDA build."
        yield _error("This PyTorch is for AMD GPUs", f"torch {version}", cure)
    elif gpus:
        title = "This PyTorch has no CUDA, so the GPU is not used"
        cure = "Install PyTorch's CUDA build (pytorch.org/get-started shows the command)."
        yield _error(title, f"torch {version}, {gpus} NVIDIA GPU(s)", cure)
    else:
        cure = "Nothing: CPU tensors run the reference, and plans can be compiled for other machines."
        yield _note("No GPU here, and PyTorch's CPU build", f"torch {version}", cure)


def driver(facts: Facts) -> Iterator[Finding]:
    """A CUDA build of PyTorch has a driver that is new enough, and a GPU."""
    torch, driver = facts.torch, facts.driver
    if torch is None or torch.cuda is None or driver is None:
        return
    if not driver.loads:
        found = f"libcuda.so.1 cannot be loaded; kernel module {driver.release or 'not loaded'}"
        cure = "Install NVIDIA's driver; in a container, start it with GPUs (docker run --gpus all)."
        yield _error("There is no NVIDIA driver", found, cure)
    elif driver.cuda is not None and driver.cuda // 1000 < int(torch.cuda.split(".")[0]):
        newest = f"{driver.cuda // 1000}.{driver.cuda % 1000 // 10}"
        found = f"driver {driver.release or 'of unknown release'} supports CUDA {newest}, PyTorch has {torch.cuda}"
        cure = "Update the driver (525 for CUDA 12, 580 for CUDA 13), or install a PyTorch for an older CUDA."
        yield _error("The NVIDIA driver is too old for this PyTorch", found, cure)
    elif not torch.gpus:
        yield _no_gpu(facts)


#: Error codes of `cuInit`, each with its reason and the cure.
_INIT_ERRORS = {
    0: ("the driver starts", ""),
    100: ("it sees no GPU", "Unset CUDA_VISIBLE_DEVICES; in a container, start it with GPUs (docker run --gpus all)."),
    802: ("the GPUs are not ready", "Start NVIDIA's fabric manager (systemctl start nvidia-fabricmanager)."),
    803: ("libcuda and the kernel module differ", "Reboot, or reload the kernel module: the driver has been updated."),
    804: (
        "its compatibility package does not support this GPU",
        "Remove the cuda-compat folder from LD_LIBRARY_PATH.",
    ),
}


def _no_gpu(facts: Facts) -> Finding:
    """Why PyTorch sees no GPU although the driver loads."""
    assert facts.torch is not None
    assert facts.driver is not None
    code, variable = facts.driver.error, "CUDA_VISIBLE_DEVICES"
    setting = f"{variable}={facts.environment[variable]!r}" if variable in facts.environment else ""
    reason, cure = _INIT_ERRORS.get(code, (f"cuInit returned {code}", ""))
    if setting and code in {0, 100}:
        cure = "Unset CUDA_VISIBLE_DEVICES, or set it to GPUs of this machine (nvidia-smi -L lists them)."
    default = "Check whether nvidia-smi lists a GPU, and unset CUDA_VISIBLE_DEVICES; after an update, reboot."
    found = "; ".join(filter(None, (reason, f"{facts.driver.nodes} in /dev", setting, facts.torch.cuda_error)))
    return _error("PyTorch sees no GPU", found, cure or cure_of(facts.torch.cuda_error, default))


def gpus(facts: Facts) -> Iterator[Finding]:
    """The GPUs are of a generation that has kernels."""
    all_gpus = facts.torch.gpus if facts.torch else ()
    old = [gpu for gpu in all_gpus if gpu.capability < MIN_CAPABILITY]
    for gpu in dict.fromkeys(old):
        found = f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}; 8.0 or newer is needed"
        cure = "Use a GPU of the Ampere generation or newer, or fallback('torch')."
        finding = _error if len(old) == len(all_gpus) else _warning
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


def frontend(facts: Facts) -> Iterator[Finding]:
    """The frontend is installed and new enough."""
    name = "nvidia-cudnn-frontend"
    version = (facts.cudnn.frontend if facts.cudnn else "") or facts.packages.get(name, "")
    if not version and (facts.cudnn is None or not facts.cudnn.error):  # `cudnn` shows errors of its import
        yield _error(f"{name} is missing", "no such package", f"pip install {name}.")
    elif version and _major_minor(version) < MIN_FRONTEND:
        found = f"{name} {version}; {'.'.join(map(str, MIN_FRONTEND))} or newer is needed"
        yield _error("cuDNN's frontend is too old", found, f"pip install --upgrade {name}.")


def cudnn(facts: Facts) -> Iterator[Finding]:
    """The frontend's cuDNN can be loaded, all of it from one folder, and is PyTorch's."""
    torch, ours = facts.torch, facts.cudnn
    if ours is not None and ours.error and not any(frontend(facts)):
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
    for library in facts.libraries:
        loaded = str(PurePosixPath(library.file or library.path).parent) in folders
        if library.origin == "LD_LIBRARY_PATH" and (loaded or not folders):
            cure = "Remove it from LD_LIBRARY_PATH unless it is intended: it precedes the pip package."
            yield _warning("cuDNN comes from LD_LIBRARY_PATH", library.path, cure)


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
    if store.problem:
        cure = "Set CUDNN_SDPA_PLAN_DIR to a folder that only you can write to, or to 'off' to store no plans."
        finding = _error if store.named else _warning
        yield finding("Plans cannot be stored: every process builds its own", store.problem, cure)
    elif store.note:
        cure = "Nothing, if this is intended, as in an image: every process builds the plans that are missing."
        yield _note("Plans are read, but new ones are not stored", store.note, cure)
    elif store.folder is None:
        cure = "Unset CUDNN_SDPA_PLAN_DIR to store plans in your cache folder."
        yield _note("Plans are not stored: every process builds its own", "CUDNN_SDPA_PLAN_DIR='off'", cure)


#: Causes before their effects.
CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    platform,
    broken_off,
    torch,
    driver,
    gpus,
    packages,
    frontend,
    cudnn,
    trial,
    store,
)


def examine(facts: Facts) -> list[Finding]:
    """The findings of all checks, the most severe first."""
    findings = [replace(finding, check=check.__name__) for check in CHECKS for finding in check(facts)]
    return sorted(findings, key=lambda finding: list(Level).index(finding.level))


def is_well(findings: list[Finding]) -> bool:
    """Whether there are no errors; warnings and notes do not count."""
    return all(finding.level is not Level.ERROR for finding in findings)
