"""The contract suite runs on the fake GPU: every call plans, launches and differentiates as on a real one."""

from __future__ import annotations

from collections.abc import Iterator

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make test` runs a few operations of each hazard, `make test-all` the others."""
    others = []
    for item in items:
        if "contract" not in item.path.parts:
            continue
        if "example" not in item.fixturenames:
            continue
        item.add_marker(pytest.mark.sample(OF_EACH_HAZARD))
        given = OPERATIONS[item.callspec.params["example"]]
        is_of_attention, differentiates = "attention" in item.fixturenames, item.get_closest_marker("differentiates")
        is_never_native = item.callspec.params["way"] == "native" and item.callspec.params.get("call") == "cold"
        if (
            (is_of_attention and not given.is_attention)
            or (differentiates and not given.differentiable)
            or is_never_native
        ):
            others.append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
