"""Fixtures for tests of calls and of what launches them."""

from __future__ import annotations

import pytest

from cudnn_sdpa.engine.launch import BoundPlan


@pytest.fixture
def launches_in_python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the plans that Python launches."""
    found: list[str] = []
    launch = BoundPlan.__call__

    def noted(bound: BoundPlan, *arguments: object, **options: object) -> object:
        found.append(bound.plan.key.name)
        return launch(bound, *arguments, **options)

    monkeypatch.setattr(BoundPlan, "__call__", noted)
    return found
