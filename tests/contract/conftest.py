"""The contract suite runs on the fake GPU: every call plans, launches and differentiates as on a real one."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping

import pytest
from fake_gpu import gpu_on_the_cpu
from native_way import native_way

import cudnn_sdpa
from contract.operations import OPERATIONS, Example

#: How many operations `make test` runs each hazard with.
OF_EACH_HAZARD = 3


@pytest.fixture(params=["python", "native"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whether calls are launched in Python or by the native module, once it knows them."""
    with native_way(on=request.param == "native"):
        yield request.param


@pytest.fixture(params=OPERATIONS)
def example(request: pytest.FixtureRequest, way: str) -> Iterator[Example]:  # noqa: ARG001
    """A call of each operation, with an empty plan cache."""
    found: Example = OPERATIONS[request.param]
    with gpu_on_the_cpu(found.compute), cudnn_sdpa.cpu_checks(None):
        yield found


@pytest.fixture(params=["cold", "warm"])
def call(request: pytest.FixtureRequest, example: Example) -> Example:
    """The same, as the first call of a process or after equal ones, with gradients and without."""
    if request.param == "warm":
        example.warm_up()
    return example


@pytest.fixture
def attention(call: Example) -> Example:
    """The same, of attention alone: for what only its arguments have."""
    return call


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, None, None]:
    """Each hazard runs with the operations that it concerns, of which `make test` takes a few."""
    yield
    if "example" not in metafunc.fixturenames:
        return
    test = metafunc.definition
    if test.get_closest_marker("sample") is None:
        test.add_marker(pytest.mark.sample(OF_EACH_HAZARD))
    is_of_attention, differentiates = "attention" in metafunc.fixturenames, test.get_closest_marker("differentiates")

    def is_concerned(given: Mapping[str, object]) -> bool:
        example = OPERATIONS[str(given["example"])]
        is_never_native = given["way"] == "native" and given.get("call") == "cold"
        return not (
            (is_of_attention and not example.is_attention)
            or (differentiates and not example.differentiable)
            or is_never_native
        )

    metafunc._calls[:] = [call for call in metafunc._calls if is_concerned(call.params)]
