"""Fixtures of the benchmarks' tests: inputs on the CPU, and a fake clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from benchmarks.tools import cases, peers


@pytest.fixture
def cases_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks' inputs on the CPU, in float32: sums in bfloat16 differ there by more than on a GPU."""
    normal = cases.normal
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(cases, "normal", lambda *shape, **_: normal(*shape, dtype=torch.float32))


@pytest.fixture
def times_by_place() -> Callable[..., dict[str, float]]:
    """A fake clock: each call runs once; the n-th candidate takes n microseconds."""

    def times(calls: Mapping[str, Callable[[], object]], **_: object) -> dict[str, float]:
        for call in calls.values():
            call()
        return {name: float(place) for place, name in enumerate(calls, start=1)}

    return times


@pytest.fixture
def peers_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's backends on the CPU, which has none of the fast ones."""
    backends = dict.fromkeys(peers.PYTORCH_BACKENDS, torch.nn.attention.SDPBackend.MATH)
    monkeypatch.setattr(peers, "PYTORCH_BACKENDS", backends)
