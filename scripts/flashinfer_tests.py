"""Runs FlashInfer's own tests of attention, pages and merges on `cudnn_sdpa.compat.flashinfer`. It needs a GPU.

    python scripts/flashinfer_tests.py                       # fetches them into .engines/flashinfer-tests
    python scripts/flashinfer_tests.py --source FOLDER       # takes those of a checkout
    python scripts/flashinfer_tests.py -- -k sliding -x      # with options of pytest

The name `flashinfer` means our module while they run. What it lacks skips the test that calls it, and so does what no
kernel does: `UnsupportedError`, and head dims above 256. The summary counts reasons; failures are ours.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import io
import sys
import tarfile
import urllib.request
from collections.abc import Generator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from cudnn_sdpa.compat import flashinfer as ours
from cudnn_sdpa.errors import UnsupportedError

ROOT = Path(__file__).parent.parent
TAG = "v0.7.2.post1"
ARCHIVE = f"https://codeload.github.com/flashinfer-ai/flashinfer/tar.gz/refs/tags/{TAG}"
FOLDER = ROOT / ".engines" / "flashinfer-tests"
FILES = [
    *(f"tests/attention/test_{name}_kernels.py" for name in ("batch_decode", "batch_prefill", "shared_prefix")),
    *("tests/attention/test_single_prefill.py", "tests/attention/test_page.py", "tests/attention/test_logits_cap.py"),
    *("tests/attention/test_non_contiguous_decode.py", "tests/attention/test_non_contiguous_prefill.py"),
    *("tests/attention/test_sliding_window.py", "tests/attention/test_batch_attention.py"),
    "tests/utils/test_triton_cascade.py",
]

#: Tests of how FlashInfer refuses what we do, and of its schedule, by a part of the name.
NOT_OURS = {
    "test_tensor_core_decode_rejects_mismatched_q_len": "drafts need no tensor cores here, and messages are others",
    "torch_compile_cuda_graph": "it imports flashinfer in a process of its own",
    "head_dim_512": "head dims are at most 256",
    "smem": "head dims are at most 256",
    "nvfp4": "no kernel reads NVFP4",
}


class _Absent(type):
    """The class of what our module lacks: names that can be imported, and skip the test that calls them."""

    def __getattr__(cls, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__name__}.{name}")

    def __call__(cls, *_: object, **__: object) -> None:
        pytest.skip(f"{cls.__name__} is not in {ours.__name__}")


def absent(name: str) -> _Absent:
    return type.__call__(_Absent, name, (), {})  # type: ignore[no-any-return]


class GPUArchitectureError(RuntimeError):
    """FlashInfer's, which some of its tests catch."""


KNOWN = {
    "get_compute_capability": torch.cuda.get_device_capability,
    "has_flashinfer_jit_cache": lambda: True,  # nothing is to be compiled before
    "GPUArchitectureError": GPUArchitectureError,
}


class _Module(ModuleType):
    """`flashinfer` or a module of it, all of which have all names."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("decode", "prefill", "page", "cascade", "utils"):
            return importlib.import_module(f"flashinfer.{name}")
        return getattr(ours, name) if name in ours.__all__ else KNOWN.get(name, absent(f"{self.__name__}.{name}"))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `flashinfer` and all modules of it, and makes them."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_ours = name.partition(".")[0] == "flashinfer"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, _module: ModuleType) -> None:
        pass


class _Plugin:
    """Skips the tests of what no kernel here does."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        for part, reason in NOT_OURS.items():
            if part in item.name:
                pytest.skip(reason)
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("head_dim", 0) > 256:
            pytest.skip("head dims are at most 256")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        try:
            return (yield)
        except UnsupportedError as error:
            pytest.skip(f"{error.what}: {'; '.join(error.reasons)}")


def fetch() -> Path:
    """The folder with FlashInfer's tests, which are fetched at the first use."""
    if not (FOLDER / "tests").is_dir():
        with urllib.request.urlopen(ARCHIVE) as answer:
            archive = io.BytesIO(answer.read())
        with tarfile.open(fileobj=archive) as files:
            for member in files:
                member.name = member.name.partition("/")[2]
                if member.name.startswith("tests/"):
                    files.extract(member, FOLDER, filter="data")
    return FOLDER


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, help="a checkout of FlashInfer")
    parser.add_argument("options", nargs="*", help="options of pytest")
    given = parser.parse_args()
    folder = fetch() if given.source is None else given.source
    sys.meta_path.insert(0, _Finder())
    sys.path.insert(0, str(folder))  # its tests import `tests.test_helpers`
    sys.modules.pop("tests", None)
    files = [str(folder / file) for file in FILES if (folder / file).is_file()]
    options = ["--noconftest", "--rootdir", str(folder), "-c", "/dev/null", "-q", "-rs", "-p", "no:cacheprovider"]
    return int(pytest.main([*options, *given.options, *files], plugins=[_Plugin()]))


if __name__ == "__main__":
    sys.exit(main())
