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

#: The oldest PyTorch that the library is tested with, and the oldest GPUs that cuDNN has these kernels for.
MIN_TORCH = (2, 9)
MIN_CAPABILITY = (8, 0)

_CUDNN = re.compile(r"nvidia-cudnn-cu(\d+)")


class Level(str, Enum):
    """How bad it is, the worst first: something fails, or may fail, or is good to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One thing that was found, and what to do about it."""

    level: Level
    title: str
    found: str
    cure: str
    check: str = ""


REINSTALL = "pip uninstall every nvidia-cudnn package and pip install the one that PyTorch asks for"
_MIXED = f"Two versions are mixed: take other CUDA folders off LD_LIBRARY_PATH, or {REINSTALL}."

#: Messages of libraries, and the cure of each. The first that fits is taken.
CURES = {
    r"nvidia-cudnn-frontend cannot be imported \(No module named": "Install it: pip install nvidia-cudnn-frontend.",
    r"nvidia-cudnn-frontend .* is too old": "pip install --upgrade nvidia-cudnn-frontend.",
    r"cuDNN .* is too old": "Take the folder of the old one off LD_LIBRARY_PATH, or upgrade the nvidia-cudnn package.",
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
    r"out of memory": "Another program holds the GPU's memory (nvidia-smi shows which): end it, or use another GPU.",
    r"C compiler": "Install a C compiler (on Debian: apt-get install gcc libc6-dev).",
    r"XDG_CACHE_HOME": "Set XDG_CACHE_HOME to a folder that only you can write to.",
}


def cure_of(message: str, otherwise: str) -> str:
    """The cure for what a library said."""
    return next((cure for pattern, cure in CURES.items() if re.search(pattern, message, re.IGNORECASE)), otherwise)


_error, _warning, _note = (partial(Finding, level) for level in Level)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def platform(facts: Facts) -> Iterator[Finding]:
    """Linux alone."""
    if facts.platform != "linux":
        yield _error("cuDNN's plans run on Linux only", facts.platform, "Use Linux, also in WSL.")


def broken_off(facts: Facts) -> Iterator[Finding]:
    """The examination got through."""
    if not facts.broken_off:
        return
    part, cure = "a call of sdpa was tried", "Report it with what `doctor --json` prints."
    if facts.driver is None:
        part = "NVIDIA's driver was asked for its GPUs"
        cure = "Reboot. nvidia-smi should hang or fail as well, and dmesg may say what happened to the driver or a GPU."
    elif facts.torch is None:
        part, cure = "PyTorch was asked for its versions and GPUs", "Reinstall PyTorch in a fresh environment."
    elif facts.cudnn is None:
        part, cure = "cuDNN was loaded", f"Take CUDA folders off LD_LIBRARY_PATH, or {REINSTALL}."
    yield _error(f"A process ended while {part}", facts.broken_off, cure_of(facts.broken_off, cure))


def torch(facts: Facts) -> Iterator[Finding]:
    """PyTorch is new enough, and its build fits the machine."""
    found = facts.torch
    version = found.version if found else facts.packages.get("torch", "")
    if version and _number(version) < MIN_TORCH:
        yield _error("PyTorch is too old", f"torch {version}; 2.9 or newer is needed", "pip install --upgrade torch.")
    if found is None or found.cuda is not None:
        return
    gpus = facts.driver.devices or facts.driver.nodes if facts.driver else 0
    if found.hip is not None:
        cure = "Use a machine with an NVIDIA GPU and PyTorch's CUDA build."
        yield _error("This PyTorch is for AMD's GPUs", f"torch {version}", cure)
    elif gpus:
        title = "This PyTorch has no CUDA, so that the GPU here is not used"
        cure = "Install PyTorch's CUDA build (pytorch.org/get-started names the command)."
        yield _error(title, f"torch {version}, {gpus} NVIDIA GPU(s)", cure)
    else:
        cure = "Nothing: CPU tensors run the reference, and plans can be compiled for other machines."
        yield _note("No GPU here, and PyTorch's CPU build", f"torch {version}", cure)


def driver(facts: Facts) -> Iterator[Finding]:
    """A CUDA build of PyTorch has a driver, a driver that is new enough, and a GPU."""
    torch, found = facts.torch, facts.driver
    if torch is None or torch.cuda is None or found is None:
        return
    if not found.loads:
        what = f"libcuda.so.1 cannot be loaded; kernel module {found.release or 'not loaded'}"
        cure = "Install NVIDIA's driver; in a container, start it with GPUs (docker run --gpus all)."
        yield _error("There is no NVIDIA driver", what, cure)
    elif found.cuda is not None and found.cuda // 1000 < int(torch.cuda.split(".")[0]):
        serves = f"{found.cuda // 1000}.{found.cuda % 1000 // 10}"
        what = f"driver {found.release or 'of unknown release'} serves CUDA {serves}, PyTorch has {torch.cuda}"
        cure = "Update the driver (525 for CUDA 12, 580 for CUDA 13), or install a PyTorch for an older CUDA."
        yield _error("The NVIDIA driver is too old for this PyTorch", what, cure)
    elif not torch.gpus:
        yield _unseen(facts)


#: Why `cuInit` fails, by its number, and what helps.
_INIT_ERRORS = {
    0: ("the driver starts", ""),
    100: ("it sees no GPU", "Unset CUDA_VISIBLE_DEVICES; in a container, start it with GPUs (docker run --gpus all)."),
    802: ("the GPUs are not ready", "Start NVIDIA's fabric manager (systemctl start nvidia-fabricmanager)."),
    803: ("libcuda and the kernel module differ", "Reboot, or reload the kernel module: the driver has been updated."),
    804: ("its compatibility package does not serve this GPU", "Take the cuda-compat folder off LD_LIBRARY_PATH."),
}


def _unseen(facts: Facts) -> Finding:
    """Why a good driver shows no GPU."""
    assert facts.torch is not None
    assert facts.driver is not None
    code, variable = facts.driver.error, "CUDA_VISIBLE_DEVICES"
    setting = f"{variable}={facts.environment[variable]!r}" if variable in facts.environment else ""
    reason, cure = _INIT_ERRORS.get(code, (f"cuInit returned {code}", ""))
    if setting and code in {0, 100}:
        cure = "Unset CUDA_VISIBLE_DEVICES, or name GPUs that are there (nvidia-smi -L lists them)."
    otherwise = "Look whether nvidia-smi lists a GPU, and unset CUDA_VISIBLE_DEVICES; after an update, reboot."
    found = "; ".join(filter(None, (reason, f"{facts.driver.nodes} in /dev", setting, facts.torch.cuda_error)))
    return _error("PyTorch sees no GPU", found, cure or cure_of(facts.torch.cuda_error, otherwise))


def gpus(facts: Facts) -> Iterator[Finding]:
    """The GPUs are of a generation that has kernels."""
    seen = facts.torch.gpus if facts.torch else ()
    old = [gpu for gpu in seen if gpu.capability < MIN_CAPABILITY]
    for gpu in dict.fromkeys(old):
        found = f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}; 8.0 or newer is needed"
        cure = "Use a GPU of the Ampere generation or newer, or fallback('torch')."
        finding = _error if len(old) == len(seen) else _warning
        yield finding("A GPU is too old for cuDNN's attention", found, cure)


def packages(facts: Facts) -> Iterator[Finding]:
    """The cuDNN packages are for one CUDA: PyTorch's."""
    installed = {match[1]: name for name in facts.packages if (match := _CUDNN.fullmatch(name))}
    wanted = facts.torch.cuda.split(".")[0] if facts.torch and facts.torch.cuda else None
    found = " and ".join(f"{name} {facts.packages[name]}" for name in sorted(installed.values()))
    if len(installed) > 1:
        keep = f"nvidia-cudnn-cu{wanted}" if wanted else "the one that you want"
        cure = f"pip uninstall {' '.join(sorted(installed.values()))}, then pip install {keep}."
        yield _error("cuDNN for CUDA 12 and for 13 are installed over each other", found, cure)
    elif facts.torch and installed and wanted and wanted not in installed:
        cure = f"pip uninstall {' '.join(installed.values())}, then pip install 'cudnn-sdpa[cu{wanted}]'."
        found += f", and PyTorch for CUDA {facts.torch.cuda}"
        yield _error("cuDNN is for another CUDA than PyTorch", found, cure)


def frontend(facts: Facts) -> Iterator[Finding]:
    """The frontend is there and new enough."""
    name = "nvidia-cudnn-frontend"
    version = (facts.cudnn.frontend if facts.cudnn else "") or facts.packages.get(name, "")
    if not version and (facts.cudnn is None or not facts.cudnn.error):  # what importing it raises is shown by `cudnn`
        yield _error(f"{name} is missing", "no such package", f"pip install {name}.")
    elif version and _number(version) < MIN_FRONTEND:
        found = f"{name} {version}; {'.'.join(map(str, MIN_FRONTEND))} or newer is needed"
        yield _error("cuDNN's frontend is too old", found, f"pip install --upgrade {name}.")


def cudnn(facts: Facts) -> Iterator[Finding]:
    """The frontend's cuDNN could be loaded, all of it from one place, and is PyTorch's."""
    torch, ours = facts.torch, facts.cudnn
    if ours is not None and ours.error and not any(frontend(facts)):
        cure = cure_of(ours.error, f"Take CUDA folders off LD_LIBRARY_PATH, or {REINSTALL}.")
        yield _error("cuDNN cannot be used", ours.error, cure)
    mapped = map(PurePosixPath, facts.mapped)
    folders = {str(path.parent) for path in mapped if path.name.startswith("libcudnn")}
    if len(folders) > 1:
        cure = "Keep one: take the other's folder off LD_LIBRARY_PATH, or uninstall the other package."
        yield _error("Parts of several cuDNNs are in one process", "; ".join(sorted(folders)), cure)
    if torch is not None and torch.cudnn_error:
        cure = cure_of(torch.cudnn_error, "Take the folder with the other cuDNN off LD_LIBRARY_PATH.")
        yield _error("PyTorch refuses its cuDNN", torch.cudnn_error, cure)
    elif torch and ours and torch.cudnn and ours.version and torch.cudnn != ours.version:
        found = f"PyTorch's is {version_string(torch.cudnn)}, this library's {version_string(ours.version)}"
        cure = "Take the other one's folder off LD_LIBRARY_PATH, or install the cuDNN that PyTorch's package asks for."
        yield _error("PyTorch and this library use two cuDNNs", found, cure)
    for library in facts.libraries:
        loaded = str(PurePosixPath(library.file or library.path).parent) in folders
        if library.origin == "LD_LIBRARY_PATH" and (loaded or not folders):
            cure = "Take it off LD_LIBRARY_PATH unless you mean it: it comes before the pip package."
            yield _warning("cuDNN comes from LD_LIBRARY_PATH", library.path, cure)


def trial(facts: Facts) -> Iterator[Finding]:
    """A call works, and gives the right numbers."""
    found = facts.trial
    if found is None:
        return
    if found.error and facts.cudnn is not None and not facts.cudnn.error:
        otherwise = "Mend what stands above first; if that is nothing, report what `doctor --json` prints."
        cure = cure_of(found.error, otherwise)
        if found.on == "GPU":
            yield _error("A call of sdpa fails on the GPU", found.error, cure)
        else:
            yield _warning("No plan can be made for another machine", found.error, cure)
    elif found.difference is not None and not found.difference < 1e-2:
        what = f"relative error {found.difference:.1e}, {found.engine}"
        cure = "Do not use this cuDNN on this GPU: install another version, and report what `doctor --json` prints."
        yield _error("sdpa computes something else on this GPU", what, cure)


def store(facts: Facts) -> Iterator[Finding]:
    """Plans are kept for later processes."""
    found = facts.store
    if found.problem:
        cure = "Set CUDNN_SDPA_PLAN_DIR to a folder that only you can write to, or to 'off' to keep no plans."
        finding = _error if found.named else _warning
        yield finding("Plans cannot be kept: every process builds its own", found.problem, cure)
    elif found.note:
        cure = "Nothing, if it is meant so, as in an image: what is missing is built by every process that needs it."
        yield _note("Plans are read, and new ones not kept", found.note, cure)
    elif found.folder is None:
        cure = "Unset CUDNN_SDPA_PLAN_DIR to keep plans in your cache folder."
        yield _note("Plans are not kept: every process builds its own", "CUDNN_SDPA_PLAN_DIR='off'", cure)


#: In the order in which one thing is the cause of another.
CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    *(platform, broken_off, torch, driver, gpus),
    *(packages, frontend, cudnn, trial, store),
)


def examine(facts: Facts) -> list[Finding]:
    """What every check finds, the worst first."""
    findings = [replace(finding, check=check.__name__) for check in CHECKS for finding in check(facts)]
    return sorted(findings, key=lambda finding: list(Level).index(finding.level))


def is_well(findings: list[Finding]) -> bool:
    """Whether nothing fails; warnings and notes do not count."""
    return all(finding.level is not Level.ERROR for finding in findings)
