"""A missing, broken or too old cuDNN: the error names the versions found and the remedy."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest

from cudnn_sdpa import LibraryError
from cudnn_sdpa.doctor import probe
from cudnn_sdpa.graph import backend
from cudnn_sdpa.plans import nvrtc

#: Runs code without the frontend.
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "cudnn" or name.startswith("cudnn."):
            raise ModuleNotFoundError("No module named 'cudnn'", name="cudnn")
sys.meta_path.insert(0, Block())
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Reloads cuDNN, with a `cudnn` package of this source instead of the real one."""

    def load(source: str):
        folder = tmp_path / "cudnn"
        folder.mkdir()
        (folder / "__init__.py").write_text(source)
        for name in [name for name in sys.modules if name.partition(".")[0] == "cudnn"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(tmp_path)
        try:
            return backend.cudnn.__wrapped__()
        finally:
            sys.modules.pop("cudnn", None)

    return load


def frontend(version: str, libcudnn: str) -> str:
    return f"__version__ = {version!r}\ndef backend_version(): {libcudnn}\n"


def test_without_the_frontend_a_gpu_plan_is_an_error_and_the_reference_works(run_python):
    code = """
import torch, cudnn_sdpa
from cudnn_sdpa.graph import backend
q = torch.randn(1, 2, 8, 16, dtype=torch.float16)
for attempt in (backend.cudnn, backend.cudnn, lambda: cudnn_sdpa.explain(cudnn_sdpa.sdpa, q, q, q)):
    try:
        attempt()
    except cudnn_sdpa.LibraryError as error:
        assert isinstance(error, ImportError)
        print(error)
assert cudnn_sdpa.sdpa(q, q, q).isfinite().all()
"""
    lines = run_python(BLOCK + code).stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert "nvidia-cudnn-frontend cannot be imported (No module named 'cudnn')" in line
        assert "pip install 'cudnn-sdpa[cu13]'" in line
        assert "cudnn-sdpa[cu12]" in line


@pytest.mark.parametrize("version", ["1.20.0", "1.27.9", "0.99"])
def test_a_frontend_that_is_too_old(load, tmp_path, version):
    with pytest.raises(LibraryError) as caught:
        load(frontend(version, "return 92800"))
    assert f"nvidia-cudnn-frontend {version} at {tmp_path}/cudnn/__init__.py is too old" in str(caught.value)
    assert "1.28 or newer is needed" in str(caught.value)
    assert "pip install --upgrade nvidia-cudnn-frontend" in str(caught.value)


@pytest.mark.parametrize("version", ["1.28", "1.28.0.dev1", "1.32.0+local", "2.0"])
def test_a_frontend_that_is_new_enough(load, version):
    assert load(frontend(version, "return 91000")).__version__ == version


def test_a_frontend_without_a_libcudnn(load):
    with pytest.raises(LibraryError) as caught:
        load(frontend("1.32.0", "raise RuntimeError('libcudnn.so.9: cannot open shared object file')"))
    assert "libcudnn.so.9 cannot be loaded" in str(caught.value)
    assert "cannot open shared object file" in str(caught.value)
    assert "pip install 'cudnn-sdpa[cu13]'" in str(caught.value)


@pytest.mark.parametrize(("number", "version"), [(90100, "9.1.0"), (90908, "9.9.8"), (8907, "0.89.7")])
def test_a_libcudnn_that_is_too_old(load, number, version):
    with pytest.raises(LibraryError, match=rf"cuDNN {version} at .+ is too old: 9\.10\.0 or newer is needed") as caught:
        load(frontend("1.32.0", f"return {number}"))
    assert "LD_LIBRARY_PATH" in str(caught.value)


@pytest.mark.parametrize(
    "error", ["ImportError('libcudart.so.13: not found')", "OSError('file too short')", "AttributeError('no such')"]
)
def test_a_frontend_that_breaks_while_it_is_imported(load, error):
    with pytest.raises(LibraryError, match="cannot be imported") as caught:
        load(f"raise {error}\n")
    assert error.split("'")[1] in str(caught.value)


def test_installed_versions_are_read(run_python):
    pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed", exc_type=ImportError)
    code = (
        "from cudnn_sdpa.graph import backend as b; "
        "print(b.cudnn_version(), b.frontend_version(), b.loaded_libraries())"
    )
    version, frontend, libraries = run_python(code).stdout.split(maxsplit=2)
    assert int(version) >= 91000
    assert frontend.count(".") >= 2
    assert "/libcudnn.so.9" in libraries


def test_formatting_of_version_numbers():
    assert [backend.version_string(number) for number in (91900, 91002, 92801, 100203)] == [
        "9.19.0",
        "9.10.2",
        "9.28.1",
        "10.2.3",
    ]


@pytest.mark.parametrize("name", [b"data-\xe9.bin", "r\u00e9sum\u00e9.bin".encode(), b"libnvrtc.so.12"])
def test_files_of_any_name_may_be_mapped(tmp_path, name):
    path = os.fsencode(tmp_path) + b"/" + name
    with open(path, "wb+") as file:  # noqa: PTH123 - a name in bytes
        file.write(b"x" * 4096)
        file.flush()
        with mmap.mmap(file.fileno(), 0):
            assert os.fsdecode(path) in backend.mapped_files()
            libraries = backend.loaded_libraries()
            first = next(nvrtc._nvrtc_candidates())
            probe.mapped()
    if b"nvrtc" in name:
        assert libraries["libnvrtc"] == first


def test_a_home_with_an_accent_under_an_ascii_locale(tmp_path):
    folder = tmp_path / "jos\u00e9"
    folder.mkdir()
    (folder / "mapped.bin").write_bytes(b"x" * 4096)
    program = (
        "import mmap, sys\n"
        "from cudnn_sdpa.graph import backend\n"
        "file = open(sys.argv[1], 'rb')\n"
        "mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "backend.loaded_libraries()\n"
        "print(sys.argv[1] in backend.mapped_files())\n"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", program, str(folder / "mapped.bin")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr
