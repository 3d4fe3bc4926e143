"""The driver's structures and functions are those of every `cuda.h` on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cudnn_sdpa.engine.native import build


def headers() -> list[Path]:
    folders = [Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda"), *Path("/usr/local").glob("cuda-1*")]
    packages = [Path(path) for path in sys.path if path]
    found = [folder / "include" for folder in folders]
    found += [include for path in packages for include in path.glob("nvidia/*/include")]
    found += [path / "triton/backends/nvidia/include" for path in packages]
    return [folder for folder in dict.fromkeys(x.resolve() for x in found) if (folder / "cuda.h").is_file()]


def test_the_abi_is_cudas():
    compiler = build.find_compiler()
    if compiler is None or not headers():
        pytest.skip("no C++ compiler, or no cuda.h")
    source = Path(__file__).with_name("driver_abi.cpp")
    for folder in headers():
        options = ["-std=c++17", "-fsyntax-only", f"-I{folder}", f"-I{build.SOURCES}", str(source)]
        result = subprocess.run([*compiler, *options], capture_output=True, text=True, check=False)
        assert not result.returncode, f"{folder}: {result.stderr}"
