"""Own kernels and recorded launches under compute-sanitizer.

There is no access beyond a tensor; own kernels have no race, and read nothing that was never written.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "sanitized_calls.py"
ON_PAGES = PROGRAM.with_name("sanitized_paged_calls.py")
FUSED = PROGRAM.with_name("sanitized_fused_calls.py")
RECORDED = PROGRAM.with_name("sanitized_recorded_calls.py")
SANITIZER = shutil.which("compute-sanitizer")
PARTS = min(12, len(os.sched_getaffinity(0)))

pytestmark = pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer on the PATH; CUDA's toolkit has it")


def start(store: Path, part: str, tool: str | None = None, program: Path = PROGRAM) -> subprocess.Popen[str]:
    """Starts a part of the calls; each tensor has an allocation of its own, so that a tool knows where it ends."""
    command = [sys.executable, str(program), part]
    if tool is not None:
        more = ["--report-api-errors", "no"] if tool == "memcheck" else []
        command = [str(SANITIZER), "--tool", tool, "--error-exitcode", "1", *more, *command]
    environment = {
        **os.environ,
        "CUDNN_SDPA_PLAN_DIR": str(store),
        "CUDNN_SDPA_NATIVE": "off",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def outputs(store: Path, tool: str | None = None, program: Path = PROGRAM) -> list[str]:
    """Runs all calls, in processes side by side; gives what they print."""
    running = [start(store, f"{part}/{PARTS}", tool, program) for part in range(PARTS)]
    try:
        found = [process.communicate(timeout=500)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, text in zip(running, found, strict=True):
        assert process.returncode == 0, text[-6000:]
        assert "all calls were made" in text
    return found


@pytest.mark.timeout(600)
def test_no_kernel_has_an_error(tmp_path):
    """The kernels are compiled first, so that the tools do not wait for NVRTC."""
    store = tmp_path / "plans"
    store.mkdir(mode=0o700)
    outputs(store)
    for tool in ("memcheck", "racecheck", "initcheck"):
        for text in outputs(store, tool):
            assert "SUMMARY: 0 " in text, f"{tool}: {text[-6000:]}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", [ON_PAGES, FUSED], ids=["pages", "fused"])
def test_other_kernels_have_no_error(program, tmp_path):
    """The kernel for pages reads memory that need not have been written, and `initcheck` would
    see what PyTorch's kernels of the references read."""
    store = tmp_path / "plans"
    store.mkdir(mode=0o700)
    outputs(store, program=program)
    for tool in ("memcheck", "racecheck"):
        for text in outputs(store, tool, program=program):
            assert "SUMMARY: 0 " in text, f"{tool}: {text[-6000:]}"


@pytest.mark.timeout(600)
def test_recorded_launches_have_no_error(tmp_path):
    """The kernels are cuDNN's, whose races are not looked for. Plans are built first."""
    outputs(tmp_path, program=RECORDED)
    recorded = 0
    for text in outputs(tmp_path, "memcheck", program=RECORDED):
        assert "SUMMARY: 0 " in text, text[-6000:]
        recorded += int(re.search(r"(\d+) plans were launched as recorded", text)[1])
    assert recorded > 10


def test_the_tool_notices_what_is_wrong(tmp_path):
    process = start(tmp_path, "wrong", "memcheck")
    text, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "Invalid __global__ read" in text
