"""Known bugs of cuDNN: which plans they affect, which avoid them, and that affected plans are refused."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields, output_layout
from cudnn_sdpa.attention.dense.specs import BackwardSpec, DenseSpec, ForwardSpec
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.attention.varlen.specs import spec_of
from cudnn_sdpa.fused.conv_graphs import channels_last, conv_dgrad, conv_wgrad, convolution
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.backend import GraphBuilder
from cudnn_sdpa.graph.diagnostics import SourceLocation
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.providers import FLASH4, FRONTEND, OWN


def target(cudnn=91900, sm=90):
    return Target((("deviceVer", sm * 10), ("multiProcessorCount", 132)), cudnn, "1.32.0", "a GPU")


def call(sq=100, skv=120, batch=2, heads=(4, 2), **options):
    def make(heads, length):
        return torch.empty(batch, heads, length, 64, dtype=torch.bfloat16, device="meta")

    return from_fields(ForwardArguments, make(heads[0], sq), make(heads[1], skv), make(heads[1], skv), **options)


def forward(of, **where):
    return ForwardSpec.of(of).key(target(**where), None)


def backward(of, *, by_mask=False, **where):
    out = TensorLayout.of(of.q)
    return BackwardSpec(DenseSpec.of(of), out, out, by_mask).key(target(**where), None)


def varlen(*, grouped=True):
    q = torch.empty(50, 4, 64, dtype=torch.bfloat16, device="meta")
    kv = q[:, : 2 if grouped else 4]
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    return VarlenArguments(q, kv, kv, None, ends, None, None, 30, 30)


def without(key, *names):
    return dataclasses.replace(key, inputs=tuple(operand for operand in key.inputs if operand.name not in names))


def faults(key):
    return [issue.bug for issue in known_issues.concerning(key)]


def test_partial_tiles_are_masked_in_the_backward_pass_of_the_versions_that_need_it():
    for sq, skv in [(100, 128), (128, 100), (1, 128), (128, 1)]:
        key = backward(call(sq, skv))
        assert {"seq_len_q", "seq_len_kv"} <= {operand.name for operand in key.inputs}
        assert any("very negative" in fault for fault in faults(key))
        known_issues.check(key)
        with pytest.raises(UnsupportedError, match="very negative"):
            known_issues.check(without(key, "seq_len_q", "seq_len_kv"))
    whole, fixed = backward(call(128, 256)), backward(call(100, 120), cudnn=92800)
    for key in (whole, fixed):
        assert not any(operand.name.startswith("seq_len") for operand in key.inputs)
        assert not any("very negative" in fault for fault in faults(key))


@pytest.mark.parametrize(("cudnn", "sm", "refused"), [(91900, 100, True), (92600, 100, False), (91900, 90, False)])
def test_decoding_on_blackwell_is_refused_on_the_versions_that_corrupt_it(cudnn, sm, refused):
    key = forward(call(1, 128), cudnn=cudnn, sm=sm)
    if not refused:
        return known_issues.check(key)
    with pytest.raises(UnsupportedError, match="pytorch#193893"):
        known_issues.check(key)
    return None


def test_a_planner_crash_is_avoided():
    one = call(1, 128, batch=1, heads=(1, 1))
    with pytest.raises(UnsupportedError, match="crashes"):
        known_issues.check(backward(one, cudnn=92600))
    with pytest.raises(UnsupportedError, match="crashes"):  # 9.28 too, seen offline
        known_issues.check(backward(one, cudnn=92800))
    known_issues.check(backward(one, cudnn=92500))


def test_a_one_row_mask_is_expanded():
    mask = torch.empty(1, 2, 1, 120, dtype=torch.bfloat16, device="meta")
    key = backward(call(attn_mask=mask, heads=(2, 2)))
    (bias,) = [operand for operand in key.inputs if operand.name == "bias"]
    assert bias.layout.shape[2] == 100
    assert bias.layout.stride[2] == 0
    known_issues.check(key)
    row = dataclasses.replace(bias, layout=TensorLayout.contiguous((1, 2, 1, 120), torch.bfloat16))
    wrong = dataclasses.replace(key, inputs=tuple(row if operand is bias else operand for operand in key.inputs))
    with pytest.raises(UnsupportedError, match="misread"):
        known_issues.check(wrong)


@pytest.mark.parametrize("shape", [(2, 2, 100, 1), (1, 1, 100, 1), (2, 1, 1, 1), (1, 1, 1, 1)], ids=str)
def test_no_plan_has_a_mask_over_one_key(shape):
    mask = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    with pytest.raises(UnsupportedError, match="a single key is misread"):
        known_issues.check(forward(call(attn_mask=mask, heads=(2, 2), skv=1)))


def test_packed_plans_avoid_known_bugs():
    of = varlen()
    spec, layout = spec_of(of), output_layout(of)
    for key in (
        spec.forward_key(layout, True, target(), None),
        spec.backward_key(layout, layout, target(), None),
    ):
        assert any("overflow 32 bits" in fault for fault in faults(key))
        known_issues.check(key)


def test_bugs_of_cuda_graphs_are_refused_in_captures_only():
    key = forward(call(2048, 2048, window_left=100, window_right=0), cudnn=91400)
    assert "TransformerEngine#2344" in known_issues.not_in_capture(key)
    known_issues.check(key)
    assert known_issues.not_in_capture(forward(call(2048, 2048, is_causal=True), cudnn=91400)) == ""
    assert known_issues.not_in_capture(forward(call(2048, 2048, window_left=100, window_right=0))) == ""


def test_custom_graphs_are_not_affected():
    key = dataclasses.replace(forward(call()), operation="somebody.else:sdpa_forward")
    assert known_issues.concerning(key) == []


def of_provider(provider, **more):
    concerns = {"concerns": lambda _: True, **more}
    return known_issues.KnownIssue("wrong sums", "seen on an H200", "refused", provider=provider, **concerns)


@pytest.mark.parametrize("table", ["ATTENTION_ISSUES", "FUSED_ISSUES"])
def test_bugs_of_other_providers_concern_their_plans_alone(table, monkeypatch):
    """Whichever table has the row, whatever cuDNN's version."""
    monkeypatch.setattr(known_issues, table, (of_provider("fa4"), of_provider("own", avoids=lambda _: True)))
    for operation in ("cudnn_sdpa.attention.dense.graphs:sdpa_forward", "cudnn_sdpa.attention.flash4.plans:any"):
        for cudnn in (0, 91900, 99999):
            key = dataclasses.replace(forward(call(), cudnn=cudnn or 91900), operation=operation)
            fa4, own, other = (dataclasses.replace(key, provider=x) for x in ("fa4", "own", "frontend"))
            assert known_issues.concerning(other) == []
            assert faults(fa4) == faults(own) == ["wrong sums"]
            known_issues.check(own)
            with pytest.raises(UnsupportedError, match=r"kernels of 'fa4' is not supported here:\n  - wrong sums"):
                known_issues.check(fa4)


@pytest.mark.parametrize("versions", [{"first": 91900}, {"fixed": 92800}])
def test_bugs_of_other_providers_have_no_version_of_cudnns(versions):
    with pytest.raises(ValueError, match="versions of cuDNN, which say nothing of 'fa4': wrong sums"):
        of_provider("fa4", **versions)


ALL_ISSUES = (*known_issues.ATTENTION_ISSUES, *known_issues.FUSED_ISSUES)


@pytest.mark.parametrize("issue", ALL_ISSUES, ids=lambda issue: issue.bug[:40])
def test_every_known_issue_is_complete(issue):
    assert issue.first < issue.fixed
    assert issue.provider in (None, OWN, FLASH4, FRONTEND)
    text = str(issue)
    assert issue.bug in text
    assert issue.treatment in text
    assert re.search(r"#\d|on \d+\.\d", issue.source)


@pytest.mark.parametrize(
    ("options", "safe"),
    [
        ({"is_causal": True}, True),
        ({"is_causal": True, "causal_alignment": "bottom_right"}, True),
        ({}, False),
        ({"is_causal": True, "window_left": 64}, False),
        ({"is_causal": True, "seq_lens_kv": torch.empty(2, dtype=torch.int32, device="meta")}, False),
        ({"attn_mask": torch.empty(2, 4, 2000, 2048, dtype=torch.bfloat16, device="meta")}, False),
        ({"softcap": 5.0, "seq_lens_kv": torch.empty(2, dtype=torch.int32, device="meta")}, False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_captures_with_broken_replays_are_refused_except_causal_masks(options, safe):
    key = forward(call(2000, 2048, **options), cudnn=91400)
    assert (known_issues.not_in_capture(key) == "") is safe
    assert known_issues.not_in_capture(forward(call(2000, 2048, **options), cudnn=91500)) == ""
    assert known_issues.not_in_capture(forward(call(1000, 1024), cudnn=91400)) == ""


def test_large_plans_are_refused_by_the_extent_of_any_tensor():
    key = backward(call(100, 120))
    known_issues.check(key)
    for name in ("q", "k", "v", "out", "grad_out"):
        inputs = list(key.inputs)
        at = next(number for number, operand in enumerate(inputs) if operand.name == name)
        layout = inputs[at].layout
        far = dataclasses.replace(layout, stride=(2**31, *layout.stride[1:]))
        inputs[at] = dataclasses.replace(inputs[at], layout=far)
        with pytest.raises(UnsupportedError, match="beyond 2"):
            known_issues.check(dataclasses.replace(key, inputs=tuple(inputs)))


def test_one_dimensional_lengths_are_refused():
    key = forward(call(seq_lens_kv=torch.empty(2, dtype=torch.int32, device="meta")))
    known_issues.check(key)
    flat = tuple(
        dataclasses.replace(operand, layout=TensorLayout((2,), (1,), torch.int32))
        if operand.name.startswith("seq_len")
        else operand
        for operand in key.inputs
    )
    with pytest.raises(UnsupportedError, match="1-D tensors"):
        known_issues.check(dataclasses.replace(key, inputs=flat))


@pytest.mark.parametrize(("sm", "dim", "refused"), [(100, 256, True), (100, 192, False), (90, 256, False)])
def test_wide_heads_in_fp8_are_refused_on_blackwell(sm, dim, refused):
    key = forward(call(), sm=sm)
    wide = TensorLayout.contiguous((2, 4, 100, dim), torch.float8_e4m3fn)
    inputs = (dataclasses.replace(key.inputs[0], layout=wide), *key.inputs[1:])
    found = faults(dataclasses.replace(key, inputs=inputs))
    assert any("FP8" in fault for fault in found) is refused


@pytest.mark.parametrize(("queries", "sm", "refused"), [(40, 90, True), (48, 90, False), (40, 100, False)])
def test_fp8_gradients_of_partial_rows_of_queries_are_refused_on_hopper(queries, sm, refused):
    """What `workarounds` pads: a plan that it has not padded computes wrong gradients."""
    key = backward(call(sq=queries, skv=128))
    key = dataclasses.replace(key, target=target(sm=sm))
    in_fp8 = dataclasses.replace(key.inputs[0].layout, dtype=torch.float8_e4m3fn)
    inputs = (dataclasses.replace(key.inputs[0], layout=in_fp8), *key.inputs[1:])
    key = dataclasses.replace(key, inputs=inputs)
    if not refused:
        return known_issues.check(key)
    with pytest.raises(UnsupportedError, match="not a multiple of 16"):
        known_issues.check(key)
    return None


def convolution_key(rank, dtype, cudnn, which="convolution", size=3):
    shape, filters = (2, 8, *(9,) * rank), (16, 8, *(size,) * rank)
    x, weight = (channels_last(torch.empty(s, dtype=dtype, device="meta")) for s in (shape, filters))
    sizes = {"stride": (1,) * rank, "padding": (0,) * rank, "dilation": (1,) * rank}
    (y,) = convolution.outputs((x, weight, None), {**sizes, "groups": 1, "activation": None})
    calls = {
        "convolution": (convolution, (x, weight), {"groups": 1, "activation": None}),
        "conv_dgrad": (conv_dgrad, (y, weight), {"shape": shape[1:]}),
        "conv_wgrad": (conv_wgrad, (y, x), {"shape": filters}),
    }
    function, operands, options = calls[which]
    return function.describe(*operands, **sizes, **options).key(target(cudnn=cudnn), None)


@pytest.mark.parametrize("which", ["convolution", "conv_dgrad", "conv_wgrad"])
@pytest.mark.parametrize(
    ("dtype", "first", "fixed", "source"),
    [
        (torch.bfloat16, 90800, 91500, "pytorch#163539"),
        (torch.float16, 90800, 91500, "pytorch#163539"),
        (torch.float32, 91002, 91600, "pytorch#167024"),
    ],
)
def test_convolutions_in_3d_are_refused_on_the_versions_that_compute_them_wrongly(dtype, first, fixed, source, which):
    for cudnn in (first, fixed - 100):
        with pytest.raises(UnsupportedError, match=source) as error:
            known_issues.check(convolution_key(3, dtype, cudnn, which))
        assert "or newer, or PyTorch's own functions" in str(error.value)
        known_issues.check(convolution_key(2, dtype, cudnn, which))
        if dtype is not torch.float32:
            known_issues.check(convolution_key(3, dtype, cudnn, which, size=1))
    for cudnn in (first - 1, fixed):
        known_issues.check(convolution_key(3, dtype, cudnn, which))


@pytest.mark.parametrize(
    ("sm", "cudnn", "graph", "allowed"),
    [
        *((86, 92301, "conv_fprop", False), (86, 92400, "conv_fprop", True), (86, 92200, "conv_fprop", True)),
        *((90, 92301, "conv_fprop", True), (86, 92301, "conv_dgrad", True)),
    ],
)
def test_engine_5_of_convolutions_is_not_deterministic_on_sm_86(sm, cudnn, graph, allowed):
    built = object.__new__(GraphBuilder)
    built.locations = [SourceLocation(operation=graph, file="", line=0)]
    built.only_deterministic(sm, cudnn)
    assert built._is_allowed("eng5", {}) is allowed
    assert built._is_allowed("eng6", {})
