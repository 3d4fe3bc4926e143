"""The library's own native module: it is in what is installed, and the installed compiler accepts it without a warning.

It is compiled into the user's cache folder, so that only changed sources take this time.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from cudnn_sdpa.engine.explain import Explanation
from cudnn_sdpa.engine.native import build
from cudnn_sdpa.engine.native.build import FOLDER_VARIABLE
from cudnn_sdpa.plans.private_folders import in_users_cache

#: A compiler of the module with GCC's sanitizers, which are not for the compiler itself.
SANITIZING = "env -u LD_PRELOAD g++ -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"


def test_wheels_and_source_distributions_have_every_source(repository, tmp_path):
    builders = pytest.importorskip("hatchling.builders", reason="only in the environment of `make venv`")
    assert builders
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(repository)).build(directory=str(tmp_path), versions=["standard"])
    (sdist,) = SdistBuilder(str(repository)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as opened:
        in_wheel = set(opened.namelist())
    with tarfile.open(sdist) as opened:
        in_sdist = {name.partition("/")[2] for name in opened.getnames()}
    package = repository / "cudnn_sdpa"
    sources = [path for path in package.rglob("*") if path.suffix in {".py", ".cpp", ".h", ".c", ".cu", ".json"}]
    names = {str(path.relative_to(repository)) for path in sources}
    assert "cudnn_sdpa/engine/native/native.cpp" in names
    assert names <= in_wheel
    assert {"Makefile", "CONTRIBUTING.md"} <= in_sdist
    assert names <= in_sdist


def test_the_native_module_is_compiled_and_loaded(run_python):
    program = """
from cudnn_sdpa.engine.native import loader
loader.start()
print(loader.status()[:13], loader.module().__name__, sep="\\n")
"""
    result = run_python(program, CUDNN_SDPA_NATIVE="on", CUDNN_SDPA_NATIVE_DIR=None)
    assert result.stdout.splitlines() == ["C++: compiled", "cudnn_sdpa.engine.native._native"]


def test_explain_has_one_line_about_it():
    explanation = Explanation(
        "sdpa", "H200", offline=False, engine="eng8", native="C++: compiled before (/a/module.so)"
    )
    assert "  through    C++: compiled before (/a/module.so)" in str(explanation).splitlines()
    assert "through" not in str(Explanation("sdpa", "H200", offline=True, engine="eng8"))


@pytest.mark.slow
def test_it_compiles_without_warnings_and_runs_under_sanitizers(folder, monkeypatch, caplog, run_python):
    monkeypatch.setenv("CXX", SANITIZING)
    caplog.set_level(logging.DEBUG)
    path = build.compile_module()
    assert [record for record in caplog.records if "printed" in record.getMessage()] == []
    assert path.parent == folder
    program = """
from cudnn_sdpa.engine.native import loader
loader.start()
print(loader.status()[:3])
"""
    result = run_python(program, CUDNN_SDPA_NATIVE="on", **sanitizer_environment())
    assert result.stdout == "C++\n"


NATIVE_TESTS = [f"tests/unit/engine/native/test_native_{name}.py" for name in ("calls", "launches")]


def assert_tests_pass(repository, *arguments, **environment):
    """They pass in a process of their own."""
    outer = ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=repository,
        env={**{name: value for name, value in os.environ.items() if name not in outer}, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert " passed" in result.stdout


@pytest.mark.slow
def test_clang_compiles_it_without_warnings_and_its_calls_are_right(repository, folder, monkeypatch, caplog):
    clang = shutil.which("clang++")
    if clang is None:
        pytest.skip("there is no clang++ on this machine")
    monkeypatch.setenv("CXX", clang)
    caplog.set_level(logging.DEBUG)
    build.compile_module()
    assert [record for record in caplog.records if "printed" in record.getMessage()] == []
    assert_tests_pass(repository, *NATIVE_TESTS, **{FOLDER_VARIABLE: str(folder)})


@pytest.mark.slow
@pytest.mark.timeout(1000)  # of which the compilation takes minutes
def test_calls_keep_their_contract_under_sanitizers(repository):
    """A sample of `tests/contract`; `--tests all` in this command runs all of it.

    Tests in which cuDNN is loaded are left out: it finds its libraries by its run path, which ASan's dlopen ignores.
    """
    folder = in_users_cache("native-sanitized")  # kept: it takes minutes to compile
    chosen = "-k", "(native or Repeated) and not refused and not other_errors"
    environment = {**sanitizer_environment(), "CXX": SANITIZING, FOLDER_VARIABLE: str(folder)}
    assert_tests_pass(repository, *chosen, "tests/contract", *NATIVE_TESTS, **environment)


def sanitizer_environment() -> dict[str, str]:
    """The environment of Python with a module that was compiled with both sanitizers."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ on this machine")
    answers = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    if not Path(answers[0]).is_absolute():
        pytest.skip("the compiler has no libasan")
    return {
        "LD_PRELOAD": " ".join(answers),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python frees not everything at its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PATH": os.environ["PATH"],
    }
