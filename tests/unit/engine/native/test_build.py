"""Compiling the native module into a folder: what is found, what is refused, and what is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
import torch

from cudnn_sdpa.engine.native import build, loader
from cudnn_sdpa.engine.native.build import CompileError

STRANGER = 54321
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="root alone can give files away")


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_module_is_compiled_and_then_found_without_a_compiler(recipe, folder, monkeypatch):
    small = recipe()
    assert build.find(small) is None
    assert not folder.exists()  # looking makes nothing
    path = build.compile_module(small)
    assert loader.load(path).answer == 42
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert listed(folder) == [path.name]
    monkeypatch.setenv("PATH", "")
    assert build.find(small) == path


@pytest.mark.slow
def test_changed_sources_are_another_module(recipe, folder):
    first = build.compile_module(recipe(1))
    second = build.compile_module(recipe(2))
    third = recipe(2, unused="// a header")
    assert build.find(third) is None
    assert len({first, second, folder / build.name_of(third)}) == 3
    assert [loader.load(path).answer for path in (first, second)] == [1, 2]


@pytest.mark.parametrize(
    "name",
    [
        *("torch.__version__", "torch.version.git_version", "torch.version.cuda"),
        *("sys.implementation.cache_tag", "platform.python_version", "sysconfig.get_platform", "os.confstr"),
    ],
)
def test_another_pytorch_python_or_system_is_another_module(recipe, monkeypatch, name):
    before = build.name_of(recipe())
    value = (lambda *_: "another") if name.split(".")[0] in {"platform", "sysconfig", "os"} else "another"
    monkeypatch.setattr(name, value)
    assert build.name_of(recipe()) != before


def test_the_compiler_is_not_part_of_the_name(recipe, monkeypatch):
    before = build.name_of(recipe())
    monkeypatch.setenv("CXX", "g++ -O3")
    assert build.name_of(recipe()) == before


def as_empty(path: Path) -> str:
    path.write_bytes(b"")
    return "damaged"


def as_truncated(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-1000])
    return "damaged"


def as_changed(path: Path) -> str:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)
    return "damaged"


def as_another_module(path: Path) -> str:
    another = path.with_name("another.so")
    path.rename(another)
    another.with_name(path.name).write_bytes(another.read_bytes() + build._seal(another.name, another.read_bytes()))
    return "another module"


def as_open(path: Path) -> str:
    path.chmod(0o622)
    return "others may write to it"


def as_foreign(path: Path) -> str:
    os.chown(path, STRANGER, STRANGER)
    return "belongs to another user"


def as_link(path: Path) -> str:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))
    return "symbolic links"


def as_pipe(path: Path) -> str:
    path.unlink()
    os.mkfifo(path)
    return "not a regular file"


WAYS = [as_empty, as_truncated, as_changed, as_another_module, as_open, as_link, as_pipe]


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", [*WAYS, pytest.param(as_foreign, marks=NEEDS_ROOT)])
def test_a_file_that_cannot_be_trusted_is_refused_with_a_line_and_replaced(recipe, caplog, damage):
    small = recipe()
    path = build.compile_module(small)
    reason = damage(path)
    assert build.find(small) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"ignoring the native module {path}: " in record.getMessage()
    assert reason in record.getMessage()
    assert build.compile_module(small) == build.find(small) == path
    assert loader.load(path).answer == 42
    assert path.stat().st_uid == os.getuid()


def test_a_folder_in_the_files_place_is_an_error(recipe, folder):
    small = recipe()
    (folder / build.name_of(small)).mkdir(parents=True)
    folder.chmod(0o700)
    with pytest.raises(CompileError, match="CUDNN_SDPA_NATIVE_DIR"):
        build.compile_module(small)
    assert not [path for path in folder.iterdir() if path.name.startswith((".", "compiling"))]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(recipe, folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    for use in (build.compile_module, build.find):
        with pytest.raises(CompileError, match=f"chmod go-w {folder}") as raised:
            use(recipe())
        assert not raised.value.is_expected
    assert list(folder.iterdir()) == []


@NEEDS_ROOT
def test_a_folder_of_another_user_is_refused(recipe, folder):
    small = recipe()
    build.compile_module(small)
    os.chown(folder, STRANGER, STRANGER)
    for use in (build.compile_module, build.find):
        with pytest.raises(CompileError, match="belongs to another user"):
            use(small)


def test_a_file_in_the_folders_place_is_an_error(recipe, folder):
    folder.write_text("")
    with pytest.raises(CompileError, match="not a folder"):
        build.compile_module(recipe())


def test_a_folder_that_is_not_writable_serves_what_it_has(recipe, folder, run_python):
    """As in a container image, whose folder root has filled; the program runs as another user."""
    if os.getuid() != 0:
        pytest.skip("root alone can become another user")
    small = recipe()
    folder.mkdir(mode=0o755)
    path = build.compile_module(small)
    assert path.stat().st_mode & 0o777 == 0o644
    program = """
import os, sys
from pathlib import Path
from cudnn_sdpa.engine.native import build, loader
for folder in Path(sys.argv[1]).parents:
    if str(folder).startswith("/tmp/"):
        folder.chmod(0o755)
small = Path(sys.argv[1])
os.setgid(54321); os.setuid(54321)
print(loader.load(build.find(small)).answer)
try:
    build.compile_module(small)
except build.CompileError as error:
    print(error)
"""
    result = run_python(program, str(small))
    answer, error = result.stdout.splitlines()
    assert answer == "42"
    assert "Permission denied" in error
    assert "CUDNN_SDPA_NATIVE_DIR can name another folder" in error


def test_without_a_home_there_is_no_folder(recipe, monkeypatch):
    for name, value in (("CUDNN_SDPA_NATIVE_DIR", ""), ("XDG_CACHE_HOME", ""), ("HOME", "/nowhere")):
        monkeypatch.setenv(name, value)
    with pytest.raises(CompileError, match="no home folder") as raised:
        build.compile_module(recipe())
    assert raised.value.is_expected


def test_without_a_setting_it_is_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDNN_SDPA_NATIVE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.folder_of_environment() == tmp_path / "cudnn_sdpa" / "native"
    monkeypatch.setenv("CUDNN_SDPA_NATIVE_DIR", "~/modules")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.folder_of_environment() == tmp_path / "modules"


@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_without_a_compiler_the_error_says_what_to_install(recipe, folder, monkeypatch, path):
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("CXX", "c++")
    with pytest.raises(CompileError, match="apt-get install g") as raised:
        build.compile_module(recipe())
    assert raised.value.is_expected
    assert listed(folder) == []


@pytest.mark.parametrize("module", ["torch", "sysconfig"])
def test_without_headers_the_error_names_them(recipe, monkeypatch, tmp_path, module):
    if module == "torch":
        monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    else:
        monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    missing = {"torch": "python_variable.h is missing", "sysconfig": r"Python.h is missing.*python3-dev"}
    with pytest.raises(CompileError, match=missing[module]) as raised:
        build.compile_module(recipe())
    assert raised.value.is_expected


def test_the_compiler_that_the_environment_names_comes_first(recipe, monkeypatch, tmp_path):
    default = build.find_compiler()
    named = tmp_path / "my compiler"
    named.symlink_to(default[0])
    monkeypatch.setenv("CXX", f"'{named}' -DANSWER=5")
    assert build.find_compiler() == [str(named), "-DANSWER=5"]
    assert loader.load(build.compile_module(recipe("ANSWER"))).answer == 5
    for useless in ("", "'", "no-such-compiler", " "):
        monkeypatch.setenv("CXX", useless)
        assert build.find_compiler() == default


def test_a_compile_error_is_one_line_and_leaves_nothing(recipe, folder):
    broken = recipe("no_such_name")
    with pytest.raises(CompileError) as raised:
        build.compile_module(broken)
    message = str(raised.value)
    assert "small.cpp:" in message
    assert "no_such_name" in message
    assert "\n" not in message
    assert not raised.value.is_expected
    assert listed(folder) == []


def test_a_missing_symbol_is_an_error_of_loading_and_does_not_end_a_later_call(recipe):
    source = """
#include <Python.h>
extern "C" void missing_function();
static PyObject* call(PyObject*, PyObject*) { missing_function(); return nullptr; }
static PyMethodDef methods[] = {{"call", call, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods};
PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&definition); }
"""
    path = build.compile_module(recipe(source=source))
    with pytest.raises(ImportError, match="missing_function"):
        loader.load(path)


def test_only_the_initialization_function_is_visible(recipe):
    source = (
        "int not_for_others() { return 1; }\n#include <Python.h>\nPyMODINIT_FUNC PyInit__native() { return nullptr; }"
    )
    path = build.compile_module(recipe(source=source))
    symbols = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["PyInit__native"]


def test_what_killed_processes_left_is_removed(recipe, folder):
    for name in ("compiling-long-ago", "compiling-now", "somebody-elses"):
        (folder / name).mkdir(parents=True)
        (folder / name / "half.o").write_bytes(b"half")
    for name in ("compiling-long-ago", "somebody-elses"):
        os.utime(folder / name, (1000, 1000))
    folder.chmod(0o700)
    path = build.compile_module(recipe())
    assert listed(folder) == sorted(["compiling-now", "somebody-elses", path.name])


COMPILE = """
import os
from pathlib import Path
from cudnn_sdpa.engine.native import build
print(build.compile_module(Path(os.environ["SOURCES"])).name, flush=True)
"""


def started(program: str, sources: Path) -> subprocess.Popen[str]:
    """A process of its own that does not have the sources' path in its command."""
    environment = {**os.environ, "SOURCES": str(sources)}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_may_compile_the_same_module_at_the_same_time(recipe, gate, folder, wait_until):
    sources = recipe()
    processes = [started(COMPILE, sources) for _ in range(2)]
    wait_until(lambda: len(list(folder.glob("compiling-*"))) == 2)
    gate.touch()
    names = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert loader.load(build.find(sources)).answer == 42
    assert listed(folder) == [*names]


@pytest.mark.slow
def test_a_program_killed_while_it_compiles_leaves_no_damage(held, folder, wait_until):
    process = started(COMPILE, held.sources)
    wait_until(held.is_compiling)
    process.kill()
    process.communicate()
    held.go_on()  # the compiler ends by itself
    wait_until(lambda: not held.processes(), 10)
    assert build.find(held.sources) is None
    following = started(COMPILE, held.sources)
    held.go_on()
    name = following.communicate(timeout=60)[0].strip()
    assert loader.load(folder / name).answer == 7


def test_a_killed_compiler_is_an_error(held, folder, wait_until):
    errors: list[CompileError] = []

    def work() -> None:
        try:
            build.compile_module(held.sources, in_background=True)
        except CompileError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(held.is_compiling)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if b"cc1" in path.read_bytes() and str(held.sources).encode() in path.read_bytes():
            process = int(path.parent.name)
            assert os.getpriority(os.PRIO_PROCESS, process) >= 10
            assert (path.parent / "oom_score_adj").read_text().strip() == "1000"
            os.kill(process, 9)
    thread.join(30)
    (error,) = errors
    assert not error.is_expected
    assert listed(folder) == []


def test_a_free_threaded_python_is_refused(monkeypatch):
    """Importing the module would enable the GIL of the whole process, or not even that."""
    of = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else of(name))
    with pytest.raises(CompileError, match="free-threaded Python") as raised:
        build.check()
    assert raised.value.is_expected
