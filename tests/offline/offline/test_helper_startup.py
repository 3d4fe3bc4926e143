"""How helper processes start: with Python's and the program's code only, and with exhausted resources."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import cudnn_sdpa
from cudnn_sdpa import OfflineError, OptionError
from cudnn_sdpa.attention.dense.explain import describe_sdpa
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline import interpreter, planner
from cudnn_sdpa.offline.planner import Helper
from cudnn_sdpa.offline.warmup import plan_all
from cudnn_sdpa.plans.manifest import PlanManifest

ROOT = Path(__file__).parents[3]
READY = {"ready": True}


def run_program(folder: Path, code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program as a file, so that `sys.path` has its folder and not the current one."""
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(code)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    command = [sys.executable, str(folder / "program.py")]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def planted(tmp_path):
    """A folder with a fake of every standard module, each of which reports that it was run."""
    folder = tmp_path / "planted"
    folder.mkdir()
    for name in sorted({*sys.stdlib_module_names, "cudnn_sdpa", "torch", "numpy", "cudnn"} - {"sys"}):
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'owned')!r}, 'a').write({name + ' '!r})\nraise SystemExit(3)\n"
        )
    return folder


EVERY_START = """
import json, sys, torch, cudnn_sdpa
from cudnn_sdpa.attention.dense.explain import describe_sdpa
from cudnn_sdpa.doctor import probe
from cudnn_sdpa.offline import planner
from cudnn_sdpa.offline.background import background
from cudnn_sdpa.offline.warmup import plan_all
from cudnn_sdpa.graph.target import Target, load_properties

properties = load_properties("h200")
q = torch.empty(1, 4, 128, 64, dtype=torch.bfloat16)
key = describe_sdpa(q, q, q).key(Target.from_properties(properties), None)
kept = []
started = {
    "planner": lambda: planner.plan_offline(key, properties).engine,
    "pool": lambda: [made.engine for _, made in plan_all([key], properties, workers=1)],
    "background": lambda: (background.request(key, properties, kept.append), background.wait(100), kept[0].engine)[2],
    "doctor": lambda: probe.probed(100)["frontend"],
}
for name, start in started.items():
    print(name, start(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("can_plan")
def test_no_process_runs_code_from_the_current_folder(planted, tmp_path):
    folder = tmp_path / "program"
    folder.mkdir()
    result = run_program(folder, EVERY_START, planted)
    owned = tmp_path / "owned"
    assert not owned.exists(), owned.read_text()
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["planner", "pool", "background", "doctor"]


def test_the_current_folder_on_the_search_path_is_not_handed_on(planted, tmp_path, monkeypatch):
    """An empty entry stands for it, in an interactive session and after `python -c`."""
    with monkeypatch.context() as patch:  # which must end before anything is imported here
        patch.chdir(planted)
        patch.setattr(sys, "path", ["", *sys.path])
        command = interpreter.command("import json, signal, sys\nprint('runs')")
    result = subprocess.run(command, cwd=planted, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "owned").exists(), (tmp_path / "owned").read_text()


def test_every_python_process_is_started_in_one_place():
    for path in (ROOT / "cudnn_sdpa").rglob("*.py"):
        uses = "sys.executable" in path.read_text()
        assert uses == (path.name == "interpreter.py"), path


OPERATION = """
import os
open({count!r}, "a").write("imported ")
import torch, cudnn_sdpa
from cudnn_sdpa.plans.manifest import PlanManifest
@cudnn_sdpa.graph_op(reference=lambda x, y: x + y)
def plus(g, x, y):
    return g.add(a=x, b=y)
x = torch.empty(8, 64, dtype=torch.bfloat16)
try:
    print(cudnn_sdpa.explain(plus, x, x).engine)
except cudnn_sdpa.OfflineError as error:
    open({count!r}, "a").write(str(error))
    raise
"""


@pytest.mark.slow
@pytest.mark.usefixtures("can_plan")
def test_a_module_that_plans_while_it_is_imported_starts_no_helpers_within_helpers(tmp_path):
    count, folder = tmp_path / "count", tmp_path / "program"
    folder.mkdir()
    (folder / "ops.py").write_text(OPERATION.format(count=str(count)))
    result = run_program(folder, "import ops", tmp_path, CUDNN_SDPA_HELPER_TIMEOUT="60")
    assert result.returncode != 0
    assert "OfflineError" in result.stderr
    assert count.read_text().count("imported ") == 2  # of the program and its helper
    assert "__name__ == '__main__'" in count.read_text()


@pytest.fixture
def keys(shapes, h200):
    return [describe_sdpa(*shapes(lengths=(n, n))).key(Target.from_properties(h200), None) for n in (64, 128)]


def starts(monkeypatch):
    """Records process starts from here on, and raises instead."""
    started = []

    def start(*command, **_):
        started.append(command)
        raise AssertionError("a process was started")

    monkeypatch.setattr(planner.subprocess, "Popen", start)
    return started


@pytest.mark.parametrize("how", ["PyInstaller", "Nuitka", "Nuitka's main", "no executable", "none", "in a helper"])
def test_without_an_interpreter_nothing_is_started(monkeypatch, how, keys, h200, tmp_path):
    started = starts(monkeypatch)
    if how == "PyInstaller":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    elif how == "Nuitka":
        monkeypatch.setattr(interpreter, "__compiled__", object(), raising=False)
    elif how == "Nuitka's main":
        monkeypatch.setattr(sys.modules["__main__"], "__compiled__", object(), raising=False)
    elif how == "in a helper":
        monkeypatch.setenv(interpreter.IN_HELPER, "1")
    else:
        monkeypatch.setattr(sys, "executable", "" if how == "no executable" else None)
    with pytest.raises(OfflineError, match="no helper process"):
        Helper().ask(READY)
    with pytest.raises(OfflineError, match="no helper process"):
        list(plan_all(keys, h200))
    with pytest.raises(OfflineError, match="no helper process"):
        cudnn_sdpa.compile_plans(PlanManifest.of(keys), "h200", tmp_path / "plans")
    assert [made for _, made in plan_all(keys, h200, 2, lambda key: key.name)] == [key.name for key in keys]
    assert started == []


def test_a_missing_interpreter_is_an_offline_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(OfflineError, match=r"cannot be started: .*No such file"):
        Helper().ask(READY)


SHORT_OF = """
import os, resource, signal, sys, tempfile
import cudnn_sdpa
from cudnn_sdpa.offline import driver
from cudnn_sdpa.offline.planner import Helper
driver.helper_environment()
helper = Helper()
{what}
try:
    print("answer", helper.ask({{"ready": True}}))
except cudnn_sdpa.OfflineError as error:
    print("OfflineError", error)
finally:
    helper.close()
"""


MANY_FILES = """
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
fds = [os.open('/dev/null', 0) for _ in range(1200)]
"""
TOO_MANY_FILES = "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 1, 4096))"
NOTHING_TO_WRITE_TO = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tempfile.tempdir = None
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("can_plan")
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (MANY_FILES, "answer"),
        (TOO_MANY_FILES, "OfflineError"),
        (NOTHING_TO_WRITE_TO, "answer"),
        (
            "sys.executable = '/bin/true'",
            "OfflineError the helper process that plans with cuDNN ended with exit code 0",
        ),
    ],
    ids=["many open files", "too many open files", "nothing to write to", "another program"],
)
def test_exhausted_resources(run_python, what, expected):
    result = run_python(SHORT_OF.format(what=what), fresh=True)
    assert result.stdout.startswith(expected), result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("can_plan")
@pytest.mark.parametrize(
    "noise",
    ["print('hello')", "print('no newline', end='', flush=True)", "print(5); print('{}'); print('[1]'); print('null')"],
)
def test_output_of_sitecustomize_is_ignored(tmp_path, noise):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import sys\n{noise}\nsys.stdout.flush()\n")
    path = os.pathsep.join(filter(None, [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    result = run_program(tmp_path / "program", SHORT_OF.format(what=""), tmp_path, PYTHONPATH=path)
    assert "answer {}" in result.stdout, result.stdout + result.stderr


@pytest.mark.usefixtures("can_plan")
def test_a_helper_that_has_ended_before_it_is_asked(monkeypatch):
    start = Helper._start

    def ended(helper):
        process = start(helper)
        process.wait()
        return process

    monkeypatch.setattr(Helper, "_start", ended)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(OfflineError, match="ended with exit code 0"):
        Helper().ask(READY)


def test_every_exit_status_has_a_reason():
    assert interpreter.exit_reason(3) == "ended with exit code 3"
    assert interpreter.exit_reason(-9) == "was killed by SIGKILL"
    for number in range(1, 65):
        assert interpreter.exit_reason(-number).startswith("was killed by ")


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "2"])
def test_an_invalid_number_of_workers_is_refused_at_once(keys, tmp_path, workers):
    with pytest.raises(OptionError, match="workers: got"):
        cudnn_sdpa.compile_plans(PlanManifest.of(keys), "h200", tmp_path / "plans", workers=workers)
    if workers != 0:
        with pytest.raises(OptionError, match="workers: got"):
            cudnn_sdpa.warmup(PlanManifest.of(keys), workers=workers)


def test_a_failed_plan_stops_no_other(keys, h200):
    def build(key):
        if key == keys[0]:
            raise TypeError("multiply() missing 1 required argument: 'with_scale'")
        return "built"

    made = dict(plan_all(keys, h200, 0, build))
    assert made[keys[1]] == "built"
    assert isinstance(made[keys[0]], cudnn_sdpa.PlanBuildError)
    assert "TypeError: multiply() missing" in str(made[keys[0]])

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(plan_all(keys, h200, 0, interrupt))


def test_a_folder_that_is_open_to_others_is_an_option_error(keys, tmp_path):
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans").chmod(0o777)
    with pytest.raises(OptionError, match=r"^folder: got .*chmod go-w"):
        cudnn_sdpa.compile_plans(PlanManifest.of(keys), "h200", tmp_path / "plans")


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 300.0), ("2.5", 2.5), ("0", 300.0), ("soon", 300.0), ("inf", 300.0)]
)
def test_the_environment_variable_sets_the_timeout(monkeypatch, caplog, text, seconds):
    monkeypatch.setenv("CUDNN_SDPA_HELPER_TIMEOUT", text)
    assert planner.timeout_seconds() == seconds
    assert bool(caplog.text) == (text not in {"", "2.5"})


@pytest.mark.usefixtures("can_plan")
def test_a_hanging_helper_times_out(monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_HELPER_TIMEOUT", "0.01")
    helper = Helper()
    with pytest.raises(OfflineError, match=r"0\.01 s have passed"):
        helper.ask(READY)
    assert helper._process is None


STARTS_A_HELPER = """
import subprocess, sys, time
from cudnn_sdpa.offline import interpreter, planner
program = planner._PROGRAM.format(niceness=0)
program = program.replace("from cudnn_sdpa.offline.worker import main", "import time; time.sleep(60)")
helper = subprocess.Popen(interpreter.command(program), stdin=subprocess.PIPE)
print(helper.pid, flush=True)
time.sleep(60)
"""


def test_a_helper_of_a_killed_program_ends_while_it_starts():
    """It need not get as far as to read its input, after seconds of importing PyTorch."""
    program = subprocess.Popen([sys.executable, "-c", STARTS_A_HELPER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert program.stdout is not None
    with program, program.stdout:
        helper = int(program.stdout.readline())
        time.sleep(0.5)
        program.kill()
    end = time.monotonic() + 20
    while Path(f"/proc/{helper}").exists() and _state(helper) != "Z":
        assert time.monotonic() < end, "the helper still runs"
        time.sleep(0.05)


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def test_a_request_within_a_request_of_its_thread_raises():
    """As by a signal handler that explains a call while another one is explained."""
    helper, found = Helper(), []

    def asking(request, _timeout):
        with pytest.raises(OfflineError, match="this thread waits for its answer already"):
            helper.ask(READY)
        found.append(request)
        return {}

    helper._ask = asking
    thread = threading.Thread(target=helper.ask, args=(READY,), daemon=True)
    thread.start()
    thread.join(20)
    assert found == [READY]
