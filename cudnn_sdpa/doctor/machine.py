"""Checks of the driver, the GPUs, the compilers and the plan store."""

from __future__ import annotations

from collections.abc import Iterator

from cudnn_sdpa.doctor.facts import Capability, Facts
from cudnn_sdpa.doctor.findings import Finding, Level, cure_of

#: The oldest GPUs for which cuDNN has these kernels: Ampere.
MIN_CAPABILITY: Capability = (8, 0)

#: A store this short of room loses plans as fast as it gets them.
_LITTLE_ROOM = 100 << 20

#: The first driver release of each CUDA version.
_DRIVER_OF = {12: "525", 13: "580"}

#: Why `cuInit` fails, by its number, and what helps.
_INIT_ERRORS = {
    100: ("it sees no GPU", "Unset CUDA_VISIBLE_DEVICES; in a container, start it with GPUs (docker run --gpus all)."),
    802: ("the GPUs are not ready", "Start NVIDIA's fabric manager (systemctl start nvidia-fabricmanager)."),
    803: ("libcuda and the kernel module differ", "Reboot, or reload the kernel module: the driver has been updated."),
    804: ("its compatibility package does not serve this GPU", "Take the cuda-compat folder off LD_LIBRARY_PATH."),
    999: ("of no reason that it names", "Reboot; dmesg may say what happened to the GPU or the driver."),
}


def platform(facts: Facts) -> Iterator[Finding]:
    """Linux alone."""
    if facts.platform != "linux":
        cure = "Use Linux, also in WSL."
        yield Finding(Level.ERROR, "platform", "cuDNN's plans run on Linux only", facts.platform, cure)


def build(facts: Facts) -> Iterator[Finding]:
    """PyTorch's build fits the machine."""
    torch = facts.torch
    if torch is None or torch.cuda is not None:
        return
    if torch.hip is not None:
        cure = "Use a machine with an NVIDIA GPU and PyTorch's CUDA build."
        yield Finding(Level.ERROR, "build", "This PyTorch is for AMD's GPUs", f"torch {torch.version}", cure)
    elif facts.driver.devices or facts.driver.nodes:
        found = f"torch {torch.version}, {facts.driver.devices or facts.driver.nodes} NVIDIA GPU(s)"
        cure = "Install PyTorch's CUDA build (pytorch.org/get-started names the command)."
        yield Finding(Level.ERROR, "build", "This PyTorch has no CUDA, so that the GPU here is not used", found, cure)
    else:
        cure = "Nothing: CPU tensors run the reference, and plans can be compiled for other machines."
        yield Finding(Level.NOTE, "build", "No GPU here, and PyTorch's CPU build", f"torch {torch.version}", cure)


def driver(facts: Facts) -> Iterator[Finding]:
    """A CUDA build of PyTorch has a driver, a driver that is new enough, and a GPU."""
    torch, found = facts.torch, facts.driver
    if found.broken_off:
        cure = "Reboot. nvidia-smi should hang or fail as well, and dmesg may say what happened to the driver or a GPU."
        yield Finding(Level.ERROR, "driver", "NVIDIA's driver does not answer", found.broken_off, cure)
    if torch is None or torch.cuda is None:
        return
    wanted = int(torch.cuda.split(".")[0])
    if not found.loads:
        cure = "Install NVIDIA's driver; in a container, start it with GPUs (docker run --gpus all)."
        what = f"libcuda.so.1 cannot be loaded; kernel module {found.release or 'not loaded'}"
        yield Finding(Level.ERROR, "driver", "There is no NVIDIA driver", what, cure)
    elif found.cuda is not None and found.cuda // 1000 < wanted:
        what = (
            f"driver {found.release or 'of unknown release'} serves CUDA {_cuda(found.cuda)}, PyTorch has {torch.cuda}"
        )
        newest = _DRIVER_OF.get(wanted)
        cure = f"Update the driver{f' to {newest} or newer' if newest else ''}, or install a PyTorch for an older CUDA."
        yield Finding(Level.ERROR, "driver", "The NVIDIA driver is too old for this PyTorch", what, cure)
    elif not torch.gpus:
        yield _unseen(facts)


def _unseen(facts: Facts) -> Finding:
    """Why a good driver shows no GPU."""
    assert facts.torch is not None
    hidden = {name: facts.environment.get(name) for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")}
    setting = ", ".join(f"{name}={value!r}" for name, value in hidden.items() if value is not None)
    code = facts.driver.error
    reason, cure = _INIT_ERRORS.get(code, ("", "")) if code else ("", "")
    if not reason:
        reason = f"cuInit returned {code}" if code else "the driver starts"
        cure = cure_of(facts.torch.cuda_error, "Look whether nvidia-smi lists a GPU, and unset CUDA_VISIBLE_DEVICES.")
    if hidden["CUDA_VISIBLE_DEVICES"] is not None and code in {0, 100}:
        cure = "Unset CUDA_VISIBLE_DEVICES, or name GPUs that are there (nvidia-smi -L lists them)."
    found = "; ".join(filter(None, (reason, f"{facts.driver.nodes} in /dev", setting, facts.torch.cuda_error)))
    return Finding(Level.ERROR, "driver", "PyTorch sees no GPU", found, cure)


def _cuda(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def gpus(facts: Facts) -> Iterator[Finding]:
    """The GPUs are of a generation that has kernels."""
    seen = facts.torch.gpus if facts.torch else ()
    old = [gpu for gpu in seen if gpu.capability < MIN_CAPABILITY]
    for gpu in dict.fromkeys(old):
        found = f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}; 8.0 or newer is needed"
        level = Level.ERROR if len(old) == len(seen) else Level.WARNING
        cure = "Use a GPU of the Ampere generation or newer, or fallback('torch')."
        yield Finding(level, "gpus", "A GPU is too old for cuDNN's attention", found, cure)


def compilers(facts: Facts) -> Iterator[Finding]:
    """There is a C compiler where something needs it."""
    has_cuda = facts.torch is not None and facts.torch.cuda is not None
    debian = "on Debian: apt-get install"
    if facts.c_compiler is None and not facts.driver.loads:
        found = "none of $CC, cc, gcc and clang; without a driver, a stand-in for it has to be compiled"
        cure = f"Install one ({debian} gcc libc6-dev)."
        yield Finding(Level.WARNING, "compilers", "No plans can be made here: no C compiler", found, cure)
    elif facts.c_compiler is None and has_cuda:
        cure = f"Install one ({debian} gcc libc6-dev) if you use torch.compile."
        found = "none of $CC, cc, gcc and clang"
        yield Finding(Level.WARNING, "compilers", "torch.compile needs a C compiler for Triton", found, cure)
    if facts.cxx_compiler is None:
        cure = f"Install one ({debian} g++) if you compile models for the CPU or with AOTInductor."
        found = "none of $CXX, c++, g++ and clang++"
        yield Finding(Level.NOTE, "compilers", "torch.compile on the CPU needs a C++ compiler", found, cure)


def store(facts: Facts) -> Iterator[Finding]:
    """Plans are kept for later processes."""
    found = facts.store
    if found.problem:
        level = Level.ERROR if found.named else Level.WARNING
        cure = "Set CUDNN_SDPA_PLAN_DIR to a folder that only you can write to, or to 'off' to keep no plans."
        yield Finding(level, "store", "Plans cannot be kept: every process builds its own", found.problem, cure)
    elif found.note:
        cure = "Nothing, if it is meant so, as in an image: what is missing is built by every process that needs it."
        yield Finding(Level.NOTE, "store", "Plans are read, and new ones not kept", found.note, cure)
    elif found.folder is None:
        cure = "Unset CUDNN_SDPA_PLAN_DIR to keep plans in your cache folder."
        title = "Plans are not kept: every process builds its own"
        yield Finding(Level.NOTE, "store", title, "CUDNN_SDPA_PLAN_DIR='off'", cure)
    elif found.free is not None and found.free < _LITTLE_ROOM:
        what = f"{found.free >> 20} MB are free for {found.folder}"
        cure = "Free some of the disk, or set CUDNN_SDPA_PLAN_DIR to a folder on another one."
        yield Finding(Level.WARNING, "store", "The disk of the plan store is full", what, cure)
