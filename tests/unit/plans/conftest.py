"""Fixtures of the tests of plans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cudnn_sdpa import plan_cache
from cudnn_sdpa.plans.cache import DEFAULT_SIZE, PlanCache


@pytest.fixture
def global_cache() -> Iterator[PlanCache]:
    """The process's cache, empty, and restored afterwards."""
    plan_cache.clear()
    yield plan_cache
    plan_cache.clear()
    plan_cache.resize(DEFAULT_SIZE)
