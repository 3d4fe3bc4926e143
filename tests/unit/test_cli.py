"""The command line: help without PyTorch, one-line errors, and the output of commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import cudnn_sdpa
from cudnn_sdpa.attention.dense.explain import describe_sdpa
from cudnn_sdpa.cli import app
from cudnn_sdpa.errors import DeviceError, LibraryError, OfflineError, OptionError, UnsupportedError
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.plans.manifest import PlanManifest
from cudnn_sdpa.plans.store import PlanStore, StoredPlan

ROOT = Path(__file__).parents[2]


def leaves(command, path=()):
    yield list(path)
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, (*path, name))


COMMANDS = list(leaves(typer.main.get_command(app)))


def test_all_commands_are_listed():
    assert " ".join(" ".join(command) for command in COMMANDS if len(command) < 2).split() == [
        *("version", "support", "explain", "device", "doctor", "warmup", "compile", "build-native", "plans")
    ]


def test_every_command_is_on_the_page():
    page = (ROOT / "docs" / "cli.md").read_text()
    for command in COMMANDS:
        if command and command != ["plans"]:
            assert f"`{' '.join(command)}`" in page


@pytest.fixture
def without_torch(tmp_path):
    """The environment of a process in which PyTorch cannot be imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('PyTorch was imported')")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}


def run(*command, env=None):
    return subprocess.run(
        [sys.executable, *map(str, command)], env=env, capture_output=True, text=True, check=False, timeout=120
    )


def test_help_of_every_command_does_not_import_pytorch(without_torch, tmp_path):
    script = tmp_path / "cudnn-sdpa"
    script.write_text(
        "import json, sys\n"
        "from typer.testing import CliRunner\n"
        "from cudnn_sdpa.cli import app\n"
        "results = [CliRunner().invoke(app, [*names, '--help']) for names in json.loads(sys.argv[1])]\n"
        "print(json.dumps([[each.exit_code, each.output] for each in results]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = run(script, json.dumps(COMMANDS), env=without_torch)
    assert result.returncode == 0, result.stderr
    answers = json.loads(result.stdout)
    assert len(answers) == len(COMMANDS) > 10
    for status, output in answers:
        assert status == 0
        assert "Usage: " in output


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--version"], cudnn_sdpa.__version__),
        (["version"], cudnn_sdpa.__version__),
        (["--help"], "Usage: python -m cudnn_sdpa"),
        ([], "Usage: python -m cudnn_sdpa"),
        (["plans"], "Usage: python -m cudnn_sdpa plans"),
        (["support", "--help"], "--target"),
    ],
)
def test_the_module_answers_without_pytorch(without_torch, arguments, printed):
    result = run("-m", "cudnn_sdpa", *arguments, env=without_torch)
    assert result.returncode == 0, result.stderr
    assert printed in result.stdout
    assert result.stderr == ""


@pytest.mark.slow
def test_other_code_in_a_commands_process_gets_the_whole_package(tmp_path):
    """For example `sitecustomize`, which runs before the command is known, and PyTorch plug-ins."""
    (tmp_path / "sitecustomize.py").write_text(
        "import cudnn_sdpa, sys\n"
        "assert 'torch' not in sys.modules and not hasattr(cudnn_sdpa, 'nonsense')\n"
        "from cudnn_sdpa import OptionError, cpu_checks\n"
        "cudnn_sdpa.cpu_checks(None)\n"
        "assert all(hasattr(cudnn_sdpa, name) for name in cudnn_sdpa.__all__)\n"
        "try:\n    cpu_checks('no such GPU')\nexcept OptionError:\n    print('found')\n"
    )
    result = run("-m", "cudnn_sdpa", "--version", env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert (result.stdout, result.stderr) == (f"found\n{cudnn_sdpa.__version__}\n", "")


@pytest.mark.parametrize("arguments", [["doctor"], ["support", "--sm", "90"], ["device"]])
def test_a_command_that_needs_pytorch_reports_a_failed_import_in_one_line(tmp_path, arguments):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('out of luck.')")
    result = run("-m", "cudnn_sdpa", *arguments, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("cudnn_sdpa needs PyTorch, and `import torch` fails: out of luck. Reinstall")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "code",
    [
        "import cudnn_sdpa; cudnn_sdpa.sdpa",
        "import sys; sys.argv = ['cudnn-sdpa-server']; import cudnn_sdpa; cudnn_sdpa.sdpa",
        "import sys; sys.argv = []; import cudnn_sdpa; cudnn_sdpa.sdpa",
        "import sys; sys.argv = ['-m', 'other']; import cudnn_sdpa; cudnn_sdpa.sdpa",
    ],
)
def test_programs_that_import_the_package_get_the_whole_package(run_python, code):
    result = run_python(code + "; import torch; torch.ops.cudnn_sdpa.sdpa_forward")
    assert result.returncode == 0


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def places(tmp_path):
    """Named files and folders, most of which are invalid for some argument."""
    PlanManifest().save(tmp_path / "empty.json")
    (tmp_path / "text").write_text("neither JSON nor a folder")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)  # other users may have written files there
    q = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16)
    key = describe_sdpa(q, q, q).key(Target.from_properties(load_properties("h200")), None)
    PlanManifest.of([key]).save(tmp_path / "plans.json")
    return tmp_path


USAGE = [
    "support --sm nine",
    "support --sm 5",
    "support --sm 9000",
    "support --cudnn new",
    "support --target h9000",
    "support --target h200 --sm 75",
    "support --target h200 --cudnn 9.10.2",
    "support --target {text}",
    "support --target {list.json}",
    "support --target {binary}",
    "support --target {open}",
    "support --target h200 --json {text}/x.json",
    "support --sm 90 --json {open}",
    "support --sm 90 --json /proc/no/x.json",
    "support h200",
    "compile {plans.json}",
    "compile {plans.json} --target h200",
    "compile {nothing} --target h200 -o {new}",
    "compile {text} --target h200 -o {new}",
    "compile {list.json} --target h200 -o {new}",
    "compile {binary} --target h200 -o {new}",
    "compile {open} --target h200 -o {new}",
    "compile {empty.json} --target h200 -o {new}",
    "compile {plans.json} --target h9000 -o {new}",
    "compile {plans.json} --target {text} -o {new}",
    "compile {plans.json} --target h200 -o {text}",
    "compile {plans.json} --target h200 -o {text}/x",
    "compile {plans.json} --target h200 -o {open}",
    "compile {plans.json} --target h200 -o {new} --workers 0",
    "compile {plans.json} --target h200 -o {new} --workers many",
    "warmup",
    "warmup {nothing} --workers 0",
    "device --yaml",
    "doctor --yaml",
    "build-native --yaml",
    "explain",
    "explain sdpa",
    "explain nothing q=2",
    "explain sdpa q",
    "explain sdpa q=1,8,64,64",
    "explain sdpa q=1,8,64,64 k=1,8,64,64 v=1,8,64,64 causal=true",
    "explain sdpa q=1,8,64,64 k=1,8,64,64 v=1,8,64,x",
    "explain sdpa q=1,8,64,64 k=1,8,64,64 v=1,8,64,-64",
    "explain sdpa q=1,8,64,64 k=1,8,64,64 v=99999999999,99999999,64,64",
    "explain sdpa q=99999999999,1000,1,64 k=1,8,64,64 v=1,8,64,64",
    "explain sdpa q=1,8,64,64 k=1,8,64,64 v=1,8,64,64:int5",
    "explain sdpa q=1,8,64,64 k=1,8,64,64 v=1,8,64,64 --dtype tensor",
    "explain sdpa q=1,8,64,64 k=1,8,64,64 v=1,8,64,64 --target h9000",
    "explain sdpa q=1,8,64,64 k=1,8,64,64 v=1,8,64,64 window_size=wide",
    "explain sdpa q=1,8,64,64 k=1,8,64,64 v=1,8,64,64 scale=big",
    "explain sdpa q=1,8,64,64 k=1,3,64,64 v=1,3,64,64",
    "plans nothing",
    "plans size --folder {nothing}",
    "plans size --folder {text}",
    "plans clear --folder {nothing}",
    "plans clear --folder {text}",
    "plans clear --folder {open}",
    "nothing",
]


@pytest.mark.sample(40)
@pytest.mark.parametrize("line", USAGE)
def test_wrong_arguments_of_every_command_exit_with_2_and_a_message(places, line, monkeypatch):
    planned = []
    monkeypatch.setattr("cudnn_sdpa.planning.support.plan_offline", lambda *_: planned.append(1))
    monkeypatch.setattr("cudnn_sdpa.offline.warmup.plan_all", lambda *_: planned.append(1))
    words = line.split()
    result = invoke(*(word.replace("{", f"{places}/").replace("}", "") for word in words))
    assert result.exit_code == 2
    assert result.stderr.strip()
    assert not planned
    if "Usage: " not in result.stderr:  # they come from the parser
        assert len(result.stderr.splitlines()) == 1
        assert ": got " in result.stderr or "needs an NVIDIA GPU" in result.stderr
        assert "Errno" not in result.stderr


def test_every_command_has_a_wrong_argument_case():
    assert {line.split()[0] for line in USAGE} >= {command[0] for command in COMMANDS if command} - {"version"}


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (OptionError("workers", "0", "at least 1"), 2, "--workers: got 0; expected at least 1."),
        (DeviceError("device", "none", "a GPU"), 1, "device: got none; expected a GPU."),
        (UnsupportedError("it", ["for the test"]), 1, "it is not supported here:\n  - for the test"),
        (OfflineError("no compiler"), 1, "no compiler"),
        (LibraryError("no cuDNN"), 1, "no cuDNN"),
        (PermissionError(13, "Permission denied", "/some/file"), 1, "/some/file: Permission denied"),
        (ImportError("No module named 'transformers'"), 1, "No module named 'transformers'"),
    ],
)
def test_errors_of_the_library_end_a_command_without_a_traceback(monkeypatch, error, status, said):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("cudnn_sdpa.planning.support.cells", fail)
    result = invoke("support", "--sm", "90")
    assert (result.exit_code, result.stdout, result.stderr) == (status, "", said + "\n")


def test_internal_errors_are_not_hidden(monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("cudnn_sdpa.planning.support.cells", fail)
    assert isinstance(CliRunner().invoke(app, ["support"]).exception, ZeroDivisionError)


def test_errors_use_the_names_of_the_command_line(places):
    target = invoke("compile", places / "plans.json", "--target", "h9000", "-o", places / "new")
    assert target.stderr.startswith("--target: got 'h9000' (No such file or directory); expected one of 'a100', ")
    manifest = invoke("compile", places / "nothing", "--target", "h200", "-o", places / "new")
    assert manifest.stderr.startswith("MANIFEST: got ")
    empty = invoke("compile", places / "empty.json", "--target", "h200", "-o", places / "new")
    assert 'record_plans(target="h200")' in empty.stderr
    assert not (places / "new").exists()
    unused = invoke("support", "--target", "h200", "--sm", "75")
    assert unused.stderr.startswith("--sm: got 75 in addition to target; expected one of the two.")


def test_support_writes_its_table(tmp_path):
    path = tmp_path / "support.json"
    result = invoke("support", "--sm", "80", "--cudnn", "9.28.0", "--json", path)
    assert result.exit_code == 0
    assert f"written to {path}" in result.output.replace("\n", "")
    data = json.loads(path.read_text())
    assert data["environment"] == {"gpu": "SM 80", "cudnn_sdpa": cudnn_sdpa.__version__, "cudnn": "9.28.0"}
    calls = {(call["operation"], call["option"]): call for call in data["calls"]}
    assert calls["sdpa", "causal"]["supported"] == "yes"
    assert calls["sdpa_varlen", "causal"]["supported"] == "forward only"
    assert calls["sdpa_varlen", "causal"]["reasons"]
    assert ("sdpa_varlen", "attn_mask") not in calls


def test_support_names_the_assumed_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "PyTorch sees no GPU: this is for SM 90" in invoke("support").output
    assert "There is no GPU here" not in invoke("support", "--sm", "90").output


def test_support_gives_every_reason_below_its_table():
    too_old = invoke("support", "--sm", "75").output
    assert "(1) a GPU of SM 75 has compute capability 7.5; cuDNN's attention needs 8.0\n" in too_old
    in_fp8 = re.findall(r"\((\d+)\) a GPU of SM 75 .* cuDNN's attention in FP8 needs 9.0\n", too_old)
    first = next(line for line in too_old.splitlines() if "no option" in line)
    assert [cell.strip() for cell in first.split("│")[1:3]] == ["no option", "no (1)"]
    assert len(in_fp8) == 1
    assert in_fp8[0] in re.findall(r"\d+", first.split("│")[4])
    output = invoke("support", "--sm", "80").output
    reasons = [line for line in output.splitlines() if line.startswith("(")]
    assert [line.partition(" ")[0] for line in reasons] == [f"({number})" for number in range(1, 1 + len(reasons))]
    assert len({line.partition(" ")[2] for line in reasons}) == len(reasons) > 5
    shown = {number for cell in re.findall(r"\(([\d, ]+)\) *│", output) for number in cell.replace(" ", "").split(",")}
    assert shown == {str(number) for number in range(1, 1 + len(reasons))}


def test_stored_plans_are_counted_and_removed(tmp_path, monkeypatch):
    folder = tmp_path / "plans"
    store = PlanStore(folder)
    q = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16)
    key = describe_sdpa(q, q, q).key(Target.from_properties(load_properties("h200")), None)
    store.save(key, StoredPlan(key.identity(), "eng9", {}, 0, 0.5, b"x" * 2**20))
    said = f"1 plans, 1.0 of 1024 MiB, in {folder}"
    assert invoke("plans", "size", "--folder", folder).output.replace("\n", "").startswith(said)
    monkeypatch.setattr("cudnn_sdpa.plans.default_store.active", lambda: store)
    assert invoke("plans", "size").output.replace("\n", "").startswith(said)
    assert invoke("plans", "clear").output.startswith("1 of 1 plans removed from ")
    assert store.load(key) is None
    assert invoke("plans", "size").output.startswith("0 plans")
    monkeypatch.setattr("cudnn_sdpa.plans.default_store.active", lambda: None)
    for command in ("size", "clear"):
        result = invoke("plans", command)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("plans are not stored")


def test_numbers_that_python_cannot_parse_are_named():
    for text in ("-" * 100_000 + "1", "(" * 100_000, "9" * 100_000):
        result = CliRunner().invoke(app, ["explain", "sdpa", *QKV, f"scale={text}"])
        assert (result.exit_code, result.output[:6]) == (2, "scale:")


def test_names_that_were_nearly_right():
    result = CliRunner().invoke(app, ["explain", "sdpa", *QKV, "causal=true"])
    assert (result.exit_code, "Did you mean is_causal?" in result.output) == (2, True)
    result = CliRunner().invoke(app, ["explain", "sdpa_variable", *QKV])
    assert (result.exit_code, "Did you mean sdpa_varlen?" in result.output) == (2, True)
    result = CliRunner().invoke(app, ["explain", "sdpa", *QKV, "xyzzy=true"])
    assert (result.exit_code, "Did you mean" in result.output) == (2, False)


def save_manifest(path):
    q = torch.empty(1, 2, 16, 64, dtype=torch.bfloat16)
    PlanManifest.of([describe_sdpa(q, q, q).key(Target.from_properties(load_properties("h200")), None)]).save(path)


QKV = [f"{name}=1,2,16,64" for name in "qkv"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", ["compile", "warmup"])
def test_a_pipe_without_a_writer_is_no_manifest(tmp_path, command):
    os.mkfifo(tmp_path / "pipe")
    options = ["--target", "h200", "-o", str(tmp_path / "out")] if command == "compile" else []
    arguments = [sys.executable, "-m", "cudnn_sdpa", command, str(tmp_path / "pipe"), *options]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert (result.returncode, result.stderr[:9]) == (2, "MANIFEST:")


@pytest.mark.slow
def test_a_pipe_without_a_writer_is_no_target(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    arguments = [sys.executable, "-m", "cudnn_sdpa", "explain", "sdpa", *QKV, "--target", str(tmp_path / "pipe")]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert (result.returncode, result.stderr[:9]) == (2, "--target:")


def test_a_manifest_may_come_through_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    save_manifest(tmp_path / "plans.json")
    writer = threading.Thread(
        target=lambda: (tmp_path / "pipe").write_text((tmp_path / "plans.json").read_text()), daemon=True
    )
    with os.fdopen(os.open(tmp_path / "pipe", os.O_RDWR)):  # the writer need not wait for a reader
        writer.start()
        writer.join(20)
        descriptor = os.open(tmp_path / "pipe", os.O_RDONLY)
    try:
        assert len(PlanManifest.load(f"/dev/fd/{descriptor}")) == 1
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "arguments",
    [
        ["compile", "plans.json", "--target", "h200", "-o", ""],
        *[["plans", name, "--folder", ""] for name in ("size", "clear")],
    ],
)
def test_an_unset_variable_of_the_shell_is_not_the_current_folder(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o700)
    save_manifest("plans.json")
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.output.partition(":")[0]) == (2, "--output" if "-o" in arguments else "--folder")
    assert [path.name for path in tmp_path.iterdir()] == ["plans.json"]


def test_warmup_looks_at_the_manifest_before_it_looks_for_a_gpu(tmp_path):
    missing = str(tmp_path / "nofile.json")
    result = CliRunner().invoke(app, ["warmup", missing])
    assert result.exit_code == 2
    assert missing in result.output
    assert "No such file" in result.output
    with pytest.raises(OptionError, match="No such file"):
        cudnn_sdpa.warmup(missing)
