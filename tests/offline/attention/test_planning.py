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


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("with_lengths", ["none", "keys", "queries and keys"])
@pytest.mark.parametrize("return_lse", [False, True], ids=["", "lse"])
def test_every_option(plan, shapes, dtype, mask, with_lengths, return_lse):
    options = {**MASKS[mask], "return_lse": return_lse}
    if with_lengths != "none":
        options["seq_lens_kv"] = lengths()
    if with_lengths == "queries and keys":
        options["seq_lens_q"] = lengths()
    key, made = plan(*shapes(lengths=(128, 192), dtype=dtype), **options)
    assert_usable(made)
    band = None if mask == "dense" else (None, 0, mask == "bottom_right")
    assert key.option_values == {
        "band": band,
        "with_lse": return_lse,
        "alibi": False,
        "dropout_p": 0.0,
        "totals": None,
    }
    assert [operand.name for operand in key.inputs[:4]] == ["q", "k", "v", "scale"]
    assert len(key.inputs) == (4 if with_lengths == "none" else 6)
    assert len(key.outputs) == 1 + return_lse


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "packed", "sliced"])
@pytest.mark.parametrize("mask", ["dense", "top_left"])
def test_layouts(plan, shapes, layout, mask):
    q, k, v = shapes(layout=layout)
    key, made = plan(q, k, v, **MASKS[mask])
    assert_usable(made)
    assert key.inputs[0].layout.stride == q.stride()


def test_expanded_keys(plan, shapes):
    q, k, v = shapes(heads=(8, 1))
    _, made = plan(q, k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1))
    assert_usable(made)


@pytest.mark.sample(2)
@pytest.mark.parametrize("heads", [(8, 4), (8, 1), (32, 8), (7, 7), (6, 2), (1, 1), (71, 1)])
def test_grouped_heads(plan, shapes, heads):
    _, made = plan(*shapes(heads=heads), **MASKS["top_left"], return_lse=heads[0] % 2 == 0)
    assert_usable(made)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dim", [8, 16, 24, 40, 72, 96, 128, 136, 192, 256, 264, 512])
def test_head_dims(plan, shapes, dim):
    _, made = plan(*shapes(dims=(dim, dim)), **MASKS["top_left"])
    assert_usable(made)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dims", [(192, 128), (64, 128), (128, 64), (96, 32), (40, 72), (256, 64)])
def test_head_dims_that_differ(plan, shapes, dims):
    key, made = plan(*shapes(dims=dims), **MASKS["top_left"], return_lse=True)
    assert_usable(made)
    assert key.outputs[0].layout.shape[3] == dims[1]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "sizes", [(127, 127), (1, 333), (333, 1), (77, 1001), (1001, 77), (2, 3), (1, 1), (2049, 2049)]
)
@pytest.mark.parametrize("mask", MASKS)
def test_odd_lengths(plan, shapes, sizes, mask):
    key, made = plan(*shapes(lengths=sizes, dims=(128, 128)), **MASKS[mask], return_lse=True)
    assert_usable(made)
    masked_rows = max(0, sizes[0] - sizes[1]) if mask == "bottom_right" else 0
    assert key.inputs[0].layout.shape[2] == sizes[0] - masked_rows
    assert key.outputs[1].layout.shape == (2, 8, sizes[0] - masked_rows, 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (16, 1)])
@pytest.mark.parametrize("return_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("which", [("kv",), ("q", "kv"), ("q",)], ids="+".join)
def test_decoding_over_a_cache(plan, shapes, heads, return_lse, which):
    q, k, v = shapes(batch=4, heads=heads, lengths=(1, 2112), dims=(128, 128))
    options = {f"seq_lens_{name}": lengths(4) for name in which}
    _, made = plan(q, k, v, return_lse=return_lse, **options)
    assert_usable(made)


@pytest.mark.slow
def test_one_query_aligned_bottom_right_is_the_decode_plan_without_a_mask(plan, shapes):
    tensors = shapes(heads=(32, 8), lengths=(1, 2048), dims=(128, 128))
    key, made = plan(*tensors)
    causal_key, causal = plan(*tensors, **MASKS["bottom_right"])
    assert causal_key == key
    assert causal.engine == made.engine
    _, prefill = plan(*shapes(heads=(32, 8), lengths=(2048, 2048), dims=(128, 128)))
    assert prefill.engine != made.engine


@pytest.mark.slow
def test_equivalent_options_share_a_key(plan, shapes):
    square = shapes(lengths=(96, 96))
    assert plan(*square, **MASKS["top_left"])[0] == plan(*square, **MASKS["bottom_right"])[0]
    assert plan(*square, scale=0.25)[0] == plan(*square)[0]
    assert plan(*square, causal_alignment="bottom_right")[0] == plan(*square)[0]


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
