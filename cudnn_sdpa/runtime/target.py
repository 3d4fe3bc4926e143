"""The GPU that a plan is for: one that is here, or one described by a device-properties file."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.runtime import backend

#: The properties that decide what cuDNN plans and compiles. Not among them: the PCI id, the clocks, the driver and
#: the name, so that sibling GPUs share plans.
PLANNING_PROPERTIES = (
    "deviceVer",
    "multiProcessorCount",
    "warpSize",
    "maxSharedMemoryPerBlock",
    "maxSharedMemoryPerBlockOptin",
    "reservedSharedMemoryPerBlock",
    "oversizedSharedMemoryPerBlock",
    "regsPerBlock",
    "maxRegistersPerSM",
    "maxCtasPerSM",
    "maxThreadsPerBlock",
    "maxThreadsPerSM",
    "maxBlockSize",
    "maxGridSize",
    "supportCoopLaunch",
    "l2CacheSize",
)

#: Device files that come with the package: name, and the first cuDNN version that reads that file's keys.
_BUNDLED = {"h200": ((92800, "h200-cudnn-9.28.json"), (0, "h200-cudnn-9.19.json"))}


@dataclass(frozen=True, slots=True)
class Target:
    """What a plan's key says of the GPU and of the libraries that plan for it.

    Attributes:
        properties: The planning properties, as sorted (name, value) pairs.
        cudnn: cuDNN's version, as `cudnnGetVersion` gives it (9.19.0 is 91900).
        frontend: Version of nvidia-cudnn-frontend.
        name: Marketing name of the GPU; for people, no part of equality.
    """

    properties: tuple[tuple[str, Any], ...]
    cudnn: int
    frontend: str
    name: str = ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Target):
            return NotImplemented
        return self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[Any, ...]:
        return self.properties, self.cudnn, self.frontend

    @property
    def sm(self) -> int:
        """Compute capability as one number: 90 for 9.0."""
        return int(dict(self.properties)["deviceVer"]) // 10

    @classmethod
    def from_properties(cls, properties: Mapping[str, Any]) -> Target:
        """The target that cuDNN's device-properties JSON describes."""
        chosen = sorted((name, _frozen(properties[name])) for name in PLANNING_PROPERTIES if name in properties)
        name = str(properties.get("deviceName", "unnamed GPU"))
        return cls(tuple(chosen), backend.cudnn_version(), backend.frontend_version(), name)

    def __str__(self) -> str:
        return f"{self.name} (SM {self.sm}, {dict(self.properties)['multiProcessorCount']} multiprocessors)"


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@functools.cache
def live_properties(device: int) -> dict[str, Any]:
    """cuDNN's own description of the GPU with index `device` in this process."""
    return backend.device_properties(device)


@functools.cache
def live_target(device: int) -> Target:
    """The target for the GPU with index `device` in this process."""
    return Target.from_properties(live_properties(device))


@functools.cache
def load_properties(name_or_path: str) -> dict[str, Any]:
    """Properties of a GPU by the name of a file in the package (`"h200"`) or by the path of a JSON file."""
    if name_or_path in _BUNDLED:
        version = backend.cudnn_version()
        file = next(file for first, file in _BUNDLED[name_or_path] if version >= first)
        path = Path(__file__).parent.parent / "offline" / "devices" / file
    else:
        path = Path(name_or_path)
    try:
        properties: dict[str, Any] = json.loads(path.read_text())
        for name in ("deviceVer", "multiProcessorCount"):
            if not isinstance(properties, dict) or type(properties.get(name)) is not int:
                raise ValueError(f"no number {name!r} in it")
    except (OSError, ValueError) as error:
        known = ", ".join(repr(name) for name in sorted(_BUNDLED))
        raise OptionError(
            "CUDNN_SDPA_TARGET",
            f"{name_or_path!r} ({error})",
            f"{known}, or the path of a cuDNN device-properties JSON file",
        ) from error
    return properties
