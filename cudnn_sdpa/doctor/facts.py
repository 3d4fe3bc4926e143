"""The facts about a machine that the doctor's checks use."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import isfinite


@dataclass(frozen=True)
class Gpu:
    """A GPU that PyTorch sees."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class TorchFacts:
    """PyTorch's versions and GPUs, and the errors that queries raised."""

    version: str
    cuda: str | None = None  # version that it was built for
    hip: str | None = None
    cudnn: int | None = None
    cudnn_error: str = ""
    cuda_error: str = ""
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class CudnnFacts:
    """The frontend and the cuDNN that it has loaded, or the error."""

    frontend: str = ""  # empty if it cannot be imported
    version: int | None = None
    error: str = ""


@dataclass(frozen=True)
class TrialFacts:
    """One small call: with a GPU, run and compared with the reference; without one, planned by a helper process."""

    on: str  # "GPU" or "offline"
    engine: str = ""
    difference: float | None = None  # largest relative error
    error: str = ""


@dataclass(frozen=True)
class StoreFacts:
    """The plan store."""

    folder: str | None  # None if it is off, or the user has no cache folder
    problem: str = ""  # why plans cannot be saved
    is_readable: bool = False  # although they cannot be saved


@dataclass(frozen=True)
class Facts:
    """All facts; None for those that the probing process did not reach."""

    platform: str
    python: str
    packages: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    overriding: dict[str, str] = field(default_factory=dict)  # folders on LD_LIBRARY_PATH with a libcudnn: real paths
    driver: str = ""  # version of NVIDIA's kernel module
    gpu_nodes: int = 0  # GPUs of the machine or container, visible to PyTorch or not
    c_compiler: str | None = None
    native: str = "C++"  # whether calls go through the native module, and why not
    store: StoreFacts = StoreFacts(None)
    torch: TorchFacts | None = None
    cudnn: CudnnFacts | None = None
    trial: TrialFacts | None = None
    mapped: tuple[str, ...] = ()  # NVIDIA's libraries in the probing process
    broken_off: str = ""  # how the probing process ended, if it failed

    def to_dict(self) -> dict[str, object]:
        """The facts as plain values, JSON-ready."""
        values = asdict(self)
        if self.trial is not None and self.trial.difference is not None and not isfinite(self.trial.difference):
            values["trial"]["difference"] = str(self.trial.difference)  # JSON has no NaN
        return values
