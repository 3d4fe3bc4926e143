"""`record_plans` on the CPU, for this GPU, records the plans that the same calls use on it."""

from __future__ import annotations

import json

import pytest

import cudnn_sdpa
from cudnn_sdpa.graph.target import live_properties
from tests.unit.opcheck_calls import CALLS, HalfInputs


@pytest.mark.parametrize("name", [name for name in CALLS if name != "tokens on pages"])
def test_recorded_plans_are_those_of_the_gpu(name, tmp_path):
    path = tmp_path / "device.json"
    path.write_text(json.dumps(live_properties(0)))
    with cudnn_sdpa.shape_policy("exact"), cudnn_sdpa.record_plans() as used:
        CALLS[name](HalfInputs("cuda"))
    with cudnn_sdpa.record_plans(target=str(path)) as recorded:
        CALLS[name](HalfInputs("cpu"))
    assert used.plans
    assert [plan for plan in used.plans if plan not in recorded.plans] == []
    assert len(recorded) == len(used) + ("into a tensor" in name)  # both plans are recorded, with and without an LSE
