"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from float64_reference import attend
from torch import Tensor

import cudnn_sdpa

#: (rtol, atol) of a computation in at least float32 that is rounded once to the dtype.
TOLERANCES = {
    torch.float16: (1e-3, 5e-5),
    torch.bfloat16: (8e-3, 5e-5),
    torch.float32: (2e-5, 5e-6),
    torch.float64: (1e-11, 1e-12),
}


@pytest.fixture(scope="session")
def expected_attention() -> Callable[..., tuple[Tensor, Tensor]]:
    def exact(*tensors: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        return attend(*(x.double() for x in tensors), **options)

    return exact


@pytest.fixture(scope="session")
def assert_rounded() -> Callable[[Tensor, Tensor], None]:
    """Asserts that a tensor is a float64 one, up to the rounding of its dtype."""

    def check(actual: Tensor, expected: Tensor) -> None:
        rtol, atol = TOLERANCES[actual.dtype]
        torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)

    return check


@pytest.fixture
def reference_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disables the GPU checks of CPU tensors, here and in processes that the test starts.

    For tests of the reference's mathematics where no GPU, or not the default one, has a kernel.
    """
    with cudnn_sdpa.cpu_checks(None):
        monkeypatch.setenv("CUDNN_SDPA_CPU_CHECKS", "none")
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Dynamo without what other tests have compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
