"""Finds the facts out. What may break, PyTorch's CUDA and cuDNN, is loaded in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from cudnn_sdpa.doctor.facts import (
    PARTS,
    CudnnFacts,
    DriverFacts,
    Facts,
    FoundLibrary,
    Gpu,
    StoreFacts,
    TorchFacts,
    TrialFacts,
)
from cudnn_sdpa.errors import OfflineError
from cudnn_sdpa.offline import interpreter
from cudnn_sdpa.offline.driver import compiler
from cudnn_sdpa.runtime import folders, store_setting
from cudnn_sdpa.runtime.folders import UnsafeFolderError

_PACKAGE = Path(__file__).parent.parent

#: A first plan takes a second, PyTorch some more; on a slow network disk a minute goes by.
TIMEOUT_SECONDS = 300.0

#: A driver that wakes many GPUs up takes some seconds.
DRIVER_SECONDS = 60.0

#: Asks it.
_ASKS = str(_PACKAGE / "doctor" / "ask_driver.py")

_PROGRAM = "from cudnn_sdpa.doctor.probe import main; main()"

#: Packages that matter beside those whose name begins with "nvidia-".
_PACKAGES = ("torch", "triton", "cudnn-sdpa", "numpy")

_VARIABLES = re.compile(
    r"CUDNN_\w+|CUDA_(VISIBLE_DEVICES|HOME|PATH)|NVIDIA_VISIBLE_DEVICES|LD_(LIBRARY_PATH|PRELOAD)|XDG_CACHE_HOME|CC|CXX"
)

#: Where a system's or a Conda environment's own libcudnn lies.
_SYSTEM = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib", "usr/local/cuda*/lib64", "opt/cudnn*/lib*")


def gather(timeout: float = TIMEOUT_SECONDS) -> Facts:
    """The facts of this machine and this environment.

    Raises:
        OfflineError: There is no interpreter for the processes in which libraries are tried.
    """
    if reason := interpreter.why_no_python():
        raise OfflineError(f"the doctor examines an installation in processes of its own, but {reason}")
    driver = _driver()
    # What asks PyTorch for its GPUs asks the driver too, and would hang or crash with it.
    parts, broken_off = ({}, "") if driver.broken_off else _examine(timeout)
    packages, shared = _packages()
    return Facts(
        platform=sys.platform,
        python=platform.python_version(),
        packages=packages,
        shared_files=shared,
        environment={name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
        libraries=_libraries(),
        driver=driver,
        c_compiler=compiler(),
        cxx_compiler=_cxx_compiler(),
        store=_store(),
        torch=_torch_facts(parts["torch"]) if "torch" in parts else None,
        cudnn=CudnnFacts(**parts["cudnn"]) if "cudnn" in parts else None,
        trial=TrialFacts(**parts["trial"]) if "trial" in parts else None,
        mapped=tuple(parts.get("mapped_after", parts.get("mapped", ()))),
        broken_off=broken_off,
    )


def _torch_facts(part: dict[str, Any]) -> TorchFacts:
    gpus = (Gpu(gpu["name"], tuple(gpu["capability"])) for gpu in part.pop("gpus", ()))
    return TorchFacts(**part, gpus=tuple(gpus))


def _examine(timeout: float) -> tuple[dict[str, Any], str]:
    """What the examining process said, and how it ended if not well."""
    try:
        result = subprocess.run(
            interpreter.command(_PROGRAM),
            env={**os.environ, store_setting.VARIABLE: store_setting.OFF},  # it shall build a plan, not find one
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        output, said, code = result.stdout, result.stderr, result.returncode
    except subprocess.TimeoutExpired as error:
        output, said, code = error.stdout or b"", error.stderr or b"", None
    parts = _parts_of(output)
    if code == 0 and set(PARTS) <= set(parts):
        return parts, ""
    how = f"did not end within {timeout:g} s" if code is None else interpreter.exit_in_words(code)
    last = said.decode(errors="replace").strip()[-600:]
    return parts, how + (f"; it said: {last}" if last else "")


def _parts_of(output: bytes) -> dict[str, Any]:
    """The lines that the examining process got through; what else is there, as a site prints it, is passed over."""
    parts: dict[str, Any] = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # no JSON, or a line that was broken off
            said = json.loads(line)
            parts |= said if isinstance(said, dict) and set(said) <= set(PARTS) else {}
    return parts


def _packages() -> tuple[dict[str, str], dict[str, str]]:
    """Versions of the packages that matter, and pairs of them that installed the same library."""
    versions: dict[str, str] = {}
    owners: dict[str, set[str]] = defaultdict(set)
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"] or "").lower().replace("_", "-")
        if not (name.startswith("nvidia-") or name in _PACKAGES) or name in versions:
            continue
        versions[name] = distribution.version
        for file in distribution.files or () if name.startswith("nvidia-") else ():
            if ".so" in file.name:
                owners[str(distribution.locate_file(file))].add(name)
    shared: dict[str, str] = {}
    for path, names in sorted(owners.items()):
        for pair in itertools.combinations(sorted(names), 2):
            shared.setdefault(" and ".join(pair), path)
    return dict(sorted(versions.items())), shared


def _libraries() -> tuple[FoundLibrary, ...]:
    """Every libcudnn that a process could load, with the place that it was found by."""
    found: dict[str, str] = {}
    for entry in _entries("LD_LIBRARY_PATH"):
        _look_in(entry, "LD_LIBRARY_PATH", found)
    for entry in _entries("CUDNN_PATH"):
        for folder in (entry, entry / "lib", entry / "lib64"):
            _look_in(folder, "CUDNN_PATH", found)
    for name in ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-jit-cu12", "nvidia-cudnn-jit-cu13"):
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in distribution.files or ():
            path = Path(str(distribution.locate_file(file)))
            if re.fullmatch(r"libcudnn\.so[.\d]*", file.name) and path.exists():
                found.setdefault(str(path), f"{name} {distribution.version}")
    for folder in (Path(entry) / "torch" / "lib" for entry in sys.path if entry):
        _look_in(folder, "PyTorch's own folder", found)
    _look_in(Path(sys.prefix) / "lib", "the environment", found)
    for pattern in _SYSTEM:
        for folder in sorted(Path("/").glob(pattern)):
            _look_in(folder, "the system", found)
    return tuple(FoundLibrary(path, origin, os.path.realpath(path)) for path, origin in found.items())


def _entries(variable: str) -> list[Path]:
    return [Path(entry) for entry in os.environ.get(variable, "").split(os.pathsep) if entry]


def _look_in(folder: Path, origin: str, found: dict[str, str]) -> None:
    with contextlib.suppress(OSError):  # a folder that may not be looked into; no process could load from it
        for path in sorted(folder.glob("libcudnn.so*")):
            found.setdefault(str(path), origin)


def _driver() -> DriverFacts:
    module = Path("/proc/driver/nvidia/version")
    match = re.search(r"\b(\d{3,}\.[\d.]+)\b", module.read_text()) if module.exists() else None
    nodes = len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    said: dict[str, Any] = {}
    try:
        command = interpreter.command(f"import runpy\nrunpy.run_path({_ASKS!r}, run_name='__main__')")
        result = subprocess.run(command, capture_output=True, timeout=DRIVER_SECONDS, check=False)
        if result.returncode == 0:
            said = json.loads(result.stdout.splitlines()[-1])  # behind what a site prints
        else:
            said["broken_off"] = interpreter.exit_in_words(result.returncode)
    except subprocess.TimeoutExpired:
        said["broken_off"] = f"no answer within {DRIVER_SECONDS:g} s"
    return DriverFacts(**said, release=match[1] if match else "", nodes=nodes)


def _cxx_compiler() -> str | None:
    candidates = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def _store() -> StoreFacts:
    """The plan store as a process would open it; nothing is made."""
    setting = os.environ.get(store_setting.VARIABLE, "")
    named = bool(setting) and not store_setting.is_off(setting)
    try:
        folder = store_setting.folder_of_environment()
    except UnsafeFolderError as error:
        return StoreFacts(None, named, problem=str(error))
    if folder is None:
        return StoreFacts(None)
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        problem, note = _problem_of(folder, there)
        return StoreFacts(str(folder), named, problem, shutil.disk_usage(there).free, note)
    except OSError as error:  # such as a parent that this user may not look into
        return StoreFacts(str(folder), named, f"{folder}: {error.strerror}")


def _problem_of(folder: Path, there: Path) -> tuple[str, str]:
    """Why plans cannot be kept in a folder, of which this much is there; or why they are only read."""
    if not there.is_dir():
        return f"{there} is no folder", ""
    try:
        folders.check_above(folder)
        if there == folder:
            os.close(folders.open_private(folder, make=False))
    except UnsafeFolderError as error:
        return str(error), ""
    if os.access(there, os.W_OK | os.X_OK):
        return "", ""
    if there == folder and os.access(there, os.R_OK | os.X_OK):
        plans = [path for path in folder.glob("*.plan") if os.access(path, os.R_OK)]
        return "", f"{folder} is not writable; {len(plans)} plans in it can be read"
    return f"{there} is not writable", ""
