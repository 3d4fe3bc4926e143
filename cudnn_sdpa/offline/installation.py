"""Another library whose kernels serve calls, as it is installed: its versions, its files, and what launches need.

Nothing of it is imported.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cudnn_sdpa.plans.function_plan import Interface

#: Environment variable that admits other versions than those tested.
UNTESTED = "CUDNN_SDPA_UNTESTED_PROVIDERS"


class Installed(NamedTuple):
    """An installation of a library.

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


class Sources(NamedTuple):
    """The files that a library's kernels are compiled from, which must be those of its wheel.

    Attributes:
        distribution: Its name among `TESTED`.
        package: The package that an import would find.
        folders: How the paths of its files begin in the wheel.
        marker: A folder in the package that a stray one of its name may lack.
        why_changed: Why other files may be there.
    """

    distribution: str
    package: str
    folders: tuple[str, ...]
    marker: str
    why_changed: str


def install_command(tested: Mapping[str, str]) -> str:
    return "pip install " + " ".join(f"'{name}=={version}'" for name, version in tested.items())


def examined(tested: Mapping[str, str], sources: Sources) -> Installed:
    """The installation that imports would find, given the versions with which the tests passed on a GPU."""
    command = install_command(tested)
    try:
        found = {name: importlib.metadata.version(name) for name in tested}
        digest = _digest_of(sources)
        libraries = (
            _library("tvm_ffi", "lib/libtvm_ffi.so"),
            _library("nvidia_cutlass_dsl", "cu*/lib/libcute_dsl_runtime.so"),
        )
    except (importlib.metadata.PackageNotFoundError, _BadInstallationError) as error:
        why = f"{error.name} is not installed" if isinstance(error, ImportError) else str(error)
        return Installed("", f"{why}; {command}")
    identity = " ".join([*found.values(), digest])
    others = [
        f"{name} {found[name]} is untested (tested: {version})"
        for name, version in tested.items()
        if found[name] != version
    ]
    if others and os.environ.get(UNTESTED) != "1":
        return Installed(identity, f"{', '.join(others)}; {command}, or set {UNTESTED}=1")
    return Installed(identity, "", *libraries)


@functools.cache
def interface_of(tvm_ffi: str, runtime: str) -> Interface:
    """The C interface of functions, loaded once, whichever library they are of."""
    return Interface(tvm_ffi, runtime)


class _BadInstallationError(Exception):
    """The files are not those that the metadata speak of."""


def _digest_of(sources: Sources) -> str:
    """The digest of the files that an import would find, which are those of the wheel."""
    files = importlib.metadata.files(sources.distribution) or []
    listed = {str(x): x for x in files if str(x).startswith(sources.folders) and x.suffix == ".py"}
    folder = _folder_of(sources.package, sources.marker)
    if not listed or folder is None:
        raise _BadInstallationError(f"{sources.distribution} is installed without its files")
    digest = hashlib.sha256()
    for name, file in sorted(listed.items()):
        try:
            contents = (folder.parent / name).read_bytes()
        except OSError as error:
            raise _BadInstallationError(f"{error.filename} of {sources.distribution} cannot be read") from None
        sha256 = hashlib.sha256(contents).digest()
        if file.hash is not None and file.hash.value != base64.urlsafe_b64encode(sha256).decode().rstrip("="):
            path = folder.parent / name
            raise _BadInstallationError(f"{path} is not that of {sources.distribution}: {sources.why_changed}")
        digest.update(sha256)
    return digest.hexdigest()[:16]


def _folder_of(package: str, marker: str = "") -> Path | None:
    """The folder of a package that is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a specification, which a program has made
        spec = None
    places = list((spec and spec.submodule_search_locations) or ())
    return next((place for place in map(Path, places) if (place / marker).is_dir()), None)


def _library(package: str, pattern: str) -> str:
    folder = _folder_of(package)
    found = sorted(folder.glob(pattern)) if folder is not None else []
    if not found:
        raise _BadInstallationError(f"{package} is installed without {pattern}")
    return str(found[-1])
