"""The FlashAttention-4 that is installed: its versions, whether its files are those of its wheel, and its libraries.

Nothing of it is imported here.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

from cudnn_sdpa.plans.function_plan import Interface

#: Versions of packages with which the tests passed on a GPU. Private functions and their arguments differ in others.
TESTED = {
    "flash-attn-4": "4.0.0b36",
    "nvidia-cutlass-dsl": "4.8.1",
    "apache-tvm-ffi": "0.1.15.post2",
    "quack-kernels": "0.6.5",
}

#: Environment variable that admits other versions.
UNTESTED = "CUDNN_SDPA_UNTESTED_PROVIDERS"

COMMAND = "pip install " + " ".join(f"'{name}=={version}'" for name, version in TESTED.items())

_PACKAGE = "flash_attn/cute/"


class Installed(NamedTuple):
    """An installation of FlashAttention-4.

    Attributes:
        identity: The versions and a digest of the files, which are part of the keys of plans.
        missing: Why it cannot be used; empty if it can.
    """

    identity: str
    missing: str
    tvm_ffi: str = ""
    runtime: str = ""

    @property
    def version(self) -> str:
        return self.identity.partition(" ")[0]


@functools.cache
def installed() -> Installed:
    """The installation of this process, examined once."""
    try:
        found = {name: importlib.metadata.version(name) for name in TESTED}
        digest = _digest_of_files()
        libraries = (
            _library("tvm_ffi", "lib/libtvm_ffi.so"),
            _library("nvidia_cutlass_dsl", "cu*/lib/libcute_dsl_runtime.so"),
        )
    except (importlib.metadata.PackageNotFoundError, _BadInstallationError) as error:
        why = f"{error.name} is not installed" if isinstance(error, ImportError) else str(error)
        return Installed("", f"{why}; {COMMAND}")
    identity = " ".join([*found.values(), digest])
    others = [
        f"{name} {found[name]} is untested (tested: {version})"
        for name, version in TESTED.items()
        if found[name] != version
    ]
    if others and os.environ.get(UNTESTED) != "1":
        return Installed(identity, f"{', '.join(others)}; {COMMAND}, or set {UNTESTED}=1")
    return Installed(identity, "", *libraries)


@functools.cache
def interface() -> Interface:
    found = installed()
    return Interface(found.tvm_ffi, found.runtime)


class _BadInstallationError(Exception):
    """The files are not those that the metadata speak of."""


def _digest_of_files() -> str:
    """The digest of the files that an import would find, which are those of the wheel of flash-attn-4.

    The wheel of flash-attn (version 2) has an older package of the same name.
    """
    files = importlib.metadata.files("flash-attn-4") or []
    listed = {str(file): file for file in files if str(file).startswith(_PACKAGE) and file.suffix == ".py"}
    folder = _folder_of("flash_attn")
    if not listed or folder is None:
        raise _BadInstallationError("flash-attn-4 is installed without its files")
    digest = hashlib.sha256()
    for name, file in sorted(listed.items()):
        try:
            contents = (folder.parent / name).read_bytes()
        except OSError as error:
            raise _BadInstallationError(f"{error.filename} of flash-attn-4 cannot be read") from None
        sha256 = hashlib.sha256(contents).digest()
        if file.hash is not None and file.hash.value != base64.urlsafe_b64encode(sha256).decode().rstrip("="):
            reason = "another package (flash-attn 2 has one of this name) has replaced it, or it was changed"
            raise _BadInstallationError(f"{folder.parent / name} is not that of flash-attn-4: {reason}")
        digest.update(sha256)
    return digest.hexdigest()[:16]


def _folder_of(package: str) -> Path | None:
    """The folder of a package that is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a specification, which a program has made
        spec = None
    places = list((spec and spec.submodule_search_locations) or ())
    for place in map(Path, places):
        if package != "flash_attn" or (place / "cute").is_dir():
            return place
    return None


def _library(package: str, pattern: str) -> str:
    folder = _folder_of(package)
    found = sorted(folder.glob(pattern)) if folder is not None else []
    if not found:
        raise _BadInstallationError(f"{package} is installed without {pattern}")
    return str(found[-1])
