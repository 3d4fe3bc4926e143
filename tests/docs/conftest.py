"""What users copy runs with the settings that they have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cudnn_sdpa


@pytest.fixture(autouse=True)
def default_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors are checked as by default, here and in processes that a test starts."""
    with cudnn_sdpa.cpu_checks("h200"):
        monkeypatch.delenv("CUDNN_SDPA_CPU_CHECKS")
        yield
