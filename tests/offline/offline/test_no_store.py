"""Planning for a GPU that is not in the machine stores nothing in the user's plan store."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("can_plan")


@pytest.mark.slow
def test_planning_offline_creates_no_store(run_python, tmp_path):
    code = """
import sys, torch, cudnn_sdpa
q = torch.empty(1, 8, 128, 64, dtype=torch.bfloat16)
report = cudnn_sdpa.explain(cudnn_sdpa.sdpa, q, q, q)
assert report.supported and report.engine and not report.loaded
print(report.engine)
"""
    cache = tmp_path / "cache"
    result = run_python(code, XDG_CACHE_HOME=str(cache), CUDNN_SDPA_PLAN_DIR=None)
    assert result.stdout.startswith("eng")
    made = [path.name for path in (cache / "cudnn_sdpa").iterdir()] if cache.exists() else []
    assert set(made) <= {"stand-in-driver"}
