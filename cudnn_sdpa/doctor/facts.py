"""What the doctor knows of a machine. Its checks are functions of this and of nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

Capability = tuple[int, int]

#: Parts of the examination that run in a process of their own, in this order: each may crash it.
PARTS = ("torch", "cudnn", "mapped", "trial", "mapped_after")


@dataclass(frozen=True)
class Gpu:
    """A GPU that PyTorch sees."""

    name: str
    capability: Capability


@dataclass(frozen=True)
class TorchFacts:
    """What PyTorch says of itself.

    Attributes:
        version: Its version.
        cuda: The CUDA version that it was built for; None for a build without CUDA.
        hip: The ROCm version that it was built for; None for any other build.
        cudnn: Version of its cuDNN as a number, 91900 for 9.19.0; None if it has none.
        cudnn_error: What it raised when it was asked for that.
        cuda_error: What it raised when CUDA was started.
        gpus: What it sees.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None
    cudnn: int | None = None
    cudnn_error: str = ""
    cuda_error: str = ""
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class CudnnFacts:
    """What cuDNN's frontend has loaded, or why it could not.

    Attributes:
        frontend: Version of the frontend; empty if it cannot be imported.
        version: Version of its cuDNN as a number; None if there is none.
        error: What was raised.
    """

    frontend: str = ""
    version: int | None = None
    error: str = ""


@dataclass(frozen=True)
class TrialFacts:
    """One small call: run and compared with the reference on a GPU, planned for another machine without one.

    Attributes:
        on: "GPU", or "offline" if it was only planned.
        engine: cuDNN's engine.
        difference: Largest relative error.
        error: What was raised.
    """

    on: str
    engine: str = ""
    difference: float | None = None
    error: str = ""


@dataclass(frozen=True)
class DriverFacts:
    """NVIDIA's driver.

    Attributes:
        loads: Whether libcuda.so.1 can be loaded.
        cuda: The newest CUDA version that it serves, as a number: 12040 for 12.4; None if it does not say.
        devices: GPUs that it has for this process.
        error: What `cuInit` returned, if not 0.
        release: Version of the kernel module; empty if none is loaded.
        nodes: GPUs that the machine or container has, hidden or not, as the kernel counts them.
        broken_off: How the process ended that asked it, if it gave no answer.
    """

    loads: bool = False
    cuda: int | None = None
    devices: int = 0
    error: int = 0
    release: str = ""
    nodes: int = 0
    broken_off: str = ""


@dataclass(frozen=True)
class StoreFacts:
    """The plan store.

    Attributes:
        folder: Where it is, or would be made; None if it is switched off or there is no place for it.
        named: Whether the environment names it.
        problem: Why it cannot be used.
        free: Free bytes of its disk; None if not known.
        note: What is to be known of it, if it can be used.
    """

    folder: str | None
    named: bool = False
    problem: str = ""
    free: int | None = None
    note: str = ""


@dataclass(frozen=True)
class FoundLibrary:
    """A libcudnn on this machine, loaded or not.

    Attributes:
        path: Where it was found.
        origin: What it belongs to.
        file: Where that leads through symbolic links, as the lists of loaded files have it.
    """

    path: str
    origin: str
    file: str = ""


@dataclass(frozen=True)
class Facts:
    """All of it.

    Attributes:
        platform: `sys.platform`.
        python: Python's version.
        packages: Installed packages that matter, with their versions.
        shared_files: Pairs of packages that installed the same library file, and one such file.
        environment: Environment variables that matter, as they are set.
        libraries: Every libcudnn that was found.
        driver: NVIDIA's driver.
        c_compiler: A C compiler; None if there is none.
        cxx_compiler: A C++ compiler.
        store: The plan store.
        torch: None if the process ended before it could say.
        cudnn: The same.
        trial: The same.
        mapped: Files of NVIDIA's libraries in that process, which has PyTorch and cuDNN.
        broken_off: How the examining process ended, if it did not get through.
    """

    platform: str
    python: str
    packages: dict[str, str] = field(default_factory=dict)
    shared_files: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    libraries: tuple[FoundLibrary, ...] = ()
    driver: DriverFacts = DriverFacts()
    c_compiler: str | None = None
    cxx_compiler: str | None = None
    store: StoreFacts = StoreFacts(None)
    torch: TorchFacts | None = None
    cudnn: CudnnFacts | None = None
    trial: TrialFacts | None = None
    mapped: tuple[str, ...] = ()
    broken_off: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        values = asdict(self)
        if self.trial is not None and self.trial.difference is not None and not isfinite(self.trial.difference):
            values["trial"]["difference"] = str(self.trial.difference)  # JSON has no NaN
        return values
