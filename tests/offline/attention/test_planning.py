"""cuDNN accepts the graphs of `sdpa` for an H200: every option, and a sample of shapes."""

from __future__ import annotations

import re

import pytest
import torch

from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.attention.dense.explain import describe_sdpa
from cudnn_sdpa.attention.support.rules import MAX_HEAD_DIM
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline.planner import plan_offline

MASKS = {
    "dense": {},
    "top_left": {"is_causal": True},
    "bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
}


def lengths(batch=2):
    return torch.empty(batch, dtype=torch.int32, device="meta")


def assert_usable(plan):
    assert plan.engine.startswith("eng")
    assert plan.knobs
    assert all(isinstance(value, int) for value in plan.knobs.values())
    assert plan.workspace >= 0
    assert 0 < plan.build_seconds < 60
    assert len(plan.data) > 1000
    assert "libcudnn" in plan.libraries


@pytest.mark.slow
def test_plans_of_different_keys_are_different(plan, shapes):
    variants = [
        (shapes(), {}),
        (shapes(lengths=(160, 160)), {}),
        (shapes(batch=3), {}),
        (shapes(dtype=torch.float16), {}),
        (shapes(layout="bshd"), {}),
        (shapes(), MASKS["top_left"]),
        (shapes(), {"return_lse": True}),
        (shapes(), {"seq_lens_kv": lengths()}),
    ]
    made = [plan(*tensors, **options) for tensors, options in variants]
    assert len({key for key, _ in made}) == len(variants)
    assert len({without_graph_id(plan.data) for _, plan in made}) == len(variants)


def without_graph_id(data):
    """A serialized plan without the id that counts the graphs of its process."""
    return re.sub(rb"i\x03gid([iU].|I..|l....)", b"", data, count=1, flags=re.DOTALL)


def test_the_same_key_gives_the_same_plan_again(plan, shapes):
    (one_key, one), (other_key, other) = plan(*shapes()), plan(*shapes())
    assert one_key == other_key
    assert without_graph_id(one.data) == without_graph_id(other.data)
    assert (one.engine, one.knobs, one.workspace) == (other.engine, other.knobs, other.workspace)


def test_cudnns_reasons_are_in_the_error(shapes, h200):
    properties = {**h200, "maxSharedMemoryPerBlockOptin": 0}
    key = describe_sdpa(*shapes()).key(Target.from_properties(properties), None)
    with pytest.raises(UnsupportedError) as caught:
        plan_offline(key, properties)
    assert any("SHARED_MEMORY" in text for text in caught.value.reasons)
    assert not any("python engines" in text for text in caught.value.reasons)


def test_the_error_for_an_old_gpu_names_the_gpu_and_a_remedy(shapes, h200):
    target = Target.from_properties({**h200, "deviceVer": 750, "deviceName": "Tesla T4"})
    with pytest.raises(UnsupportedError, match=r"Tesla T4 .* has compute capability 7\.5.* needs 8\.0") as caught:
        describe_sdpa(*shapes()).key(target, None)
    assert caught.value.suggestion


def test_head_dims_over_the_limit_are_refused_with_a_reason(plan, shapes):
    for dims in [(MAX_HEAD_DIM + 8, 64), (64, MAX_HEAD_DIM + 8)]:
        with pytest.raises(UnsupportedError, match=f"head dim {MAX_HEAD_DIM + 8} is over {MAX_HEAD_DIM}") as caught:
            plan(*shapes(dims=dims))
        assert str(MAX_HEAD_DIM) in caught.value.suggestion
    assert_usable(plan(*shapes(dims=(MAX_HEAD_DIM, MAX_HEAD_DIM)))[1])


def test_bottom_right_with_lengths_and_more_queries_than_keys(plan, shapes):
    key, made = plan(*shapes(lengths=(128, 100)), **MASKS["bottom_right"], seq_lens_kv=lengths())
    assert_usable(made)
    assert key.option_values["band"] == (None, 0, True)
    assert key.inputs[0].layout.shape[2] == 128  # which rows are fully masked depends on the lengths
