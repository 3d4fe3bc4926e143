"""The doctor: every problem from given facts, and whole checks of this machine, healthy and deliberately broken."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from typer.testing import CliRunner

from cudnn_sdpa.attention.flash4 import installed as flash4
from cudnn_sdpa.attention.frontend import installed as frontend
from cudnn_sdpa.cli import app
from cudnn_sdpa.doctor import probe
from cudnn_sdpa.doctor.checks import CHECKS, CURES, Level, as_json, as_text, cure_of, examine, is_well
from cudnn_sdpa.doctor.probe import Facts, Gpu
from cudnn_sdpa.engine.native import loader

SITE = "/env/site-packages/nvidia/cudnn/lib"
H200, V100, T4 = Gpu("NVIDIA H200", 9, 0), Gpu("Tesla V100", 7, 0), Gpu("Tesla T4", 7, 5)

#: A healthy machine with an H200.
WELL = Facts(
    python="3.12.3",
    packages={"torch": "2.11.0", "nvidia-cudnn-cu13": "9.19.0.56", "nvidia-cudnn-frontend": "1.32.0"},
    environment={},
    driver="580.95.05",
    gpu_nodes=1,
    native="C++",
    torch="2.11.0+cu130",
    cuda="13.0",
    hip=None,
    plan_store="/home/me/.cache/cudnn_sdpa/plans",
    gpus=(H200,),
    torch_cudnn=91900,
    frontend="1.32.0",
    cudnn=91900,
    engine="eng8",
    difference="4.0e-04",
    mapped=(f"{SITE}/libcudnn.so.9", f"{SITE}/libcudnn_graph.so.9", "/cuda/libcudart.so.13"),
)
#: A machine without a GPU, with PyTorch's CPU build.
CPU = replace(
    WELL,
    packages={"torch": "2.11.0", "nvidia-cudnn-cu12": "9.28.0.42", "nvidia-cudnn-frontend": "1.32.0"},
    driver="",
    gpu_nodes=0,
    torch="2.11.0+cpu",
    cuda=None,
    gpus=(),
    torch_cudnn=None,
    difference="",
)
ERROR_80X = "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before?"


def cuda_says(message: str, **facts: object) -> Facts:
    """A CUDA build of PyTorch that sees no GPU."""
    return replace(WELL, gpus=(), gpus_error=message, difference="", **facts)


def cudnn_says(message: str) -> Facts:
    return call_says(message, frontend="", cudnn=None, cudnn_error=message)


def call_says(message: str, **facts: object) -> Facts:
    return replace(WELL, engine="", difference="", call_error=message, **facts)


def breaks(part: str, how: str, **facts: object) -> Facts:
    """The probing process ends in this part."""
    return replace(WELL, broken_in=part, broken_off=how, engine="", difference="", **facts)


#: The problem, the machine, and one part each of the finding and of the remedy.
ERRORS = {
    "a wrong variable": (
        replace(WELL, refused_settings=("CUDNN_SDPA_NATIVE: got 'junk'; expected one of off, auto, on.",)),
        "settings",
        "got 'junk'",
        "Correct it",
    ),
    "old torch": (
        replace(WELL, torch="2.8.1+cu129"),
        "torch",
        "2.8.1+cu129; 2.9 or newer",
        "pip install --upgrade torch",
    ),
    "torch breaks": (
        breaks("torch", "was killed by SIGSEGV", gpus=(), torch_cudnn=None, cudnn=None),
        "broken_off",
        "SIGSEGV",
        "Reboot if nvidia-smi hangs",
    ),
    "cudnn breaks": (
        breaks("cudnn", "was killed by SIGABRT", cudnn=None),
        "broken_off",
        "SIGABRT",
        "LD_LIBRARY_PATH",
    ),
    "a call breaks": (breaks("call", "was killed by SIGSEGV"), "broken_off", "SIGSEGV", "Report"),
    "rocm": (replace(CPU, torch="2.11.0", hip="7.0"), "torch", "2.11.0", "NVIDIA GPU"),
    "cpu build beside gpus": (replace(CPU, gpu_nodes=8), "torch", "8 NVIDIA GPU", "CUDA build"),
    "no driver": (
        cuda_says("RuntimeError: Found no NVIDIA driver on your system.", driver="", gpu_nodes=0),
        "gpus",
        "kernel module none, 0 GPU(s) in /dev",
        "--gpus all",
    ),
    "old driver": (
        cuda_says("RuntimeError: The NVIDIA driver on your system is too old (found version 12080).", driver="570.86"),
        "gpus",
        "kernel module 570.86, 1 GPU(s)",
        "580 for CUDA 13",
    ),
    "gpus hidden": (
        cuda_says("RuntimeError: No CUDA GPUs are available", environment={"CUDA_VISIBLE_DEVICES": ""}),
        "gpus",
        "CUDA_VISIBLE_DEVICES=''",
        "Unset CUDA_VISIBLE_DEVICES",
    ),
    "no gpu in the container": (
        cuda_says("RuntimeError: No CUDA GPUs are available", gpu_nodes=0),
        "gpus",
        "0 GPU(s) in /dev",
        "--gpus all",
    ),
    "fabric manager": (
        cuda_says(f"{ERROR_80X} Error 802: system not yet initialized"),
        "gpus",
        "802",
        "nvidia-fabricmanager",
    ),
    "driver updated": (
        cuda_says(f"{ERROR_80X} Error 803: system has unsupported display driver / cuda driver combination"),
        "gpus",
        "803",
        "Reboot",
    ),
    "compatibility package": (
        cuda_says(f"{ERROR_80X} Error 804: forward compatibility was attempted on non supported HW"),
        "gpus",
        "804",
        "cuda-compat",
    ),
    "unknown failure of the driver": (cuda_says("RuntimeError: CUDA unknown error"), "gpus", "unknown", "nvidia-smi"),
    "old gpu": (replace(WELL, gpus=(V100, V100)), "gpus", "Tesla V100, compute capability 7.0; 8.0 or newer", "Ampere"),
    "cuda 12 and 13": (
        replace(WELL, packages={**WELL.packages, "nvidia-cudnn-cu12": "9.10.2.21"}),
        "packages",
        "nvidia-cudnn-cu12 9.10.2.21 and nvidia-cudnn-cu13 9.19.0.56",
        "pip uninstall nvidia-cudnn-cu12 nvidia-cudnn-cu13, then pip install nvidia-cudnn-cu13.",
    ),
    "cuda 12 beside pytorch for 13": (
        replace(WELL, packages=CPU.packages),
        "packages",
        "PyTorch for CUDA 13.0",
        "pip uninstall nvidia-cudnn-cu12, then pip install nvidia-cudnn-cu13.",
    ),
    "no frontend": (
        cudnn_says("LibraryError: nvidia-cudnn-frontend cannot be imported (No module named 'cudnn')"),
        "cudnn",
        "No module named",
        "pip install nvidia-cudnn-frontend",
    ),
    "old frontend": (
        cudnn_says("LibraryError: nvidia-cudnn-frontend 1.20.0 at /x is too old: 1.28 or newer is needed"),
        "cudnn",
        "1.20.0 at /x is too old: 1.28 or newer",
        "--upgrade",
    ),
    "no libcudnn": (
        cudnn_says("LibraryError: libcudnn.so.9 cannot be loaded (RuntimeError: …)"),
        "cudnn",
        "cannot be loaded",
        "cudnn-sdpa[cu13]",
    ),
    "old libcudnn": (
        cudnn_says("LibraryError: cuDNN 9.1.0 at /usr/lib/libcudnn.so.9 is too old: 9.10.0 or newer is needed."),
        "cudnn",
        "9.1.0 at /usr/lib",
        "LD_LIBRARY_PATH",
    ),
    "foreign libcudnn": (
        cudnn_says("LibraryError: … (/opt/libcudnn.so.9: undefined symbol: cudnnBackendCreateDescriptor)"),
        "cudnn",
        "undefined symbol",
        "Keep one cuDNN",
    ),
    "damaged libcudnn": (cudnn_says("OSError: /x/libcudnn.so.9: file too short"), "cudnn", "too short", "damaged"),
    "two libcudnns in a process": (
        replace(WELL, mapped=(*WELL.mapped, "/usr/lib64/libcudnn_graph.so.9")),
        "cudnn",
        f"{SITE}; /usr/lib64",
        "Keep one cuDNN",
    ),
    "two versions of cudnn": (
        replace(WELL, cudnn=92800),
        "cudnn",
        "PyTorch's is 9.19.0, this library's 9.28.0",
        "LD_LIBRARY_PATH",
    ),
    "pytorch refuses its cudnn": (
        replace(WELL, torch_cudnn=None, torch_cudnn_error="RuntimeError: cuDNN version incompatibility: …"),
        "cudnn",
        "incompatibility",
        "LD_LIBRARY_PATH",
    ),
    "sub-libraries": (
        call_says("CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH"),
        "call",
        "MISMATCH",
        "Keep one cuDNN",
    ),
    "nvrtc": (
        call_says("cuDNN could not load libnvrtc.so.13"),
        "call",
        "libnvrtc",
        "nvidia-cuda-nvrtc",
    ),
    "wrong numbers": (replace(WELL, difference="3.0e-01"), "call", "3.0e-01, eng8", "Do not use"),
    "not a number": (replace(WELL, difference="nan"), "call", "nan", "Do not use"),
    "a named store": (
        replace(
            WELL,
            plan_store="/data/plans",
            plan_store_problem="/data is not writable",
            environment={"CUDNN_SDPA_PLAN_DIR": "/data/plans"},
        ),
        "store",
        "/data is not writable",
        "CUDNN_SDPA_PLAN_DIR",
    ),
}
NO_COMPILER = "the C compiler 'cc', which links functions, is not found; install one (apt-get install gcc libc6-dev)"
WARNINGS = {
    "a variable that nothing reads": (
        replace(WELL, ignored_settings=("CUDNN_SDPA_FOO: nothing reads it",)),
        "settings",
        "CUDNN_SDPA_FOO",
        "unset it",
    ),
    "a provider that is not installed": (
        replace(
            WELL,
            environment={"CUDNN_SDPA_PROVIDERS": "fa4, cudnn"},
            flash4_missing="flash-attn-4 is not installed; pip install 'flash-attn-4==4.0.0b36'",
        ),
        "other_providers",
        "flash-attn-4 is not installed",
        "pip install 'flash-attn-4==4.0.0b36'",
    ),
    "a provider whose compiler is not installed": (
        replace(
            WELL,
            environment={"CUDNN_SDPA_PROVIDERS": "cudnn,frontend"},
            flash4_missing="flash-attn-4 is not installed; pip install 'flash-attn-4==4.0.0b36'",
            frontend_missing="nvidia-cutlass-dsl is not installed; pip install 'nvidia-cutlass-dsl==4.8.1'",
        ),
        "other_providers",
        "nvidia-cutlass-dsl is not installed",
        "pip install 'nvidia-cutlass-dsl==4.8.1'",
    ),
    "the fastest provider that is not installed": (
        replace(
            WELL,
            environment={"CUDNN_SDPA_PROVIDERS": "fastest"},
            flash4_missing="flash-attn-4 is not installed; pip install 'flash-attn-4==4.0.0b36'",
            frontend_missing="nvidia-cutlass-dsl is not installed; pip install 'nvidia-cutlass-dsl==4.8.1'",
        ),
        "other_providers",
        "flash-attn-4 is not installed",
        "pip install 'flash-attn-4==4.0.0b36'",
    ),
    **{
        f"no compiler for {name}": (
            replace(WELL, environment={"CUDNN_SDPA_PROVIDERS": name}, compiler_missing=NO_COMPILER),
            "other_providers",
            "the C compiler 'cc', which links functions, is not found",
            "gcc libc6-dev",
        )
        for name in ("fa4", "frontend, cudnn", "fastest")
    },
    "an old gpu among others": (replace(WELL, gpus=(H200, T4)), "gpus", "Tesla T4", "Ampere"),
    "no compiler, no driver": (
        replace(CPU, engine="", call_error="OfflineError: … needs a C compiler"),
        "call",
        "needs a C compiler",
        "gcc libc6-dev",
    ),
    "nothing planned": (
        replace(CPU, engine="", call_error="OfflineError: set XDG_CACHE_HOME"),
        "call",
        "OfflineError",
        "XDG_CACHE_HOME",
    ),
    "the cache folder": (
        replace(WELL, plan_store="/root/.cache", plan_store_problem="/ is not writable"),
        "store",
        "/ is not writable",
        "CUDNN_SDPA_PLAN_DIR",
    ),
}
NOTES = {
    "a read-only store": (
        replace(WELL, plan_store_problem="/plans is not writable", plan_store_is_readable=True),
        "store",
        "/plans is not writable",
        "every process builds the plans that are missing",
    ),
    "no c++ compiler": (
        replace(WELL, native="Python: there is no C++ compiler"),
        "native",
        "there is no",
        "build-native",
    ),
}
LEVELS = {Level.ERROR: ERRORS, Level.WARNING: WARNINGS, Level.NOTE: NOTES}
AILMENTS = [
    pytest.param(level, *ailment, id=f"{level.value}: {name}")
    for level, ailments in LEVELS.items()
    for name, ailment in ailments.items()
]


def test_a_healthy_machine_has_no_findings():
    assert examine(WELL) == []
    assert examine(CPU) == []
    assert examine(replace(WELL, plan_store=None)) == []
    assert examine(replace(WELL, native="Python: CUDNN_SDPA_NATIVE=off")) == []
    assert examine(replace(WELL, flash4_missing="flash-attn-4 is not installed; pip install it")) == []
    assert examine(replace(WELL, frontend_missing="nvidia-cutlass-dsl is not installed; pip install it")) == []
    assert examine(replace(WELL, compiler_missing=NO_COMPILER)) == []
    assert examine(replace(WELL, native="C++, when c++ has compiled it in the background; before that Python")) == []
    assert "No problems found." in as_text(WELL, [])
    assert f"{'GPU':<14}none found; CPU tensors run the reference" in as_text(CPU, []).splitlines()
    assert f"{'calls':<14}C++" in as_text(WELL, []).splitlines()


@pytest.mark.parametrize(
    ("line", "package", "versions", "missing"),
    [
        ("flash-attn-4", "flash-attn-4", "flash4", "flash4_missing"),
        ("its kernels", "nvidia-cutlass-dsl", "frontend_kernels", "frontend_missing"),
    ],
)
def test_a_provider_is_listed_where_its_package_is_installed(line, package, versions, missing):
    """Also one that is stale or changed, which has a reason and may have no versions."""
    why = f"{package} was changed; pip install it"
    there = replace(WELL, packages={**WELL.packages, package: "4.9"})
    for facts, said in (
        (replace(WELL, **{missing: why}), None),
        (replace(there, **{versions: "4.9 4.8.1 0123"}), "4.9 4.8.1 0123"),
        (replace(there, **{missing: why}), why),
        (replace(there, **{versions: "4.9 4.8.1 0123", missing: why}), why),
    ):
        assert examine(facts) == []
        lines = [text[14:] for text in as_text(facts, []).splitlines() if text.startswith(line)]
        assert lines == ([] if said is None else [said])


def test_installed_providers_are_found_without_an_import_of_theirs(monkeypatch, tmp_path):
    """Here of metadata alone, as a removed package leaves them at times."""
    monkeypatch.setattr(probe, "probed", lambda _: {})
    before = set(sys.modules)
    for name in ("flash_attn_4", "nvidia_cutlass_dsl"):
        metadata = tmp_path / f"{name}-0.1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for examined in (flash4.installed, frontend.installed):
        examined.cache_clear()
    try:
        facts = probe.gather()
    finally:
        for examined in (flash4.installed, frontend.installed):
            examined.cache_clear()
    assert facts.flash4_missing
    lines = as_text(facts, []).splitlines()
    assert f"{'flash-attn-4':<14}{facts.flash4_missing}" in lines
    assert f"{'its kernels':<14}{facts.frontend_missing or facts.frontend_kernels}" in lines
    assert not {"flash_attn", "cutlass", "cudnn"} & (set(sys.modules) - before)


@pytest.mark.parametrize(("level", "facts", "check", "found", "cure"), AILMENTS)
def test_every_problem_is_found_with_a_remedy(level, facts, check, found, cure):
    findings = [finding for finding in examine(facts) if finding.level is level or finding.level is not Level.NOTE]
    assert [finding.check for finding in findings] == [check], "one ailment, one finding"
    (finding,) = findings
    assert finding.level is level
    assert finding.check == check
    assert found in finding.found
    assert cure in finding.cure
    assert finding.cure.endswith(".")
    assert is_well(findings) == (level is not Level.ERROR)
    text = as_text(facts, findings)
    for part in (finding.level.value, finding.title, finding.found, finding.cure):
        assert part in text
    assert ("No problems found." in text) == (level is not Level.ERROR)


def test_every_check_is_covered():
    checks = {check.__name__ for check in CHECKS}
    assert {ailment[1] for ailments in LEVELS.values() for ailment in ailments.values()} == checks


def test_the_worst_comes_first():
    facts = replace(
        NOTES["a read-only store"][0], gpus=(H200, T4), torch="2.1", native="Python: there is no C++ compiler"
    )
    levels = [finding.level for finding in examine(facts)]
    assert levels == [Level.ERROR, Level.WARNING, Level.NOTE, Level.NOTE]


def test_json_has_the_findings_and_the_facts():
    facts, *_ = ERRORS["cuda 12 and 13"]
    found = json.loads(as_json(facts, examine(facts)))
    assert found["ok"] is False
    assert [finding["level"] for finding in found["findings"]] == ["error"]
    assert found["facts"]["gpus"] == [{"name": "NVIDIA H200", "major": 9, "minor": 0}]
    assert found["facts"]["mapped"][0] == f"{SITE}/libcudnn.so.9"


def test_json_has_the_keys_that_the_documentation_promises():
    facts, *_ = NOTES["no c++ compiler"]
    found = json.loads(as_json(facts, examine(facts)))
    assert set(found) == {"cudnn_sdpa", "ok", "findings", "facts"}
    assert found["ok"] is True
    assert [set(finding) for finding in found["findings"]] == [{"level", "check", "title", "found", "cure"}]
    page = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text()
    assert all(f"`{key}`" in page for key in (*found, *found["findings"][0]))


@pytest.mark.parametrize(
    ("message", "cure"),
    [
        ("ImportError: libcublas.so.12: cannot open shared object file", "nvidia-cublas-cu12"),
        ("cannot allocate memory in static TLS block", "LD_PRELOAD"),
        ("CUDA error: no kernel image is available for execution on the device", "built for this GPU"),
        ("CUDA out of memory. Tried to allocate", "nvidia-smi"),
        ("The NVIDIA driver on your system is too old (found version 11040)", "Update NVIDIA's driver"),
        ("AssertionError: Found 2 libcudnn.so.x in nvidia-cudnn-cuXX.", "pip uninstall every"),
        ("something new", "what else"),
    ],
)
def test_library_errors_have_remedies(message, cure):
    assert cure in cure_of(message, "what else")


@pytest.mark.parametrize("pattern", CURES)
def test_troubleshooting_lists_every_message_with_a_remedy(pattern):
    page = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text()
    section = page.partition("\n## By message\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    messages = [message for cell in cells for message in cell.split("`, `")]
    assert CURES[pattern] in {cure_of(message, "what else") for message in messages}


@pytest.mark.parametrize(("facts", "status"), [(CPU, 0), (ERRORS["wrong numbers"][0], 1)])
def test_the_command_prints_the_findings_and_ends_with_1_if_one_is_an_error(monkeypatch, facts, status):
    monkeypatch.setattr(probe, "gather", lambda: facts)
    result = CliRunner().invoke(app, ["doctor"])
    assert (result.exit_code, result.output) == (status, as_text(facts, examine(facts)) + "\n")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert (result.exit_code, result.output) == (status, as_json(facts, examine(facts)) + "\n")


needs_cudnn = pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="nvidia-cudnn-frontend is missing")


@pytest.mark.slow
@needs_cudnn
def test_this_machine_with_a_printing_sitecustomize(tmp_path):
    """The command, run as by a user, with a separate store."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; print('hello\\n5\\n{}', file=sys.__stdout__ if sys.argv[0] == '-c' else sys.stderr)\n"
    )
    search = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": search, "CUDNN_SDPA_PLAN_DIR": str(tmp_path / "plans")}
    command = [sys.executable, "-m", "cudnn_sdpa", "doctor", "--json"]
    result = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=200
    )
    assert "hello" in result.stderr
    found = json.loads(result.stdout)
    assert result.returncode == (0 if found["ok"] else 1)
    facts = found["facts"]
    assert facts["torch"] == torch.__version__
    assert facts["broken_off"] == ""
    assert facts["cudnn"] >= 91000
    assert any("/libcudnn.so" in path for path in facts["mapped"])
    assert facts["environment"]["CUDNN_SDPA_PLAN_DIR"] == str(tmp_path / "plans")
    assert not (tmp_path / "plans").exists()
    assert all(finding["cure"] for finding in found["findings"])
    if torch.cuda.is_available():
        assert float(facts["difference"]) < 1e-2
    elif torch.version.cuda is None and shutil.which("cc"):
        assert found["ok"]
        assert facts["engine"].startswith("eng")


@pytest.mark.slow
@needs_cudnn
def test_what_was_found_before_a_crash_is_kept(monkeypatch):
    crash = "import os\nfrom cudnn_sdpa.doctor import probe\nprobe.PARTS['call'] = os.abort\nprobe.main()"
    monkeypatch.setattr(probe, "_PROGRAM", crash)
    found = probe.probed(100)
    assert (found["broken_in"], found["broken_off"].partition(";")[0]) == ("call", "was killed by SIGABRT")
    assert found["cudnn"] >= 91000
    assert "engine" not in found


@pytest.mark.slow
@needs_cudnn
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch itself would load it")
def test_a_crashing_libcudnn_does_not_crash_the_doctor(tmp_path, monkeypatch):
    source = "#include <stdlib.h>\n__attribute__((constructor)) static void end(void) { abort(); }\n"
    (tmp_path / "fake.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libcudnn.so.9", "fake.c"], cwd=tmp_path, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    facts = probe.gather()
    said = as_text(facts, examine(facts))
    assert "A process ended while cuDNN was loaded" in said
    assert "SIGABRT" in said
    assert f"environment   LD_LIBRARY_PATH={tmp_path}\n" in said


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("import time; time.sleep(60)", "did not end within 1 s"),
        ("import os; os.abort()", "was killed by SIGABRT"),
        ("raise SystemExit(0)", "ended with exit code 0"),
    ],
)
def test_a_hanging_or_crashing_check_is_aborted(monkeypatch, program, how):
    monkeypatch.setattr(probe, "_PROGRAM", program)
    facts = probe.gather(timeout=1.0)
    assert (facts.broken_in, facts.broken_off) == ("torch", how)
    assert facts.torch == torch.__version__
    assert [finding.check for finding in examine(facts) if finding.level is Level.ERROR] == ["broken_off"]


@pytest.mark.parametrize("kind", ["off", "file", "open to others", "good"])
def test_the_plan_store_is_checked_and_not_created(monkeypatch, tmp_path, kind):
    folder = tmp_path / "plans"
    monkeypatch.setenv("CUDNN_SDPA_PLAN_DIR", "off" if kind == "off" else str(folder / "more"))
    if kind == "file":
        folder.touch()
    elif kind == "open to others":
        (folder / "more").mkdir(parents=True)
        (folder / "more").chmod(0o777)
    store = probe.store()
    problem = {"file": "is not a folder", "open to others": "writable by others"}.get(kind)
    assert (problem in store["plan_store_problem"]) if problem else "plan_store_problem" not in store
    assert store.get("plan_store") == (None if kind == "off" else str(folder / "more"))
    assert folder.exists() == (kind in {"file", "open to others"})


@contextmanager
def another_user():
    """A user who owns nothing; root is restored afterwards."""
    groups = os.getgroups()
    os.setgroups([])
    os.setresuid(54321, 54321, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setgroups(groups)


@pytest.mark.skipif(os.getuid() != 0, reason="root can become a user who may not write")
def test_a_read_only_store_is_a_note(monkeypatch):
    """As in a container image: root's plans that the program's user may read."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        plans = Path(name) / "plans"
        plans.mkdir()
        (plans / "a.plan").touch()
        monkeypatch.setenv("CUDNN_SDPA_PLAN_DIR", str(plans))
        found = []
        for mode in (0o755, 0o700):
            plans.chmod(mode)
            with another_user():
                found += examine(replace(WELL, **probe.store()))
    note, error = found
    assert (note.level, note.title) == (Level.NOTE, "Plans are read, but new ones are not stored")
    assert note.found == f"{plans} is not writable"
    assert (error.level, error.title) == (Level.WARNING, "Plans cannot be stored: every process builds its own")


def test_a_store_below_a_folder_that_is_open_to_others_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("CUDNN_SDPA_PLAN_DIR", str(tmp_path / "open" / "plans"))
    assert f"{tmp_path}/open is writable by others" in probe.store()["plan_store_problem"]
    assert not (tmp_path / "open" / "plans").exists()


def test_an_unreadable_folder_is_reported_and_stops_nothing(tmp_path, monkeypatch):
    hidden = tmp_path / ("x" * 300)  # unreadable like another user's folder, for every user
    monkeypatch.setenv("CUDNN_SDPA_PLAN_DIR", str(hidden / "plans"))
    assert str(hidden) in probe.store()["plan_store_problem"]


#: Wrong values of variables: those that calls raise, and those for which there are defaults.
REFUSED = {
    "CPU_CHECKS": "h9000",
    "NATIVE": "junk",
    "RECORDED": "yes",
    "SHAPE_POLICY": "Exact",
    "TARGET": "; using nothing",
}
IGNORED = {"CACHE_SIZE": "many", "HELPER_TIMEOUT": "-1"}


@pytest.fixture
def unset(monkeypatch):
    """No variable of this library is set."""
    for name in [name for name in os.environ if name.startswith("CUDNN_SDPA_")]:
        monkeypatch.delenv(name)
    assert probe.settings() == {"refused_settings": (), "ignored_settings": ()}


@pytest.mark.usefixtures("unset")
def test_wrong_values_of_this_librarys_variables_are_found(monkeypatch):
    for name, value in {**REFUSED, **IGNORED, "expected": "1"}.items():
        monkeypatch.setenv(f"CUDNN_SDPA_{name}", value)
    found = probe.settings()
    *ignored, unknown = found["ignored_settings"]
    for problems, values in ((found["refused_settings"], REFUSED), (ignored, IGNORED)):
        assert {problem.partition(":")[0] for problem in problems} == {f"CUDNN_SDPA_{name}" for name in values}
    assert unknown == "CUDNN_SDPA_expected: nothing reads it"
    levels = [finding.level for finding in examine(replace(WELL, **found))]
    assert levels == [Level.ERROR] * len(REFUSED) + [Level.WARNING] * (len(IGNORED) + 1)
    assert loader.forecast().startswith("none: CUDNN_SDPA_NATIVE: got 'junk'")


@pytest.mark.usefixtures("unset")
def test_empty_variables_are_those_that_are_not_set(monkeypatch):
    for name in (*REFUSED, *IGNORED):
        monkeypatch.setenv(f"CUDNN_SDPA_{name}", "")
    assert probe.settings() == {"refused_settings": (), "ignored_settings": ()}


def test_all_variables_that_anything_names_are_known():
    root = Path(probe.__file__).parents[2]
    files = [
        *root.glob("cudnn_sdpa/**/*.py"),
        *root.glob("tests/**/conftest.py"),
        *root.glob("docs/*.md"),
        root / ".ci/run",
    ]
    named = {name for file in files for name in re.findall(r"\bCUDNN_SDPA_([A-Z_]+)\b", file.read_text())}
    assert len(named) > 10
    assert {name for name in named if f"CUDNN_SDPA_{name}" not in probe._READ} <= set(probe._OTHERS)
