"""The samples run as users run them, and published numbers match the benchmark files."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest
import torch

ROOT = Path(__file__).parent.parent.parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return forked_python.run([*command], cwd=ROOT, timeout=240)


def test_the_quickstart_runs_and_shows_its_results():
    result = run("samples/quickstart.py")
    assert result.returncode == 0, result.stderr
    assert "every result agrees with PyTorch" in result.stdout
    assert "│ decode, one token │" in result.stdout, "its first column is cut at 80 columns"
    assert "…" not in result.stdout
    assert "│ – " not in result.stdout, "a column is empty"
    if torch.cuda.is_available():
        assert "2 plans served 84 calls" in result.stdout
    elif importlib.util.find_spec("cudnn") and shutil.which("cc"):
        assert "eng" in result.stdout, "no plan for an H200 is shown"


@pytest.mark.slow
def test_fp8_errors_are_those_of_the_emulation():
    result = run("scripts/fp8_errors.py", "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_serving_sample_matches_dense_attention():
    result = run("samples/serve.py")
    assert result.returncode == 0, result.stderr + result.stdout
    assert "every token agrees" in result.stdout
    used, pages = map(int, re.search(r"most pages used +│ (\d+) of (\d+)", result.stdout).groups())
    assert used <= pages
    assert " before the first step, 0 later" in result.stdout
    assert int(re.search(r"preemptions +│ (\d+)", result.stdout)[1]) >= 1, "the cache was large enough"
    if not torch.cuda.is_available():
        assert "100.00%" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("--cp", "2"), ("--cp", "1", "--tp", "2")])
def test_the_parallel_sample_trains_as_one_process(ways):
    launched = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = subprocess.run(
        [sys.executable, *launched, "samples/train_parallel.py", "--steps", "3", *ways],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "2 processes agree with one" in result.stdout


def test_the_page_that_adds_an_operation_shows_the_sample():
    result = run("samples/add_an_operation.py")
    assert result.returncode == 0, result.stderr
    assert "gradient of weight" in result.stdout
    sample, page = ((ROOT / name).read_text() for name in ("samples/add_an_operation.py", "docs/add_an_operation.md"))
    functions = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if code.startswith(("def ", "@"))]
    assert len(functions) == 5
    assert all(code.partition("\n\n\nx, weight")[0].rstrip() in sample for code in functions)


def test_the_page_that_adds_a_kernel_shows_the_sample():
    result = run("samples/add_a_kernel/row_softmax.py")
    assert result.returncode == 0, result.stderr
    assert "torch.bfloat16  gradient of x" in result.stdout
    page, folder = (ROOT / "docs/add_a_kernel.md").read_text(), ROOT / "samples/add_a_kernel"
    for language, name in (("cpp", "row_softmax.cu"), ("py", "row_softmax.py")):
        shown = re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        parts = [part.strip() for block in shown for part in block.split("\n\n\n")]
        assert len(parts) >= 2
        assert all(part in (folder / name).read_text() for part in parts)


def test_tables_match_the_benchmark_files():
    result = run("scripts/bench_tables.py", "--check")
    assert result.returncode == 0, result.stdout


def test_preferences_have_the_times_of_the_benchmark_files():
    result = run("scripts/preferences.py", "--check")
    assert result.returncode == 0, result.stdout


def test_charts_match_the_benchmark_files():
    result = run("scripts/charts.py", "--check")
    assert result.returncode == 0, result.stdout


def test_the_table_of_known_issues_is_up_to_date():
    result = run("scripts/known_issues.py", "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_index_of_the_reference_is_up_to_date():
    result = run("scripts/api_index.py", "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_design_page_lists_every_module():
    result = run("scripts/package_tree.py", "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_benchmark_says_that_it_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = run("-m", "benchmarks", "host")
    assert result.returncode == 2
    assert "needs an NVIDIA GPU" in result.stderr


def test_the_command_line_prints_the_version():
    import cudnn_sdpa

    assert run("-m", "cudnn_sdpa", "version").stdout.strip() == cudnn_sdpa.__version__


def test_engine_tables_match_their_files():
    result = run("scripts/engine_tables.py", "--check")
    assert result.returncode == 0, result.stdout
