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
from processes import Ranks, check_for_a_cudnn_that_has_sinks
from selection import is_of_shard, is_quick, shard_of, spread

import cudnn_sdpa

ROOT = Path(__file__).parent.parent
GPU = ROOT / "tests" / "gpu"

#: Folders of tests of which `make test` runs FEW parametrizations, unless a mark says how many; of others it runs all.
SAMPLED = {*(ROOT / "tests" / "unit").glob("*/"), ROOT / "tests" / "offline"}
FEW = 4
SEARCH_PATH = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]

RunPython = Callable[..., subprocess.CompletedProcess[str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    help_ = "quick: what `make test` runs (the default); rest: what it leaves out; all: both"
    parser.addoption("--tests", choices=["quick", "rest", "all"], default="quick", help=help_)
    help_ = "1/2: the first of two shards of the tests, chosen by a hash of their names"
    parser.addoption("--shard", type=shard_of, default=(1, 1), metavar="NUMBER/COUNT", help=help_)


def _chosen(config: pytest.Config) -> str:
    """Which tests run; all that are named on the command line."""
    return "all" if any("::" in argument for argument in config.args) else config.getoption("--tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost, after all others
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, None, None]:
    """Of a test marked `sample(n)`, and of those of `SAMPLED`, all but n parametrizations are slow.

    What does not run is taken out here, before it is made into tests, which takes longer than to run many of them.
    """
    yield
    chosen, calls, test = _chosen(metafunc.config), metafunc._calls, metafunc.definition
    if chosen == "all" or not calls or GPU in test.path.parents:
        return
    sample, few = test.get_closest_marker("sample"), not SAMPLED.isdisjoint(test.path.parents)
    if sample or few:
        quick = list(filter(is_quick, calls))
        kept = {id(call) for call in spread(test.originalname, quick, sample.args[0] if sample else FEW)}
        for call in quick:
            if id(call) not in kept:
                call.marks.append(pytest.mark.slow.mark)
    is_slow = test.get_closest_marker("slow") is not None
    runs = [call for call in calls if (is_quick(call) and not is_slow) is (chosen == "quick")]
    calls[:] = runs or calls[:1]  # none at all would be a test without arguments; the one is left out below


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked `slow`, and all notebooks, or all others; then those of other shards."""
    chosen, shard = _chosen(config), config.getoption("--shard")

    def runs(item: pytest.Item) -> bool:
        is_slow = item.get_closest_marker("slow") is not None or item.path.suffix == ".ipynb"
        if chosen != "all" and is_slow is (chosen == "quick") and not item.get_closest_marker("gpu"):
            return False
        return is_of_shard(item.nodeid, shard)

    passed_over = [item for item in items if not runs(item)]
    if passed_over:
        config.hook.pytest_deselected(items=passed_over)
        items[:] = [item for item in items if runs(item)]


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
    # Not the user's plans: a test that needs a store creates its own. What takes long to compile may be given.
    given = os.environ.get("CUDNN_SDPA_TEST_PLANS", "off")
    os.environ["CUDNN_SDPA_PLAN_DIR"] = given if "CUDNN_SDPA_PROVIDERS" in os.environ else "off"
    # No compiler in the background; tests of the native module start it.
    os.environ["CUDNN_SDPA_NATIVE"] = os.environ.get("CUDNN_SDPA_TEST_NATIVE", "off")
    # Many compare with PyTorch in float32, here and in processes that they start.
    os.environ["CUDNN_SDPA_CPU_CHECKS"] = "h200,any-dtype"
    cudnn_sdpa.cpu_checks("h200,any-dtype")
    if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; one thread each is the fastest
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same for processes that tests start, and for notebooks
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # which are processes: one for each core


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """Every test draws its own random values, the same in every run."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session", autouse=True)
def checked_for_a_cudnn_that_has_sinks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        check_for_a_cudnn_that_has_sinks(patch)
        yield


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


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    """Eight of them, which end with the module: they take 3 GB."""
    yield from _ranks(8)


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
