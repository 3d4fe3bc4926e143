"""The facts about a machine that the doctor's checks use."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """A GPU that PyTorch sees."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class TorchFacts:
    """What PyTorch says of itself, and what it raised when it was asked."""

    version: str
    cuda: str | None = None  # that it was built for
    hip: str | None = None
    cudnn: int | None = None
    cudnn_error: str = ""
    cuda_error: str = ""
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class CudnnFacts:
    """What cuDNN's frontend has loaded, or why it could not."""

    frontend: str = ""  # empty if it cannot be imported
    version: int | None = None
    error: str = ""


@dataclass(frozen=True)
class TrialFacts:
    """One small call: run and compared with the reference on a GPU, planned by a helper process without one."""

    on: str  # "GPU" or "offline"
    engine: str = ""
    difference: float | None = None  # largest relative error
    error: str = ""


@dataclass(frozen=True)
class DriverFacts:
    """NVIDIA's driver."""

    loads: bool = False  # libcuda.so.1
    cuda: int | None = None  # the newest that it serves, 12040 for 12.4
    devices: int = 0  # for this process
    error: int = 0  # of cuInit
    release: str = ""  # of the kernel module
    nodes: int = 0  # GPUs that the machine or container has, hidden or not


@dataclass(frozen=True)
class StoreFacts:
    """The plan store."""

    folder: str | None  # None if it is switched off or there is no place for it
    named: bool = False  # by the environment
    problem: str = ""  # why it cannot be used
    note: str = ""  # if it can be read and not written to


@dataclass(frozen=True)
class FoundLibrary:
    """A libcudnn on this machine, loaded or not."""

    path: str
    origin: str
    file: str = ""  # where links lead to, as lists of loaded files have it


@dataclass(frozen=True)
class Facts:
    """All of it; None for what the examining process did not get to."""

    platform: str
    python: str
    packages: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    libraries: tuple[FoundLibrary, ...] = ()
    c_compiler: str | None = None
    store: StoreFacts = StoreFacts(None)
    driver: DriverFacts | None = None
    torch: TorchFacts | None = None
    cudnn: CudnnFacts | None = None
    trial: TrialFacts | None = None
    mapped: tuple[str, ...] = ()  # NVIDIA's libraries in that process
    broken_off: str = ""  # how it ended, if it did not get through

    def to_dict(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        values = asdict(self)
        if self.trial is not None and self.trial.difference is not None and not isfinite(self.trial.difference):
            values["trial"]["difference"] = str(self.trial.difference)  # JSON has no NaN
        return values
