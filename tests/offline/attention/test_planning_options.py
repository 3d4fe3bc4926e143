"""cuDNN accepts the graphs of every option of `sdpa` for an H200, forward and backward."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.attention import arguments
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields, output_layout
from cudnn_sdpa.attention.dense.specs import BackwardSpec, DenseSpec
from cudnn_sdpa.graph.key import Role
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline.planner import plan_offline

SQ, SKV = 128, 192
BOTTOM = {"causal_alignment": "bottom_right"}


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def int32():
    return meta(2, dtype=torch.int32)


BIAS, ROW = meta(2, 8, SQ, SKV), meta(2, 1, 1, SKV)
SINKS = meta(8, dtype=torch.float32)
DROPOUT = {"dropout_p": 0.1}
OPTIONS = {
    # name: (options, what the band of the graph is)
    "nothing": ({}, None),
    "causal": ({"is_causal": True}, (None, 0, False)),
    "bottom right": ({"is_causal": True, **BOTTOM}, (None, 0, True)),
    "window_size": ({"window_size": (40, 0)}, (40, 0, False)),
    "two-sided window": ({"window_size": (40, 9)}, (40, 9, False)),
    "window without a right bound": ({"window_size": (40, -1)}, (40, None, False)),
    "window, bottom right": ({"is_causal": True, "window_size": (40, -1), **BOTTOM}, (40, 0, True)),
    "bias": ({"attn_mask": BIAS}, None),
    "boolean mask": ({"attn_mask": meta(SQ, SKV, dtype=torch.bool)}, None),
    "bias in float32": ({"attn_mask": meta(8, SQ, SKV, dtype=torch.float32)}, None),
    "one row of bias": ({"attn_mask": ROW}, None),
    "bias, causal": ({"attn_mask": BIAS, "is_causal": True}, (None, 0, False)),
    "bias counted from the top left": ({"attn_mask": BIAS, "is_causal": True, **BOTTOM}, (None, SKV - SQ, False)),
    "linear biases": ({"is_causal": True, "alibi": True}, (None, 0, False)),
    "softcap": ({"softcap": 20.0}, None),
    "softcap, causal": ({"softcap": 20.0, "is_causal": True}, (None, 0, False)),
    "softcap, window": ({"softcap": 20.0, "window_size": (40, 3)}, (40, 3, False)),
    "softcap with lengths": ({"softcap": 20.0, "seq_lens_q": int32(), "seq_lens_kv": int32()}, None),
    "sinks": ({"sinks": SINKS, "is_causal": True, "window_size": (40, 0)}, (40, 0, False)),
    "lengths": ({"seq_lens_q": int32(), "seq_lens_kv": int32(), "is_causal": True, **BOTTOM}, (None, 0, True)),
    "lengths with bias": ({"seq_lens_kv": int32(), "attn_mask": BIAS}, None),
    "dropout": ({**DROPOUT, "is_causal": True}, (None, 0, False)),
    "dropout counted from the top left": ({**DROPOUT, "is_causal": True, **BOTTOM}, (None, SKV - SQ, False)),
    "dropout with sinks and bias": ({**DROPOUT, "sinks": SINKS, "attn_mask": BIAS}, None),
}


@pytest.fixture(scope="module")
def plan_backward(h200):
    """The key and the plan of the gradients of an `sdpa` call on an H200."""

    def make(q, k, v, *, window_size=None, bias_gradient=False, **options):
        left, right = arguments.window_bounds(window_size)
        if options.get("dropout_p"):
            options["rng"] = meta(2, dtype=torch.int64)
        call = from_fields(ForwardArguments, q, k, v, window_left=left, window_right=right, **options)
        arguments.check(call)
        out = output_layout(call)
        backward = BackwardSpec(DenseSpec.of(call), out, out, bias_gradient)
        key = backward.key(Target.from_properties(h200), None)
        return key, plan_offline(key, h200)

    return make


def names(operands):
    return [operand.name for operand in operands]


def assert_usable(plan):
    assert plan.engine.startswith("eng")
    assert len(plan.data) > 1000


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", OPTIONS)
def test_every_option_forward(plan, shapes, case):
    options, band = OPTIONS[case]
    key, made = plan(*shapes(lengths=(SQ, SKV)), return_lse=True, **options)
    assert_usable(made)
    assert key.option_values["band"] == band
    assert ("sink" in names(key.inputs)) == ("sinks" in options)
    assert ("bias" in names(key.inputs)) == ("attn_mask" in options)
    assert ("seed" in names(key.inputs)) == ("dropout_p" in options)
    assert ("softcap" in names(key.inputs)) == ("softcap" in options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", OPTIONS)
def test_every_option_backward(plan_backward, shapes, case):
    options, band = OPTIONS[case]
    wanted = {}
    if "attn_mask" in options and options["attn_mask"].is_floating_point():
        wanted["bias_gradient"] = True
    key, made = plan_backward(*shapes(lengths=(SQ, SKV)), **options, **wanted)
    assert_usable(made)
    assert key.option_values["band"] == band
    assert names(key.outputs)[:3] == ["grad_q", "grad_k", "grad_v"]
    assert ("grad_bias" in names(key.outputs)) == wanted.get("bias_gradient", False)
    assert "sink" not in names(key.inputs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", [{}, {"is_causal": True, **BOTTOM}, {"seq_lens_kv": int32()}], ids=str)
def test_a_sink_of_a_single_query_is_applied_to_the_plans_result(plan, shapes, more):
    tensors = shapes(lengths=(1, 2048), dims=(128, 128))
    key, made = plan(*tensors, sinks=SINKS, **more)
    assert_usable(made)
    assert "sink" not in names(key.inputs)
    assert names(key.outputs) == ["out", "lse"]
    assert key == plan(*tensors, return_lse=True, **more)[0]


def test_gradients_of_a_single_query_with_a_sink(plan_backward, shapes):
    key, made = plan_backward(*shapes(lengths=(1, 256)), sinks=SINKS)
    assert_usable(made)
    assert names(key.outputs) == ["grad_q", "grad_k", "grad_v"]


def test_partial_tiles_are_masked_in_backward_passes_of_older_cudnn(plan_backward, shapes):
    key, made = plan_backward(*shapes(lengths=(100, 77)))
    assert_usable(made)
    hidden = {operand.name: operand.fill for operand in key.inputs if operand.role is Role.FILL}
    assert hidden == ({"seq_len_q": 100, "seq_len_kv": 77} if key.target.cudnn < 92800 else {})


REFUSED = {
    "bottom right with lengths and bias": (
        {"is_causal": True, **BOTTOM, "attn_mask": BIAS, "seq_lens_kv": int32()},
        "cannot be combined with attn_mask",
    ),
    "linear biases without a causal mask": ({"alibi": True}, "causal mask aligned top-left"),
    "linear biases, bottom right": ({"alibi": True, "is_causal": True, **BOTTOM}, "causal mask aligned top-left"),
    "linear biases with softcap": (
        {"alibi": True, "is_causal": True, "softcap": 20.0},
        "softcap and alibi cannot be combined",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_known_unsupported_calls_are_refused_without_planning(plan, plan_backward, shapes, case):
    options, reason = REFUSED[case]
    for make in (plan, plan_backward):
        with pytest.raises(UnsupportedError, match=reason) as caught:
            make(*shapes(lengths=(SQ, SKV)), **options)
        assert "attn_mask" in caught.value.suggestion


def test_gradients_that_would_be_wrong_or_have_no_kernel_are_refused(plan_backward, shapes):
    with pytest.raises(UnsupportedError, match="wrong gradients of attn_mask"):
        plan_backward(*shapes(lengths=(SQ, SKV)), attn_mask=BIAS, softcap=20.0, bias_gradient=True)
    with pytest.raises(UnsupportedError, match="head dims 264 and 264"):
        plan_backward(*shapes(dims=(264, 264)))
    assert_usable(plan_backward(*shapes(lengths=(SQ, SKV)), attn_mask=BIAS, softcap=20.0)[1])
