"""The stand-in driver: compiled once, in a private folder, and never used with a real driver."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cudnn_sdpa import OfflineError
from cudnn_sdpa.offline import driver
from cudnn_sdpa.offline.planner import Helper
from cudnn_sdpa.plans import private_folders

FOLDER = "from cudnn_sdpa.offline import driver; print(driver.stand_in_folder())"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A new cache folder, on a machine with a C compiler and without a driver."""
    if driver.has_real_driver():
        pytest.skip("this machine has a real driver, so no stand-in is made")
    if driver.compiler() is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_is_compiled_into_the_users_cache_with_private_permissions(cache):
    folder = driver.stand_in_folder()
    assert folder.is_relative_to(cache / "cudnn_sdpa")
    library = folder / "libcuda.so.1"
    assert library.read_bytes()[:4] == b"\x7fELF"
    assert b"cudnn_sdpa_stand_in_driver" in library.read_bytes()
    for path in (folder, folder.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not library.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]  # nothing else is left behind


@pytest.mark.usefixtures("cache")
def test_the_second_time_nothing_is_compiled(monkeypatch):
    folder = driver.stand_in_folder()
    before = (folder / "libcuda.so.1").stat()
    monkeypatch.setenv("PATH", "")  # without a compiler
    monkeypatch.delenv("CC", raising=False)
    assert driver.stand_in_folder() == folder
    after = (folder / "libcuda.so.1").stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)


@pytest.mark.slow
def test_several_processes_may_make_it_at_the_same_time(cache, repository):
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(repository)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FOLDER], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, results
    folders = {output.strip() for output, _ in results}
    assert len(folders) == 1
    parent = Path(folders.pop()).parent
    assert len(list(parent.iterdir())) == 1


def test_it_is_private_under_any_umask(cache):
    before = os.umask(0o002)  # the usual one where each user has a private group
    try:
        folder = driver.stand_in_folder()
    finally:
        os.umask(before)
    assert folder.is_relative_to(cache)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("name", [".", "libcuda.so.1"])
def test_files_writable_by_others_are_not_loaded(cache, mode, name):
    folder = driver.stand_in_folder()
    (folder / name).chmod(mode)
    with pytest.raises(OfflineError, match=r"(writable by others|others may write to it).* [rR]emove ") as caught:
        driver.stand_in_folder()
    assert str(cache) in str(caught.value)


@pytest.mark.usefixtures("cache")
def test_without_a_home_the_error_names_the_folder_settings(monkeypatch):
    def unknown(*_):
        raise RuntimeError("no home directory is known")

    monkeypatch.setattr(private_folders.platformdirs, "user_cache_dir", unknown)
    with pytest.raises(OfflineError, match=r"there is no home .* XDG_CACHE_HOME can name another"):
        driver.stand_in_folder()


def test_without_a_compiler_the_error_names_the_package(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert driver.compiler() is None
    helper = Helper()
    for attempt in (driver.stand_in_folder, driver.helper_environment, lambda: helper.ask({})):
        with pytest.raises(OfflineError, match=r"needs a C compiler, and none of \$CC, cc, gcc and clang") as caught:
            attempt()
        assert "apt-get install gcc" in str(caught.value)
    assert not list(cache.rglob("libcuda*"))


@pytest.mark.usefixtures("cache")
def test_a_compiler_that_fails_is_named(tmp_path, monkeypatch):
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'no space left on device' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(OfflineError, match="broken-cc could not compile the stand-in driver: no space left on device"):
        driver.stand_in_folder()
    monkeypatch.delenv("CC")
    assert driver.stand_in_folder().exists()  # the failure left nothing behind


@pytest.mark.usefixtures("cache")
def test_the_helper_finds_the_stand_in_first(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere/else")
    environment = driver.helper_environment()
    assert environment["LD_LIBRARY_PATH"].split(":") == [str(driver.stand_in_folder()), "/somewhere/else"]
    assert os.environ["LD_LIBRARY_PATH"] == "/somewhere/else"


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_the_stand_in_is_distinguished_from_a_real_driver(run_python):
    folder = driver.stand_in_folder()
    code = "from cudnn_sdpa.offline import driver; print(driver.has_real_driver())"
    assert run_python(code, LD_LIBRARY_PATH=str(folder)).stdout.strip() == "False"


@pytest.mark.slow
def test_no_stand_in_with_a_real_driver(cache, tmp_path, run_python):
    folder = tmp_path / "nvidia"
    folder.mkdir()
    (folder / "driver.c").write_text("int cuInit(unsigned flags) { return 0; }\n")
    command = [driver.compiler(), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(command, cwd=folder, check=True)
    code = """
import os
from cudnn_sdpa import OfflineError
from cudnn_sdpa.offline import driver
assert driver.has_real_driver()
try:
    driver.stand_in_folder()
except OfflineError as error:
    print(error)
environment = driver.helper_environment()
assert environment["CUDA_VISIBLE_DEVICES"] == ""
assert environment["LD_LIBRARY_PATH"] == os.environ["LD_LIBRARY_PATH"]
"""
    output = run_python(code, LD_LIBRARY_PATH=str(folder), XDG_CACHE_HOME=str(cache)).stdout
    assert "this machine has an NVIDIA driver: the stand-in driver must not be used with it" in output
    assert not list(cache.rglob("libcuda*"))
