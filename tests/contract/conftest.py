"""The contract suite runs on the fake GPU: every call plans, launches and differentiates as on a real one."""

from __future__ import annotations

import functools
import heapq
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping

import pytest
from fake_gpu import gpu_on_the_cpu
from native_way import native_way
from selection import hash_of

import cudnn_sdpa
from contract.operations import OPERATIONS, Example

#: How many tests of a module `make test` runs each example with.
OF_EACH_EXAMPLE = 2


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
    """Each test runs with the examples that it concerns, of which `make test` takes a few: see `_is_quick`."""
    yield
    if "example" not in metafunc.fixturenames:
        return
    name, test = metafunc.definition.originalname, metafunc.definition

    def is_concerned(given: Mapping[str, object]) -> bool:
        is_never_native = given["way"] == "native" and given.get("call") == "cold"
        return str(given["example"]) in _examples_of(metafunc.function) and not is_never_native

    metafunc._calls[:] = calls = [call for call in metafunc._calls if is_concerned(call.params)]
    if name == "test_values" or test.get_closest_marker("sample"):
        return
    calls.sort(key=lambda call: hash_of(name, call.id))
    first_of = {call.params["example"]: call for call in reversed(calls)}
    first_of = {example: call for example, call in first_of.items() if call is calls[0] or _is_quick(metafunc, example)}
    for call in calls:
        if first_of.get(call.params["example"]) is not call:
            call.marks.append(pytest.mark.slow.mark)


def _is_quick(metafunc: pytest.Metafunc, example: str) -> bool:
    """Whether a test is one of the few of its module that `make test` runs with an example, chosen by a hash.

    So there are such for every example, and they stay if examples and tests come and go.
    """
    functions = (x for name, x in vars(metafunc.module).items() if name.startswith("test_"))
    names = (x.__name__ for x in functions if example in _examples_of(x) and "sample" not in _marks_of(x))
    chosen = heapq.nsmallest(OF_EACH_EXAMPLE, names, key=lambda name: hash_of(name, example))
    return metafunc.definition.originalname in chosen


def _marks_of(test: Callable[..., None]) -> set[str]:
    return {mark.name for mark in getattr(test, "pytestmark", ())}


@functools.cache
def _examples_of(test: Callable[..., None]) -> list[str]:
    arguments = inspect.signature(test).parameters
    if not arguments.keys() & {"example", "call", "attention"}:
        return []
    differentiates = "differentiates" in _marks_of(test)
    return [
        name
        for name, example in OPERATIONS.items()
        if (example.is_attention or "attention" not in arguments) and (example.differentiable or not differentiates)
    ]
