"""Compiling the native module into a folder: what is compiled again, what is refused, and what is left behind."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from cudnn_sdpa.engine.native import build, compiler, loader
from cudnn_sdpa.engine.native.build import BadModuleError, ModuleFile, ModuleSources
from cudnn_sdpa.engine.native.compiler import CompileError
from cudnn_sdpa.errors import OptionError

STRANGER = 54321
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="root alone can give files away")


def listed(folder: Path) -> list[str]:
    """What is in a folder, besides the folder of locks, which must be empty."""
    assert list((folder / "locks").iterdir()) == []
    return sorted(path.name for path in folder.iterdir() if path.name != "locks")


def test_a_module_is_compiled_once_and_then_found_without_a_compiler(recipe, folder, monkeypatch):
    small = recipe()
    assert build.find(small) is None
    assert not folder.exists()  # looking makes nothing
    built = build.build(small)
    assert built.seconds > 0
    assert loader.load(built.path).answer == 42
    assert built.path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert listed(folder) == [built.path.name]
    monkeypatch.setenv("PATH", "")
    for again in (build.build(small), build.find(small)):
        assert (again.path, again.compiler, again.seconds) == (built.path, built.compiler, None)


@pytest.mark.slow
def test_changed_sources_are_another_module(recipe, folder):
    first = build.build(recipe(1))
    second = build.build(recipe(2))
    third = recipe(2, unused="// a header")
    assert build.find(third) is None
    assert len({first.path, second.path, folder / build.name_of(third.identity())}) == 3
    assert [loader.load(built.path).answer for built in (first, second)] == [1, 2]


@pytest.mark.parametrize(
    "name",
    [
        *("torch.__version__", "torch.version.git_version", "torch.version.cuda"),
        *("sys.implementation.cache_tag", "platform.python_version", "sysconfig.get_platform", "os.confstr"),
    ],
)
def test_another_pytorch_python_or_system_is_another_module(recipe, monkeypatch, name):
    before = build.name_of(recipe().identity())
    value = (lambda *_: "another") if name.split(".")[0] in {"platform", "sysconfig", "os"} else "another"
    monkeypatch.setattr(name, value)
    assert build.name_of(recipe().identity()) != before


def test_the_compiler_is_not_part_of_the_name(recipe, monkeypatch):
    before = build.name_of(recipe().identity())
    monkeypatch.setenv("CXX", "g++ -O3")
    assert build.name_of(recipe().identity()) == before


def test_the_files_end_is_checked_before_anything_is_read():
    contents = ModuleFile({"a": 1}, ["c++"], b"library").encode()
    assert contents.startswith(b"library")
    assert ModuleFile.decode(contents) == ModuleFile({"a": 1}, ["c++"], b"library")
    for place in range(len(contents)):
        for damaged in (contents[:place], contents[:place] + bytes([contents[place] ^ 1]) + contents[place + 1 :]):
            with pytest.raises(BadModuleError, match=r"incomplete|digest"):
                ModuleFile.decode(damaged)
    with pytest.raises(BadModuleError, match="incomplete"):
        ModuleFile.decode(contents + b"\0")


def as_empty(path: Path) -> str:
    path.write_bytes(b"")
    return "incomplete"


def as_truncated(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-1000])
    return "incomplete"


def as_changed(path: Path) -> str:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)
    return "digest"


def as_of_another_pytorch(path: Path) -> str:
    module = ModuleFile.decode(path.read_bytes())
    path.write_bytes(ModuleFile({**module.identity, "torch": ["1.0"]}, module.compiler, module.library).encode())
    return "another PyTorch"


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


WAYS = [as_empty, as_truncated, as_changed, as_of_another_pytorch, as_open, as_link, as_pipe]


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", [*WAYS, pytest.param(as_foreign, marks=NEEDS_ROOT)])
def test_a_file_that_cannot_be_trusted_is_refused_with_a_line_and_compiled_again(recipe, caplog, damage):
    small = recipe()
    path = build.build(small).path
    reason = damage(path)
    caplog.set_level(logging.INFO)
    assert build.find(small) is None
    assert not caplog.records
    again = build.build(small)
    assert again.seconds is not None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"ignoring the native module {path}: " in record.getMessage()
    assert reason in record.getMessage()
    assert loader.load(again.path).answer == 42
    assert path.is_file()
    assert path.stat().st_uid == os.getuid()


def test_a_folder_in_the_files_place_is_an_error(recipe, folder):
    small = recipe()
    (folder / build.name_of(small.identity())).mkdir(parents=True)
    folder.chmod(0o700)
    with pytest.raises(CompileError, match="CUDNN_SDPA_NATIVE_DIR"):
        build.build(small)
    assert not [path for path in folder.iterdir() if path.name.startswith((".", "compiling"))]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(recipe, folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    for use in (build.build, build.find):
        with pytest.raises(CompileError, match=f"chmod go-w {folder}") as raised:
            use(recipe())
        assert not raised.value.is_expected
    assert list(folder.iterdir()) == []


@NEEDS_ROOT
def test_a_folder_of_another_user_is_refused(recipe, folder):
    small = recipe()
    build.build(small)
    os.chown(folder, STRANGER, STRANGER)
    for use in (build.build, build.find):
        with pytest.raises(CompileError, match="belongs to another user"):
            use(small)


def test_a_file_in_the_folders_place_is_an_error(recipe, folder):
    folder.write_text("")
    with pytest.raises(CompileError, match="not a folder"):
        build.build(recipe())


def test_a_folder_that_is_not_writable_serves_what_it_has(recipe, folder, run_python):
    """As in a container image, whose folder root has filled; the program runs as another user."""
    if os.getuid() != 0:
        pytest.skip("root alone can become another user")
    small = recipe()
    folder.mkdir(mode=0o755)
    built = build.build(small)
    assert built.path.stat().st_mode & 0o777 == 0o644
    program = """
import os, sys
from pathlib import Path
from cudnn_sdpa.engine.native import build, loader
for folder in Path(sys.argv[1]).parents:
    if str(folder).startswith("/tmp/"):
        folder.chmod(0o755)
small = build.ModuleSources(Path(sys.argv[1]))
os.setgid(54321); os.setuid(54321)
print(loader.load(build.build(small).path).answer)
try:
    build.build(small, again=True)
except build.CompileError as error:
    print(error)
"""
    result = run_python(program, str(small.sources))
    answer, error = result.stdout.splitlines()
    assert answer == "42"
    assert "Permission denied" in error
    assert "CUDNN_SDPA_NATIVE_DIR can name another folder" in error


def test_without_a_home_there_is_no_folder(recipe, monkeypatch):
    for name, value in (("CUDNN_SDPA_NATIVE_DIR", ""), ("XDG_CACHE_HOME", ""), ("HOME", "/nowhere")):
        monkeypatch.setenv(name, value)
    with pytest.raises(CompileError, match="no home folder") as raised:
        build.build(recipe())
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
        build.build(recipe())
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
        build.build(recipe())
    assert raised.value.is_expected


def test_the_compiler_that_the_environment_names_comes_first(recipe, monkeypatch, tmp_path):
    default = compiler.find_compiler()
    named = tmp_path / "my compiler"
    named.symlink_to(default[0])
    monkeypatch.setenv("CXX", f"'{named}' -DANSWER=5")
    assert compiler.find_compiler() == [str(named), "-DANSWER=5"]
    built = build.build(recipe("ANSWER"))
    assert built.compiler == [str(named), "-DANSWER=5"]
    assert loader.load(built.path).answer == 5
    for useless in ("", "'", "no-such-compiler", " "):
        monkeypatch.setenv("CXX", useless)
        assert compiler.find_compiler() == default


def test_a_compile_error_is_one_line_and_leaves_nothing_but_a_note(recipe, folder):
    broken = recipe("no_such_name")
    with pytest.raises(CompileError) as raised:
        build.build(broken)
    message = str(raised.value)
    assert "small.cpp:" in message
    assert "no_such_name" in message
    assert "\n" not in message
    assert (raised.value.is_expected, raised.value.is_final) == (False, True)
    (note,) = listed(folder)
    assert note.endswith(".refused")


@pytest.mark.slow
def test_what_a_compiler_refuses_is_not_tried_again_in_the_background(recipe, folder, monkeypatch):
    broken = recipe("UNKNOWN")
    with pytest.raises(CompileError, match=r"UNKNOWN' was not declared|undeclared identifier"):
        build.build(broken, in_background=True)
    with pytest.raises(CompileError, match=r"another process has tried it"):
        build.build(broken, in_background=True)
    with pytest.raises(CompileError) as raised:
        build.build(broken)
    assert "another process" not in str(raised.value)
    (note,) = folder.glob("*.refused")
    noted = json.loads(note.read_text())
    note.write_text(json.dumps({**noted, "time": time.time() - 3601.0}))
    with pytest.raises(CompileError) as raised:
        build.build(broken, in_background=True)
    assert "another process" not in str(raised.value)
    note.write_text("[")
    with pytest.raises(CompileError) as raised:
        build.build(broken, in_background=True)
    assert "another process" not in str(raised.value)
    monkeypatch.setenv("CXX", "c++ -DUNKNOWN=3")  # another compiler may accept it
    assert loader.load(build.build(broken, in_background=True).path).answer == 3


def test_a_missing_symbol_is_an_error_of_loading_and_does_not_end_a_later_call(recipe):
    source = """
#include <Python.h>
extern "C" void missing_function();
static PyObject* call(PyObject*, PyObject*) { missing_function(); return nullptr; }
static PyMethodDef methods[] = {{"call", call, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods};
PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&definition); }
"""
    built = build.build(recipe(source=source))
    with pytest.raises(ImportError, match="missing_function"):
        loader.load(built.path)


def test_only_the_initialization_function_is_visible(recipe):
    source = (
        "int not_for_others() { return 1; }\n#include <Python.h>\nPyMODINIT_FUNC PyInit__native() { return nullptr; }"
    )
    path = build.build(recipe(source=source)).path
    symbols = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["PyInit__native"]


@pytest.mark.slow
def test_the_folder_does_not_grow_without_end(recipe, folder):
    built = build.build(recipe())
    for number in range(30):
        for other in (folder / f"torch-1.{number}-cpython-39-{number:032x}.so", folder / f"lib{number}.so"):
            other.write_bytes(b"")
            os.utime(other, (1000 + number, 1000 + number))
    (folder / "compiling-something").mkdir()
    os.utime(folder / "compiling-something", (1000, 1000))
    last = build.build(recipe(2))
    names = listed(folder)
    assert {built.path.name, last.path.name} < set(names)
    assert len([name for name in names if name.startswith("torch-")]) == 16
    assert f"torch-1.29-cpython-39-{29:032x}.so" in names
    assert len([name for name in names if name.startswith("lib")]) == 30  # of somebody else


COMPILE = """
import os
from pathlib import Path
from cudnn_sdpa.engine.native import build
print(build.build(build.ModuleSources(Path(os.environ["SOURCES"]))).seconds is not None, flush=True)
"""


def started(program: str, recipe: ModuleSources) -> subprocess.Popen[str]:
    """A process of its own that does not have the sources' path in its command."""
    environment = {**os.environ, "SOURCES": str(recipe.sources)}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_that_need_the_same_module_compile_it_once(held, folder, wait_until):
    processes = [started(COMPILE, held.recipe) for _ in range(2)]
    wait_until(held.is_compiling)
    wait_until(lambda: len(list((folder / "locks").iterdir())) == 1)
    held.go_on()  # a second compiler would wait for ever
    answers = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert sorted(answers) == ["False", "True"]
    assert loader.load(build.find(held.recipe).path).answer == 7
    assert len(listed(folder)) == 1


@pytest.mark.slow
def test_a_killed_program_takes_its_compiler_along_and_the_next_one_cleans_up(held, folder, wait_until):
    process = started(COMPILE, held.recipe)
    wait_until(held.is_compiling)
    process.kill()
    process.communicate()
    wait_until(lambda: not held.processes(), 10)
    assert len(list(folder.glob("compiling-*"))) == 1
    following = started(COMPILE, held.recipe)
    held.go_on()
    assert following.communicate(timeout=60)[0].strip() == "True"
    assert len(listed(folder)) == 1


def test_a_killed_compiler_is_an_error_that_is_tried_again(held, folder, wait_until):
    errors: list[CompileError] = []

    def work() -> None:
        try:
            build.build(held.recipe, in_background=True)
        except CompileError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(held.is_compiling)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if b"cc1" in path.read_bytes() and str(held.recipe.sources).encode() in path.read_bytes():
            process = int(path.parent.name)
            assert os.getpriority(os.PRIO_PROCESS, process) >= 10
            assert (path.parent / "oom_score_adj").read_text().strip() == "1000"
            os.kill(process, 9)
    thread.join(30)
    (error,) = errors
    assert not error.is_final
    assert listed(folder) == []


@pytest.mark.parametrize("value", ["thread", "Address", "address undefined"])
def test_unknown_sanitizers_are_refused(monkeypatch, value):
    monkeypatch.setenv("CUDNN_SDPA_NATIVE_SANITIZE", value)
    with pytest.raises(OptionError, match="CUDNN_SDPA_NATIVE_SANITIZE: got"):
        ModuleSources()
