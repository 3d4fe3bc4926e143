"""Fixtures for planning with real cuDNN, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cudnn_sdpa import LibraryError
from cudnn_sdpa.attention.dense.explain import describe_sdpa
from cudnn_sdpa.graph import backend
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.offline import driver
from cudnn_sdpa.offline.planner import OfflinePlan, plan_offline
from cudnn_sdpa.plans import nvrtc as nvrtc_module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/offline/" in str(item.path):
            item.add_marker(pytest.mark.offline)


@pytest.fixture(scope="session")
def can_plan() -> None:
    """Skips, with the reason, where offline planning is impossible."""
    try:
        backend.cudnn()
    except LibraryError as error:
        pytest.skip(f"no usable cuDNN: {error}")
    if driver.compiler() is None and not driver.has_real_driver():
        pytest.skip("no C compiler to make the stand-in driver with, and no real driver")


@pytest.fixture
def nvrtc() -> None:
    try:
        nvrtc_module._nvrtc()
    except LibraryError as error:
        pytest.skip(f"no NVRTC: {error}")


@pytest.fixture(scope="session")
def h200(can_plan: None) -> dict[str, Any]:  # noqa: ARG001 - pytest fixtures have no other way
    return load_properties("h200")


Plan = Callable[..., tuple[PlanKey, OfflinePlan]]


@pytest.fixture(scope="session")
def plan(h200: dict[str, Any]) -> Plan:
    """The key and the plan of an `sdpa` call on an H200."""
    target = Target.from_properties(h200)

    def make(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[PlanKey, OfflinePlan]:
        key = describe_sdpa(q, k, v, **options).key(target, None)
        return key, plan_offline(key, h200)

    return make


@pytest.fixture(scope="session")
def shapes() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values as meta tensors: only their layout is needed."""

    def make(
        batch: int = 2,
        heads: tuple[int, int] = (8, 8),
        lengths: tuple[int, int] = (128, 128),
        dims: tuple[int, int] = (64, 64),
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "bhsd",
    ) -> tuple[Tensor, Tensor, Tensor]:
        def tensor(heads: int, length: int, dim: int) -> Tensor:
            if layout == "bshd":
                return torch.empty(batch, length, heads, dim, dtype=dtype, device="meta").transpose(1, 2)
            if layout == "sbhd":
                return torch.empty(length, batch, heads, dim, dtype=dtype, device="meta").permute(1, 2, 0, 3)
            if layout == "sliced":
                return torch.empty(batch, heads + 1, length + 3, 2 * dim, dtype=dtype, device="meta")[:, 1:, 3:, :dim]
            return torch.empty(batch, heads, length, dim, dtype=dtype, device="meta")

        if layout == "packed":
            total = heads[0] + 2 * heads[1]
            qkv = torch.empty(batch, lengths[0], total, dims[0], dtype=dtype, device="meta").transpose(1, 2)
            return qkv.split([heads[0], heads[1], heads[1]], dim=1)
        return (
            tensor(heads[0], lengths[0], dims[0]),
            tensor(heads[1], lengths[1], dims[0]),
            tensor(heads[1], lengths[1], dims[1]),
        )

    return make
