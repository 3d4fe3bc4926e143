"""Every test here needs an NVIDIA GPU. The run can leave a report with versions, counts and skips."""

from __future__ import annotations

import itertools
import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import cudnn_sdpa
from cudnn_sdpa.engine.recorded import recorder
from cudnn_sdpa.graph import backend

HERE = Path(__file__).parent

#: Files with tests that take long, the longest first.
SLOW = (
    *("test_sanitizer.py", "test_context_parallel_gpu.py", "test_notebooks.py", "test_fork_and_exit_gpu.py"),
    *("test_compiled_models_gpu.py", "test_benchmarks.py", "test_generated_calls.py", "test_flash4_gpu.py"),
)

#: Bytes that PyTorch may keep after a test: more than ten workers of pytest-xdist share a GPU.
MAX_RESERVED = 1 << 30

#: PyTorch's own warnings in these tests.
WARNINGS = (
    "Attempting to run cuBLAS",  # of its own autograd threads, when their first work is a matrix product
    "Synchronization debug mode",
    "The CUDA Graph is empty",  # Inductor's first one is
    "TensorFloat32 tensor cores",
    r"\s*Online softmax is disabled",
)


def _share_gpus() -> None:
    """Of several GPUs, every worker of pytest-xdist has another one as its first, and sees all."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or not torch.cuda.device_count():  # without: the workers' parent, whose environment they inherit
        return
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    first = int(worker.removeprefix("gw")) % max(1, len(gpus))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


_share_gpus()  # before anything initializes CUDA


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Calls take the native way; with CUDNN_SDPA_TEST_NATIVE=off Python's. Without a GPU, tests beside these choose.

    Plans are recorded from their first native launch on: few tests make the hundred calls that it takes otherwise.
    """
    if torch.cuda.is_available():
        recorder.MIN_CALLS = 0
        os.environ["CUDNN_SDPA_NATIVE"] = os.environ.get("CUDNN_SDPA_TEST_NATIVE", "on")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{warning}:UserWarning"))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU that PyTorch can see"))
    items[:] = _slow_ones_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _slow_ones_first(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Deals slow tests out to the workers of pytest-xdist, which each begin with an equal share of the list."""
    slow = sorted((x for x in items if x.path.name in SLOW), key=lambda item: SLOW.index(item.path.name))
    rest = iter([x for x in items if x.path.name not in SLOW])
    dealt: list[pytest.Item] = []
    for worker in range(workers):
        mine = slow[worker::workers]
        share = (len(items) - len(dealt)) // (workers - worker)
        dealt += [*mine, *itertools.islice(rest, max(0, share - len(mine)))]
    return [*dealt, *rest]


@pytest.fixture
def default_providers(monkeypatch):
    """For tests of cuDNN's plans, and of how many are built.

    The variable CUDNN_SDPA_PROVIDERS has all others served by those that it names, with a store that tests share.
    """
    monkeypatch.delenv("CUDNN_SDPA_PROVIDERS", raising=False)  # of processes that a test starts, too
    with cudnn_sdpa.providers("default"), cudnn_sdpa.use_plan_store("off"):
        yield


@pytest.fixture
def cudnn_provider(default_providers):  # noqa: ARG001 - which would take its place if it came later
    """For tests of cuDNN's plans of what own kernels may serve."""
    with cudnn_sdpa.providers("cudnn"):
        yield


@pytest.fixture(autouse=True)
def fresh_cache():
    """Each test starts without plans, with its own seed and one plan for each shape, and restores all settings.

    What other shape policies do is tested for itself; the environment variable CUDNN_SDPA_SHAPE_POLICY runs the values
    of all tests under another one.
    """
    cudnn_sdpa.plan_cache.clear()
    capacity = cudnn_sdpa.plan_cache.info().capacity
    torch.manual_seed(20261121)
    with cudnn_sdpa.shape_policy(os.environ.get("CUDNN_SDPA_SHAPE_POLICY") or "exact"):
        yield
    cudnn_sdpa.plan_cache.resize(capacity)
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > MAX_RESERVED:
        torch.cuda.empty_cache()


_outcomes: Counter[str] = Counter()
_skips: Counter[str] = Counter()
_not_run: set[str] = set()
_failed: set[str] = set()


def pytest_collection_finish(session: pytest.Session) -> None:
    _not_run.update(item.nodeid for item in session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    """The same for pytest-xdist's workers, which all collect the same tests."""
    _not_run.update(ids)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _not_run.discard(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.outcome] += 1
    if report.failed:
        _failed.add(report.nodeid)
    if report.skipped:
        _skips[str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1


def pytest_sessionfinish() -> None:
    """Writes the report to the file that CUDNN_SDPA_GPU_REPORT names.

    Workers of pytest-xdist, which saw only their own tests, write none.
    """
    path = os.environ.get("CUDNN_SDPA_GPU_REPORT")
    if not path or "PYTEST_XDIST_WORKER" in os.environ or not torch.cuda.is_available():
        return
    report = {
        "versions": {
            "cudnn_sdpa": cudnn_sdpa.__version__,
            "gpu": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "cudnn": backend.version_string(backend.cudnn_version()),
            "nvidia-cudnn-frontend": backend.frontend_version(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "native module": os.environ["CUDNN_SDPA_NATIVE"],  # with "on", workers fail where they cannot load it
        },
        "counts": dict(_outcomes),
        "skips": dict(_skips),
        "failed": sorted(_failed),
        "not run": sorted(_not_run),  # empty unless the run was interrupted
    }
    Path(path).write_text(json.dumps(report, indent=2) + "\n")
