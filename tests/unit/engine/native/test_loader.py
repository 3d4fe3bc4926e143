"""Loading the native module: modes, the thread that compiles, callbacks, forks, and the interpreter's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from cudnn_sdpa.engine.native import build

#: The head of a program: the module has the sources of the test.
HEAD = """
import functools, logging, os, sys, threading, time, warnings
warnings.filterwarnings("ignore", message=".*fork")  # Python 3.12 and later warn of threads
from pathlib import Path
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
from cudnn_sdpa.engine.native import build, loader
SOURCES = Path(os.environ["SOURCES"])
build.find = functools.partial(build.find, SOURCES)
build.compile_module = functools.partial(build.compile_module, SOURCES)
loader._callbacks.clear()  # the library's own, which ask for more than an answer

def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

def go_on():
    writing = threading.Thread(target=(SOURCES / "answer.inc").write_text, args=("7",), daemon=True)
    writing.start()
    writing.join(30)  # it waits for the compiler to read it
    assert not writing.is_alive()
"""


@pytest.fixture
def run(run_python):
    """Runs a program with HEAD, and returns the lines that it prints."""

    def lines(program, recipe, mode=None, **environment):
        result = run_python(HEAD + program, SOURCES=str(recipe), CUDNN_SDPA_NATIVE=mode, **environment)
        assert result.stderr == ""
        return result.stdout.splitlines()

    return lines


def test_auto_does_not_wait_and_loads_when_it_is_compiled(run, held):
    program = """
answers = []
loader.when_loaded(lambda module: answers.append((module.answer, threading.current_thread().name)))
assert loader.status() == "Python: no plan of this process has been launched"
starting = [threading.Thread(target=loader.start) for _ in range(8)]
for thread in starting: thread.start()
for thread in starting: thread.join()
assert loader.module() is None and loader.status() == "Python: the native module is being compiled" and answers == []
assert "C++, when " in loader.forecast()
assert [each.name for each in threading.enumerate()] == ["MainThread", "cudnn_sdpa native"]
go_on()
loader.wait()
assert loader.module().answer == 7 and sys.modules[loader.NAME] is loader.module()
assert answers == [(7, "cudnn_sdpa native")]
loader.when_loaded(lambda module: answers.append(module.answer + 1))
assert answers[1:] == [8]
loader.start()
assert loader.status().startswith("C++: compiled in "), loader.status()
assert os.environ["CUDNN_SDPA_NATIVE_DIR"] in loader.status()
assert loader.forecast().startswith("C++: compiled before (")
"""
    (line,) = run(program, held.sources)
    assert line.startswith("INFO calls go through C++: the native module is compiled in ")


def test_a_compiled_module_is_loaded_at_once_and_without_a_compiler(run, recipe):
    path = build.compile_module(recipe())
    program = """
answers = []
loader.when_loaded(lambda module: answers.append(module.answer))
loader.start()
assert loader.module().answer == 42 and answers == [42]
assert threading.active_count() == 1
print(loader.status())
"""
    assert run(program, recipe(), PATH="")[1:] == [f"C++: compiled before ({path})"]


def test_off_does_nothing(run, recipe, folder):
    program = "loader.start(); print(loader.module(), loader.status(), loader.forecast())"
    expected = ["None Python: CUDNN_SDPA_NATIVE=off Python: CUDNN_SDPA_NATIVE=off"]
    assert run(program, recipe(), " OFF") == expected
    assert not folder.exists()


def test_on_waits(run, recipe):
    program = "loader.start(); print(loader.module().answer); loader.start(); print(loader.status()[:3])"
    assert run(program, recipe(), "on")[1:] == ["42", "C++"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize(
    ("answer", "environment", "said"),
    [
        (1, {"PATH": ""}, "INFO calls go through Python, not C++: there is no C++ compiler: "),
        ("unknown_name", {}, "WARNING calls go through Python, not C++: /usr/bin/c++ ended with exit code 1: "),
        (
            1,
            {"CUDNN_SDPA_NATIVE_DIR": "/proc/none"},
            "INFO calls go through Python, not C++: /proc/none cannot be used",
        ),
    ],
)
def test_a_failure_is_one_line_of_the_log_and_with_on_an_error(run, recipe, mode, answer, environment, said):
    program = """
from cudnn_sdpa.errors import LibraryError
loader.when_loaded(print)
for _ in range(2):
    try:
        loader.start()
    except LibraryError as error:
        print(error)
    loader.wait()
assert loader.module() is None
print(loader.status())
"""
    logged, *errors, status = run(program, recipe(answer), mode, **environment)
    assert logged.startswith(said.replace("/usr/bin/c++", build.find_compiler()[0]))
    assert logged.endswith("; CUDNN_SDPA_NATIVE=off silences this")
    assert len(errors) == (2 if mode == "on" else 0)
    assert all(error.startswith("CUDNN_SDPA_NATIVE=on, and the native module cannot be used: ") for error in errors)
    assert status.startswith("Python: ")
    assert status.removeprefix("Python: ") in logged


def test_a_module_that_cannot_be_loaded_is_a_line_of_the_log(run, recipe):
    """Another C library or C++ library than that of the process, as with compilers that are newer than Python's."""
    source = "#include <Python.h>\nPyMODINIT_FUNC PyInit__native() { throw_away(); return nullptr; }"
    source = source.replace("PyMODINIT", 'extern "C" void throw_away();\nPyMODINIT')
    program = "loader.start(); loader.wait(); print(loader.status())"
    line, status = run(program, recipe(source=source))
    assert line.startswith("WARNING calls go through Python, not C++: ")
    assert "undefined symbol: throw_away" in line
    assert status.startswith("Python: ")


@pytest.mark.slow
def test_a_callback_that_fails_does_not_stop_the_others(run, recipe):
    build.compile_module(recipe())
    program = """
def fails(module):
    raise ValueError("for the test")
for callback in (fails, lambda module: print("called", module.answer), fails):
    loader.when_loaded(callback)
loader.start()
"""
    _, *lines = run(program, recipe())
    warning = "WARNING the native module is loaded, but cannot be used: ValueError: for the test"
    assert lines == [warning, "called 42", warning]


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", ["yes", "1", "cpp"])
def test_an_unknown_mode_is_an_error_that_names_the_others(run, recipe, folder, value):
    program = """
from cudnn_sdpa import OptionError
for use in (loader.start, loader.status):
    try:
        use()
    except OptionError as error:
        print(error)
print(loader.forecast())
"""
    message = f"CUDNN_SDPA_NATIVE: got {value!r}; expected one of off, auto, on."
    assert run(program, recipe(), value) == [message, message, f"none: {message}"]
    assert not folder.exists()


#: Ways in which a program ends while its compiler waits, and its exit status.
ENDS = {
    "sys.exit(3)": 3,
    "threading.Thread(target=time.sleep, args=(0.1,)).start()": 0,
    "os._exit(5)": 5,
    "os.kill(os.getpid(), 9)": -9,
    "os.abort()": -6,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("end", ENDS)
def test_a_program_may_end_while_its_compiler_runs(run_python, held, folder, wait_until, end):
    program = (
        f"{HEAD}\nloader.start()\nwhile not list(Path(os.environ['CUDNN_SDPA_NATIVE_DIR']).glob('compiling-*')): pass\n"
    )
    program += f"time.sleep(0.3)\nprint(time.monotonic(), flush=True)\n{end}"
    result = run_python(program, SOURCES=str(held.sources), CUDNN_SDPA_NATIVE=None, check=False)
    assert time.monotonic() - float(result.stdout.split()[-1]) < 5
    assert (result.returncode, result.stderr) == (ENDS[end], "")
    if ENDS[end] in (0, 3):
        wait_until(lambda: not held.processes(), 10)
        assert list(folder.iterdir()) == []
    else:
        held.go_on()  # the compiler ends by itself
        wait_until(lambda: not held.processes(), 10)
        assert build.find(held.sources) is None


@pytest.mark.slow
def test_an_interrupt_of_the_terminal_does_not_reach_the_compiler(held, wait_until):
    program = (
        HEAD
        + """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it, and so do their children
loader.start()
try:
    print("waiting", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
go_on()
loader.wait()
print(loader.module().answer)
"""
    )
    environment = {**os.environ, "SOURCES": str(held.sources), "CUDNN_SDPA_NATIVE": "auto"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    wait_until(held.is_compiling)
    os.killpg(process.pid, signal.SIGINT)
    lines = process.communicate(timeout=60)[0].splitlines()
    assert (lines[0], lines[-1]) == ("interrupted", "7")


@pytest.mark.slow
def test_a_forked_child_is_independent_of_the_thread_that_compiles(run, recipe, gate):
    program = """
loader.when_loaded(lambda module: print(os.getpid() == parent, module.answer, flush=True))
parent = os.getpid()
loader.start()
wait_until(lambda: build._running)
child = os.fork()
if child == 0:
    assert loader.module() is None and "no plan" in loader.status() and not build._running
    loader.start()  # compiles it, too
    loader.wait()
    print(loader.status()[:13], flush=True)
    sys.exit(0)
wait_until(lambda: len(list(Path(os.environ["CUDNN_SDPA_NATIVE_DIR"]).glob("compiling-*"))) == 2)
Path(os.environ["GATE"]).touch()
assert os.waitpid(child, 0)[1] == 0
loader.wait()
second = os.fork()
if second == 0:
    assert loader.module().answer == 42
    loader.start()
    sys.exit(0)
assert os.waitpid(second, 0)[1] == 0
"""
    lines = [line for line in run(program, recipe(), GATE=str(gate)) if not line.startswith("INFO")]
    assert sorted(lines) == ["C++: compiled", "False 42", "True 42"]


@pytest.mark.slow
def test_a_forked_child_that_ends_leaves_the_compiler_alone(run, held):
    program = """
loader.start()
while not list(Path(os.environ["CUDNN_SDPA_NATIVE_DIR"]).glob("compiling-*")): pass
time.sleep(0.3)
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
go_on()
loader.wait()
print(loader.module().answer)
"""
    lines = [line for line in run(program, held.sources) if not line.startswith("INFO")]  # whose thread may be later
    assert lines == ["7"]


@pytest.mark.slow
def test_nothing_stays_open(run, recipe):
    program = """
before = set(os.listdir("/proc/self/fd"))
loader.start()
loader.wait()
assert threading.active_count() == 1
print(len(set(os.listdir("/proc/self/fd")) - before))
"""
    assert run(program, recipe())[-1] == "0"
