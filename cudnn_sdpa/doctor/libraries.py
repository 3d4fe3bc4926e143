"""Checks of PyTorch, cuDNN and its frontend: versions, and which file comes from where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from cudnn_sdpa.doctor.facts import Facts
from cudnn_sdpa.doctor.findings import REINSTALL, Finding, Level, cure_of
from cudnn_sdpa.runtime.backend import MIN_FRONTEND, version_string

#: The oldest PyTorch that the library is tested with.
MIN_TORCH = (2, 9)

_CUDNN = re.compile(r"nvidia-cudnn-cu(\d+)")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def broken_off(facts: Facts) -> Iterator[Finding]:
    """The examination got through."""
    if not facts.broken_off:
        return
    part, cure = "a call of sdpa was tried", "Report it with what `doctor --json` prints."
    if facts.torch is None:
        part, cure = "PyTorch was asked for its versions and GPUs", "Reinstall PyTorch in a fresh environment."
    elif facts.cudnn is None:
        part, cure = "cuDNN was loaded", f"Take CUDA folders off LD_LIBRARY_PATH, or {REINSTALL}."
    yield Finding(
        Level.ERROR, "broken_off", f"A process ended while {part}", facts.broken_off, cure_of(facts.broken_off, cure)
    )


def torch_version(facts: Facts) -> Iterator[Finding]:
    """PyTorch is new enough."""
    version = facts.torch.version if facts.torch else facts.packages.get("torch", "")
    if version and _number(version) < MIN_TORCH:
        found = f"torch {version}; {_dotted(MIN_TORCH)} or newer is needed"
        yield Finding(Level.ERROR, "torch_version", "PyTorch is too old", found, "pip install --upgrade torch.")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def frontend(facts: Facts) -> Iterator[Finding]:
    """The frontend is there and new enough."""
    name = "nvidia-cudnn-frontend"
    version = (facts.cudnn.frontend if facts.cudnn else "") or facts.packages.get(name, "")
    if not version:
        if facts.cudnn is None or not facts.cudnn.error:  # what importing it raises is shown by `cudnn`
            yield Finding(Level.ERROR, "frontend", f"{name} is missing", "no such package", f"pip install {name}.")
    elif _number(version) < MIN_FRONTEND:
        found = f"{name} {version}; {_dotted(MIN_FRONTEND)} or newer is needed"
        cure = f"pip install --upgrade {name}."
        yield Finding(Level.ERROR, "frontend", "cuDNN's frontend is too old", found, cure)


def cudnn(facts: Facts) -> Iterator[Finding]:
    """The frontend and its cuDNN could be loaded."""
    if facts.cudnn is None or not facts.cudnn.error:
        return
    if any(frontend(facts)):  # said already
        return
    cure = cure_of(facts.cudnn.error, f"Take CUDA folders off LD_LIBRARY_PATH, or {REINSTALL}.")
    yield Finding(Level.ERROR, "cudnn", "cuDNN cannot be used", facts.cudnn.error, cure)


def one_cudnn(facts: Facts) -> Iterator[Finding]:
    """All parts of cuDNN in a process come from one folder."""
    mapped = [PurePosixPath(path) for path in facts.mapped]
    folders = sorted({str(path.parent) for path in mapped if path.name.startswith("libcudnn")})
    if len(folders) > 1:
        cure = "Keep one: take the other's folder off LD_LIBRARY_PATH, or uninstall the other package."
        title = "Parts of several cuDNNs are in one process"
        yield Finding(Level.ERROR, "one_cudnn", title, "; ".join(folders), cure)


def torchs_cudnn(facts: Facts) -> Iterator[Finding]:
    """PyTorch's cuDNN is the one that this library uses."""
    torch, ours = facts.torch, facts.cudnn.version if facts.cudnn else None
    if torch is None:
        return
    if torch.cudnn_error:
        cure = cure_of(torch.cudnn_error, "Take the folder with the other cuDNN off LD_LIBRARY_PATH.")
        yield Finding(Level.ERROR, "torchs_cudnn", "PyTorch refuses its cuDNN", torch.cudnn_error, cure)
    elif torch.cudnn is not None and ours is not None and torch.cudnn != ours:
        found = f"PyTorch's is {version_string(torch.cudnn)}, this library's {version_string(ours)}"
        cure = "Take the other one's folder off LD_LIBRARY_PATH, or install the cuDNN that PyTorch's package asks for."
        yield Finding(Level.ERROR, "torchs_cudnn", "PyTorch and this library use two cuDNNs", found, cure)


def cuda_mix(facts: Facts) -> Iterator[Finding]:
    """The packages are for one CUDA: PyTorch's."""
    installed = {match[1]: name for name in facts.packages if (match := _CUDNN.fullmatch(name))}
    wanted = facts.torch.cuda.split(".")[0] if facts.torch and facts.torch.cuda else None
    if len(installed) > 1:
        both = " and ".join(f"{name} {facts.packages[name]}" for name in sorted(installed.values()))
        keep = f"nvidia-cudnn-cu{wanted}" if wanted else "the one that you want"
        cure = f"pip uninstall {' '.join(sorted(installed.values()))}, then pip install {keep}."
        title = "cuDNN for CUDA 12 and for 13 are installed over each other"
        yield Finding(Level.ERROR, "cuda_mix", title, both, cure)
    elif installed and wanted and wanted not in installed:
        ((_, name),) = installed.items()
        found = f"{name} {facts.packages[name]}, and PyTorch for CUDA {facts.torch.cuda if facts.torch else ''}"
        cure = f"pip uninstall {name}, then pip install 'cudnn-sdpa[cu{wanted}]'."
        yield Finding(Level.ERROR, "cuda_mix", "cuDNN is for another CUDA than PyTorch", found, cure)
    for pair, path in facts.shared_files.items():
        if not _CUDNN.match(pair):
            cure = f"Uninstall both ({pair}), then install the one that PyTorch's package asks for."
            yield Finding(
                Level.ERROR, "cuda_mix", "Two packages have installed the same files", f"{pair}: {path}", cure
            )


def two_runtimes(facts: Facts) -> Iterator[Finding]:
    """A process has one CUDA runtime, one NVRTC and one cuBLAS."""
    majors: dict[str, set[str]] = {}
    for path in facts.mapped:
        match = re.search(r"/(libcudart|libnvrtc|libcublas|libcublasLt)\.so\.(\d+)[.\d]*$", path)
        if match:
            majors.setdefault(match[1], set()).add(match[2])
    for name, found in sorted(majors.items()):
        if len(found) > 1:
            what = " and ".join(f"{name}.so.{major}" for major in sorted(found))
            cure = (
                "Uninstall the CUDA packages of the version that PyTorch is not for; until then "
                "CUDNN_FRONTEND_CUDART_LIB_NAME can name the runtime to use."
            )
            yield Finding(Level.WARNING, "two_runtimes", "Two CUDA versions are in one process", what, cure)


def places(facts: Facts) -> Iterator[Finding]:
    """No folder of the environment takes the place of the package."""
    folders = {str(PurePosixPath(path).parent) for path in facts.mapped if "/libcudnn.so" in path}
    for library in facts.libraries:
        loaded = str(PurePosixPath(library.file or library.path).parent) in folders
        if library.origin == "LD_LIBRARY_PATH" and (loaded or not folders):
            cure = "Take it off LD_LIBRARY_PATH unless you mean it: it comes before the pip package."
            title = "cuDNN comes from LD_LIBRARY_PATH"
            yield Finding(Level.WARNING, "places", title, library.path, cure)
        elif library.origin == "CUDNN_PATH" and not loaded:
            cure = "Put it on LD_LIBRARY_PATH if you mean that one; CUDNN_PATH is read when software is built."
            yield Finding(
                Level.NOTE, "places", "CUDNN_PATH names a cuDNN that is not the loaded one", library.path, cure
            )


def trial(facts: Facts) -> Iterator[Finding]:
    """A call works, and gives the right numbers."""
    found = facts.trial
    if found is None:
        return
    on_gpu = found.on == "GPU"
    if found.error and facts.cudnn is not None and not facts.cudnn.error:
        lacks_compiler = facts.c_compiler is None and not facts.driver.loads
        if lacks_compiler and not on_gpu:  # said by `compilers`
            return
        title = "A call of sdpa fails on the GPU" if on_gpu else "No plan can be made for another machine"
        cure = cure_of(
            found.error, "Mend what stands above first; if that is nothing, report what `doctor --json` prints."
        )
        yield Finding(Level.ERROR if on_gpu else Level.WARNING, "trial", title, found.error, cure)
    elif found.difference is not None and not found.difference < 1e-2:
        what = f"relative error {found.difference:.1e}, {found.engine}"
        cure = "Do not use this cuDNN on this GPU: install another version, and report what `doctor --json` prints."
        yield Finding(Level.ERROR, "trial", "sdpa computes something else on this GPU", what, cure)
