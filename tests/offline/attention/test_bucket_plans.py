"""Bucket plans: cuDNN has one wherever it has one for the exact shape."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense.forward import Bucket
from cudnn_sdpa.attention.dense.specs import ForwardSpec
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.offline.planner import engine_offline, plan_offline

CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window_size": {"is_causal": True, "window_left": 40},
    "window both ways": {"window_left": 40, "window_right": 8},
    "bottom-right": {"rows": (100, 300), "is_causal": True, "causal_alignment": "bottom_right"},
    "single query": {"rows": (1, 300)},
    "head dim 128": {"dim": 128, "is_causal": True},
    "head dim 256": {"dim": 256},
    "float16": {"dtype": torch.float16, "is_causal": True},
}


def bucket(layout, rows=(100, 100), dim=64, dtype=torch.bfloat16, heads=(4, 2), **options):
    def make(heads, rows):
        shape = (2, rows, heads, dim) if layout == "bshd" else (2, heads, rows, dim)
        x = torch.empty(shape, dtype=dtype, device="meta")
        return x.transpose(1, 2) if layout == "bshd" else x

    q, k = make(heads[0], rows[0]), make(heads[1], rows[1])
    found = Bucket.of(ForwardSpec.of(from_fields(ForwardArguments, q, k, k, **options)))
    assert found is not None
    return found


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("gpu", ["a100", "l40s", "h200", "b200", "rtx5090"])
def test_there_is_an_engine(can_plan, gpu, name, layout):  # noqa: ARG001
    properties = load_properties(gpu)
    of = bucket(layout, **CALLS[name])
    key = of.key(Target.from_properties(properties), None)
    assert key is not None
    assert engine_offline(key, properties).startswith("eng")


@pytest.mark.slow
def test_the_workspace_does_not_grow_with_the_bucket(h200):
    target = Target.from_properties(h200)
    for rows in ((100, 100), (60000, 60000)):
        plan = plan_offline(bucket("bshd", rows=rows, is_causal=True).key(target, None), h200)
        assert plan.workspace < 1 << 20
