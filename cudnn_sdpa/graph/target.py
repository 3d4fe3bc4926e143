"""The GPU that a plan is for: one in this machine, or one described by a device-properties file."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.graph import backend
from cudnn_sdpa.graph.backend import DeviceProperties
from cudnn_sdpa.graph.diagnostics import printable, shortened
from cudnn_sdpa.graph.layouts import JsonObject

#: The properties that determine what cuDNN plans and compiles. PCI id, clocks, driver and name are left out, so that
#: GPUs of one model share plans.
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

#: Sources of GPU properties, as `bundled_targets` reports them.
MEASURED = "measured"
SPECIFIED = "from public specifications"

#: An extra key in properties, which cuDNN ignores: their source, if they were not read from such a GPU.
SOURCE = "source"

_FOLDER = Path(__file__).parent.parent / "offline" / "devices"
#: Device properties that cuDNN reported on GPUs: file name, and the first cuDNN version that reads its keys.
_MEASURED = {"h200": ((92700, "h200-cudnn-9.28.json"), (0, "h200-cudnn-9.19.json"))}


@dataclass(frozen=True, slots=True)
class Target:
    """The GPU and the library versions in a plan's key.

    `properties` are the planning properties as sorted pairs; `cudnn` is as `cudnnGetVersion` gives it (9.19.0 is
    91900), and `sm` the compute capability as one number (90 for 9.0). Name and source are for people, not compared.
    """

    properties: tuple[tuple[str, Any], ...]  # values of cuDNN's JSON
    cudnn: int
    frontend: str
    name: str = field(default="", compare=False)
    source: str = field(default="", compare=False)
    sm: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sm", int(dict(self.properties)["deviceVer"]) // 10)

    @classmethod
    def from_properties(cls, properties: Mapping[str, object]) -> Target:
        chosen = sorted((name, _frozen(properties[name])) for name in PLANNING_PROPERTIES if name in properties)
        name = printable(shortened(str(properties.get("deviceName", "unnamed GPU"))))
        source = printable(shortened(str(properties.get(SOURCE, ""))))
        return cls(
            properties=tuple(chosen),
            cudnn=backend.cudnn_version(),
            frontend=backend.frontend_version(),
            name=name,
            source=source,
        )

    def __str__(self) -> str:
        count = dict(self.properties)["multiProcessorCount"]
        if not count:  # a GPU architecture rather than a specific GPU
            return self.name
        source = f"; {self.source}" if self.source else ""
        return f"{self.name} (SM {self.sm}, {count} multiprocessors{source})"


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


@functools.cache
def live_properties(device: int) -> DeviceProperties:
    return backend.device_properties(device)


@functools.cache
def live_target(device: int) -> Target:
    return Target.from_properties(live_properties(device))


@functools.cache
def serial_of(device: int) -> str:
    try:
        return str(torch.cuda.get_device_properties(device).uuid)
    except (AssertionError, RuntimeError):
        return ""


def bundled_targets() -> dict[str, str]:
    """Names of the GPUs of `load_properties`, each with the source of its properties, `MEASURED` or `SPECIFIED`."""
    specified = dict.fromkeys(_specifications()["gpus"], SPECIFIED)
    return dict(sorted({**dict.fromkeys(_MEASURED, MEASURED), **specified}.items()))


@functools.cache
def bundled_capabilities() -> dict[str, int]:
    """Compute capabilities of the GPUs of `load_properties`, by name; unlike that, does not load cuDNN."""
    capabilities = {name: _read(_FOLDER / files[-1][1])["deviceVer"] // 10 for name, files in _MEASURED.items()}
    for name, gpu in _specifications()["gpus"].items():
        major, minor = gpu["compute_capability"].split(".")
        capabilities.setdefault(name, 10 * int(major) + int(minor))
    return dict(sorted(capabilities.items()))


def load_properties(name_or_path: str | Path, argument: str = "target") -> DeviceProperties:
    """Properties of a GPU, in the format of the installed cuDNN, with `SOURCE` if from public specifications.

    `name_or_path` is a name of `bundled_targets`, or the path of a JSON file; errors call it `argument`.
    """
    try:
        return _loaded(name_or_path)
    except (OSError, ValueError, RecursionError, TypeError) as error:
        known = ", ".join(map(repr, bundled_targets()))
        why = getattr(error, "strerror", None) or error
        raise OptionError(
            argument,
            f"{shortened(repr(name_or_path))} ({shortened(str(why))})",
            f"one of {known}, or the path of a cuDNN device-properties JSON file",
        ) from error


@functools.cache
def _loaded(name_or_path: str | Path) -> DeviceProperties:
    name = name_or_path.lower() if isinstance(name_or_path, str) else ""
    if name in _MEASURED:
        return _measured(name)
    if name in _specifications()["gpus"]:
        return _specified(name)
    return _read(Path(name_or_path))


def check_name(name_or_path: str, argument: str) -> None:
    """Checks an argument of `load_properties`, without cuDNN."""
    if name_or_path.lower() not in bundled_targets():
        load_properties(name_or_path, argument)


@functools.cache
def _specifications() -> JsonObject:
    specifications: JsonObject = json.loads((_FOLDER / "specifications.json").read_text())
    return specifications


def _measured(name: str) -> DeviceProperties:
    version = backend.cudnn_version()
    return _read(_FOLDER / next(file for first, file in _MEASURED[name] if version >= first))


def _specified(name: str) -> DeviceProperties:
    gpu = _specifications()["gpus"][name]
    capability = _specifications()["compute_capabilities"][gpu["compute_capability"]]
    known = {**capability, **gpu["properties"]}
    properties = {key: known[key][0] if key in known else value for key, value in _measured("h200").items()}
    return {**properties, SOURCE: f"{SPECIFIED}, not measured"}


def _read(path: Path) -> DeviceProperties:
    properties: DeviceProperties = json.loads(read_text(path))
    for name in ("deviceVer", "multiProcessorCount"):
        if not isinstance(properties, dict) or type(properties.get(name)) is not int:
            raise ValueError(f"no number {name!r} in it")
    for name in PLANNING_PROPERTIES:
        value = properties.get(name, 0)
        if not all(isinstance(each, (int, float, str)) for each in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{name!r} is neither a number nor a list of numbers")
    return properties


def read_text(path: str | Path) -> str:
    """The text of a file; of a pipe, the text of its writer, empty if it has none."""
    with open(path, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        os.set_blocking(file.fileno(), True)
        return file.read()
