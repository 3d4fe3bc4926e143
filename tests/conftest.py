"""Fixtures of all tests: reproducible random data, and Python in a separate process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import forked_python
import pytest
import torch
from processes import Ranks

ROOT = Path(__file__).parent.parent
SEARCH_PATH = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]

RunPython = Callable[..., subprocess.CompletedProcess[str]]


#: How many of the notebooks `make test` executes; `make test-all` executes the others.
NOTEBOOKS = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    help_ = "quick: what `make test` runs (the default); rest: what it leaves out; all: both"
    parser.addoption("--tests", choices=["quick", "rest", "all"], default="quick", help=help_)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked `slow`, and of a test marked `sample(n)` all but n of its parametrizations.

    The n are spread evenly over the parametrizations, the first and the last among them. A test that is named on the
    command line, or that needs a GPU, always runs.
    """
    chosen = config.getoption("--tests")
    if chosen == "all" or any("::" in argument for argument in config.args):
        return
    families: dict[str, list[pytest.Item]] = {}
    left_out: set[str] = set()
    for item in items:
        if item.get_closest_marker("gpu"):
            continue
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.sample(NOTEBOOKS))
            families.setdefault("notebooks", []).append(item)
        elif item.get_closest_marker("slow"):
            left_out.add(item.nodeid)
        elif item.get_closest_marker("sample"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for family in families.values():
        count, last = family[0].get_closest_marker("sample").args[0], len(family) - 1
        step = last / max(count - 1, 1)
        kept = {round(number * step) for number in range(count)} if last >= count else set(range(last + 1))
        left_out |= {item.nodeid for number, item in enumerate(family) if number not in kept}
    runs: list[pytest.Item] = []
    passed_over: list[pytest.Item] = []
    for item in items:
        (runs if (item.nodeid in left_out) is (chosen == "rest") else passed_over).append(item)
    config.hook.pytest_deselected(items=passed_over)
    items[:] = runs


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leaves what is there before the first test out of collections: thousands of tests, and all of PyTorch."""
    if len(session.items) < 1000:
        return
    import hypothesis  # noqa: F401 - looks for referrers when it is imported, which must not be frozen yet

    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or nanobind would report what the interpreter's last collection leaves as leaks


class Notebooks:
    """Notebooks run with the settings that users have."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with pytest.MonkeyPatch.context() as patch:
            if item.path.suffix == ".ipynb":
                patch.delenv("CUDNN_SDPA_CPU_CHECKS")
            return (yield)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Notebooks())
    os.environ["CUDNN_SDPA_PLAN_DIR"] = "off"  # not the user's plans; a test that needs a store creates its own
    # No compiler in the background; tests of the native module start it.
    os.environ["CUDNN_SDPA_NATIVE"] = os.environ.get("CUDNN_SDPA_TEST_NATIVE", "off")
    os.environ["CUDNN_SDPA_CPU_CHECKS"] = "h200,any-dtype"  # many compare with PyTorch in float32
    if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; one thread each is the fastest
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same for processes that tests start, and for notebooks


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """Every test draws its own random values, the same in every run."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture
def deterministic_algorithms() -> Callable[[], AbstractContextManager[None]]:
    """Enables PyTorch's deterministic algorithms within a `with` statement."""

    @contextmanager
    def on() -> Iterator[None]:
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    return on


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes of one gloo group; see `processes`."""
    yield from _ranks(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four of them, for tests marked `slow`."""
    yield from _ranks(4)


def _ranks(count: int) -> Iterator[Ranks]:
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    processes = Ranks(count)
    yield processes
    processes.end()


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Runs code in a separate process; variables set to None are removed from its environment.

    With `fresh=True` the interpreter is a new one, otherwise it has PyTorch already (see `forked_python`).
    """

    def run(
        code: str, *arguments: str, check: bool = True, fresh: bool = False, **environment: str | None
    ) -> subprocess.CompletedProcess:
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *SEARCH_PATH]), **environment}
        variables = {name: value for name, value in variables.items() if value is not None}
        if fresh:
            result = subprocess.run(
                [sys.executable, "-c", code, *arguments],
                cwd=tmp_path,
                env=variables,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
        else:
            result = forked_python.run(["-c", code, *arguments], cwd=tmp_path, env=variables)
        if check:
            assert result.returncode == 0, result.stderr
        return result

    return run
