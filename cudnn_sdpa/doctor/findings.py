"""What a check finds, and the cures for what libraries say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum

from cudnn_sdpa.doctor.facts import Facts


class Level(str, Enum):
    """How bad it is, the worst first: something fails, or may fail, or is good to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        level: How bad it is.
        check: Which check found it.
        title: What it is.
        found: Versions, files and messages behind it.
        cure: What to do, in a sentence.
    """

    level: Level
    check: str
    title: str
    found: str
    cure: str

    def to_dict(self) -> dict[str, str]:
        """As plain values, ready for JSON."""
        return {**asdict(self), "level": self.level.value}


Check = Callable[[Facts], Iterator[Finding]]

REINSTALL = (
    "pip install --force-reinstall the cuDNN package that PyTorch asks for, nvidia-cudnn-cu12 or nvidia-cudnn-cu13"
)

#: Messages of libraries, and the cure of each. The first that fits is taken.
_CURES = (
    (
        r"nvidia-cudnn-frontend cannot be imported \(No module named",
        "Install it: pip install nvidia-cudnn-frontend.",
    ),
    (r"nvidia-cudnn-frontend .* is too old", "pip install --upgrade nvidia-cudnn-frontend."),
    (
        r"cuDNN .* is too old",
        "Take the folder of the old one off LD_LIBRARY_PATH, or upgrade the nvidia-cudnn package.",
    ),
    (
        r"undefined symbol|version `\w+.* not found",
        "Two versions are mixed: take other CUDA folders off LD_LIBRARY_PATH, or " + REINSTALL + ".",
    ),
    (
        r"SUBLIBRARY_(VERSION_MISMATCH|LOADING_FAILED)",
        "Parts of two cuDNN versions are mixed: take other folders off LD_LIBRARY_PATH, or " + REINSTALL + ".",
    ),
    (r"Found \d+ libcudnn", "Two cuDNN packages lie in one folder: uninstall both, then " + REINSTALL + "."),
    (
        r"libnvrtc|NVRTC",
        "Install NVRTC for PyTorch's CUDA: pip install nvidia-cuda-nvrtc-cu12 (CUDA 12) or nvidia-cuda-nvrtc (13).",
    ),
    (
        r"libcublas",
        "Install cuBLAS for PyTorch's CUDA: pip install nvidia-cublas-cu12 (CUDA 12) or nvidia-cublas (13).",
    ),
    (
        r"libcudnn\S* (cannot|could not) be loaded|libcudnn\S*: cannot open|Unable to (dynamically )?load libcudnn",
        "Install cuDNN for PyTorch's CUDA: pip install 'cudnn-sdpa[cu12]' or 'cudnn-sdpa[cu13]'.",
    ),
    (r"static TLS block", "Import torch before other libraries, or start Python with LD_PRELOAD set to that library."),
    (r"file too short|invalid ELF header", "The file is damaged: " + REINSTALL + "."),
    (
        r"cuDNN version incompatibility",
        "Take the folder with the other cuDNN off LD_LIBRARY_PATH, so that PyTorch loads its own.",
    ),
    (
        r"driver on your system is too old|driver version is insufficient",
        "Update NVIDIA's driver, or install a PyTorch for an older CUDA.",
    ),
    (r"no NVIDIA driver", "Install NVIDIA's driver; in a container, start it with GPUs (docker run --gpus all)."),
    (r"no kernel image", "Install a PyTorch that was built for this GPU."),
    (r"out of memory", "Another program holds the GPU's memory (nvidia-smi shows which): end it, or use another GPU."),
    (r"C compiler", "Install a C compiler (on Debian: apt-get install gcc libc6-dev)."),
    (r"XDG_CACHE_HOME", "Set XDG_CACHE_HOME to a folder that only you can write to."),
)


def cure_of(message: str, otherwise: str) -> str:
    """The cure for what a library said."""
    return next((cure for pattern, cure in _CURES if re.search(pattern, message, re.IGNORECASE)), otherwise)
