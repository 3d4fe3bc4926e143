"""Accepted arguments: PyTorch's causal bias objects, NumPy scalars, sinks in half precision."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from float64_reference import attend, gradients
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import cudnn_sdpa
from cudnn_sdpa import (
    Fp8BackwardScales,
    Fp8Scales,
    OptionError,
    PagedKVCache,
    ShapeError,
    conv2d,
    fp8_attention,
    kernels,
    layer_norm,
    nn,
    rms_norm,
    scaled_dot_product_attention,
    sdpa,
    sdpa_backward,
    sdpa_fp8,
    sdpa_fp8_backward,
    sdpa_paged,
    sdpa_paged_varlen,
    sdpa_varlen,
    sdpa_varlen_backward,
)
from cudnn_sdpa.attention.dense.graphs import sdpa_forward
from cudnn_sdpa.engine.explain import describer_of
from cudnn_sdpa.graph.target import Target, load_properties

ENDS = torch.tensor([0, 4, 9], dtype=torch.int32)


def qkv(heads=(4, 4, 4), sq=5, skv=9):
    lengths = (sq, skv, skv)
    return [torch.randn(2, h, n, 8) for h, n in zip(heads, lengths, strict=True)]


@pytest.mark.parametrize(("make", "alignment"), [(causal_upper_left, "top_left"), (causal_lower_right, "bottom_right")])
def test_pytorchs_causal_bias_objects(make, alignment):
    q, k, v = qkv()
    bias, wanted = make(5, 9), attend(q, k, v, is_causal=True, causal_alignment=alignment)[0]
    for out in (scaled_dot_product_attention(q, k, v, bias), sdpa(q, k, v, attn_mask=bias)):
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.nn.functional.scaled_dot_product_attention(q, k, v, bias).double(), wanted, rtol=1e-5, atol=1e-5
    )
    q.requires_grad_()
    grad_out = torch.randn(2, 4, 5, 8)
    exact = gradients({"q": q.detach(), "k": k, "v": v}, grad_out, is_causal=True, causal_alignment=alignment)[2]["q"]
    (found,) = torch.autograd.grad(sdpa(q, k, v, attn_mask=bias), q, grad_out)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    with pytest.raises(OptionError, match="CausalBias"):
        sdpa(q, k, v, attn_mask=bias, is_causal=True)
    with pytest.raises(OptionError, match="window_size"):
        sdpa(q, k, v, attn_mask=bias, window_size=(2, 0))
    with pytest.raises(ShapeError, match="lengths"):
        sdpa(q, k, v, attn_mask=make(9, 9))
    with pytest.raises(OptionError, match="is_causal"):
        scaled_dot_product_attention(q, k, v, bias, is_causal=True)


@pytest.mark.parametrize("heads", [(12, 4, 6), (12, 6, 2), (12, 12, 3), (6, 1, 3), (6, 2, 1)])
def test_keys_and_values_with_different_head_counts(heads):
    q, k, v = qkv(heads)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, enable_gqa=True), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ShapeError, match="heads"):
        scaled_dot_product_attention(*qkv((12, 5, 4)), enable_gqa=True)
    if heads[1:] != (1, 3):
        with pytest.raises(ShapeError, match="heads"):
            sdpa(q, k, v)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64, int])
def test_numpy_scalars_and_integers_are_accepted(kind):
    q, k, v = qkv()
    for options in ({"scale": 2}, {"softcap": 3}, {"dropout_p": 0}):
        given = {name: kind(value) for name, value in options.items()}
        assert torch.equal(sdpa(q, k, v, **given), sdpa(q, k, v, **{n: float(x) for n, x in options.items()}))
        rows = torch.randn(9, 2, 8)
        packed = [sdpa_varlen(rows, rows, rows, ENDS, ENDS, 5, 5, **x) for x in (given, options)]
        assert torch.equal(*packed)
    with pytest.raises(OptionError, match="scale"):
        sdpa(q, k, v, scale=np.bool_(True))


def calls_with_a_scale():
    """Every public function that scales scores, as a function of the scale."""
    q, k, v = qkv()
    rows, single = torch.randn(9, 2, 8), torch.randn(2, 4, 1, 8)
    pages, table = torch.randn(4, 4, 16, 8), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    paged = single, pages, pages, table, torch.tensor([20, 9], dtype=torch.int32)
    packed = torch.randn(9, 4, 8), *paged[1:], ENDS, 5
    half = torch.randn(2, 4, 5, 16, dtype=torch.bfloat16)
    fp8, lse, one = half.to(torch.float8_e4m3fn), torch.zeros(2, 4, 5), torch.ones(1)
    cache = PagedKVCache(pages=2, page_size=16, heads=4, head_dim=8, dtype=torch.float32, device="cpu")
    step = cache.reserve([cache.add(), cache.add()])
    cache.append(step, single, single)
    fp8_scales, backward_scales = Fp8Scales(*[one] * 6), Fp8BackwardScales(*[one] * 12)
    return {
        "sdpa": lambda scale: sdpa(q, k, v, scale=scale),
        "sdpa with a mask": lambda scale: sdpa(q, k, v, scale=scale, attn_mask=torch.ones(5, 9, dtype=torch.bool)),
        "scaled_dot_product_attention": lambda scale: scaled_dot_product_attention(q, k, v, scale=scale),
        "sdpa_varlen": lambda scale: sdpa_varlen(rows, rows, rows, ENDS, ENDS, 5, 5, scale=scale),
        "sdpa_backward": lambda scale: sdpa_backward(q, q, lse, q, q, q, scale=scale),
        "sdpa_varlen_backward": lambda scale: sdpa_varlen_backward(
            rows, rows, torch.zeros(9, 2), rows, rows, rows, ENDS, ENDS, 5, 5, scale=scale
        ),
        "sdpa_paged": lambda scale: sdpa_paged(*paged, page_layout="HND", scale=scale),
        "sdpa_paged_varlen": lambda scale: sdpa_paged_varlen(*packed, page_layout="HND", scale=scale),
        "PagedKVCache.attend": lambda scale: cache.attend(step, single, scale=scale),
        "sdpa_fp8": lambda scale: sdpa_fp8(fp8, fp8, fp8, fp8_scales, scale=scale),
        "sdpa_fp8_backward": lambda scale: sdpa_fp8_backward(
            fp8, fp8, fp8, fp8, fp8, lse, backward_scales, scale=scale
        ),
        "fp8_attention": lambda scale: fp8_attention(half, half, half, scale=scale),
        "nn.Attention": lambda scale: nn.Attention(16, 2, scale=scale)(half.float().flatten(0, 1)),
        "nn.Fp8Attention": lambda scale: nn.Fp8Attention(scale=scale)(half, half, half),
    }


def test_every_function_with_a_scale_is_tested():
    tested = {name.split()[0].rpartition(".")[0] or name.split()[0] for name in calls_with_a_scale()}
    for name in cudnn_sdpa.__all__:
        function = getattr(cudnn_sdpa, name)
        parameters = inspect.signature(function).parameters if inspect.isfunction(function) else {}
        if "scale" in parameters and "Tensor" not in str(parameters["scale"].annotation):
            assert name in tested


@pytest.mark.parametrize("scale", [2**63, 1e30, -65537.0, 10**400, float("nan"), float("-inf"), np.float32("inf")])
def test_an_out_of_range_scale_is_refused(scale):
    for name, call in calls_with_a_scale().items():
        with pytest.raises(
            OptionError, match=r"^scale: got .*; expected a (finite float32 number|positive number|float)"
        ):
            pytest.fail(f"{name} took it: {call(scale)}")
    q, k, v = qkv()
    assert sdpa(q, k, v, scale=65536).isfinite().all()


@pytest.mark.parametrize("scale", [0, -0.0, 1e-31, -1e-31, -1, -0.5])
def test_fp8_refuses_scales_that_are_not_positive(scale):
    """Other attention negates q instead, and FP8 tensors cannot be negated. Masked keys would have a weight."""
    for name, call in calls_with_a_scale().items():
        if "fp8" in name.lower():
            with pytest.raises(OptionError, match=r"^scale: got .*; expected a positive number"):
                pytest.fail(f"{name} took it: {call(scale)}")


@pytest.mark.usefixtures("reference_alone")  # the oldest cuDNN has no sinks
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sinks_in_half_precision(dtype):
    q, k, v = qkv()
    sinks = torch.randn(4).to(dtype).requires_grad_()
    grad_out = torch.randn(2, 4, 5, 8)
    out = sdpa(q, k, v, sinks=sinks)
    (found,) = torch.autograd.grad(out, sinks, grad_out)
    wanted, _, exact = gradients({"q": q, "k": k, "v": v, "sinks": sinks.detach()}, grad_out)
    torch.testing.assert_close(out.detach().double(), wanted, rtol=1e-4, atol=1e-4)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact["sinks"], rtol=1e-2, atol=1e-2)
    rows = torch.randn(9, 4, 8)
    packed = [sdpa_varlen(rows, rows, rows, ENDS, ENDS, 5, 5, sinks=x) for x in (sinks, sinks.float())]
    assert torch.equal(*packed)
    compiled = torch.compile(lambda sinks: sdpa(q, k, v, sinks=sinks), backend="eager", fullgraph=True)(sinks)
    assert torch.equal(compiled, out)


def test_explain_accepts_the_same_arguments():
    q, k, v = (torch.empty(2, 4, n, 64, dtype=torch.bfloat16, device="meta") for n in (5, 9, 9))
    sinks = torch.empty(4, dtype=torch.bfloat16, device="meta")
    target = replace(Target.from_properties(load_properties("h200")), cudnn=91900)
    described = describer_of(sdpa)(q, k, v, attn_mask=causal_lower_right(5, 9), sinks=sinks)
    written = describer_of(sdpa)(q, k, v, is_causal=True, causal_alignment="bottom_right", sinks=sinks.float())
    assert described.key(target, None) == written.key(target, None)


def calls_with_flags():
    """Every public function with flags, as a function of the flags, and the flags' names."""
    q, k, v = qkv()
    square = torch.randn(2, 4, 5, 8)
    rows = torch.randn(9, 2, 8)
    pages, table = torch.randn(4, 4, 16, 8), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    paged = torch.randn(2, 4, 1, 8), pages, pages, table, torch.tensor([20, 9], dtype=torch.int32)
    packed = torch.randn(9, 4, 8), *paged[1:], ENDS, 5
    half = torch.randn(2, 4, 128, 128, dtype=torch.bfloat16)
    fp8, lse, one = half.to(torch.float8_e4m3fn), torch.zeros(2, 4, 128), torch.ones(1)
    out, of_out = sdpa(q, k, v, return_lse=True)
    packed_out, packed_lse = sdpa_varlen(rows, rows, rows, ENDS, ENDS, 5, 5, return_lse=True)
    grad, grad_rows, grouped = torch.randn_like(out), torch.randn_like(packed_out), torch.randn(2, 2, 9, 8)
    scales, backward_scales = Fp8Scales(*[one] * 6), Fp8BackwardScales(*[one] * 12)
    weight = torch.randn(8)
    return {
        "sdpa": (lambda **x: sdpa(q, k, v, **x), ("is_causal", "return_lse", "deterministic")),
        "sdpa, alibi": (lambda **x: sdpa(square, square, square, is_causal=True, **x), ("alibi",)),
        "drop-in": (lambda **x: scaled_dot_product_attention(q, k, v, **x), ("is_causal", "enable_gqa")),
        "drop-in, grouped": (
            lambda **x: scaled_dot_product_attention(q, grouped, grouped, is_causal=True, **x),
            ("enable_gqa",),
        ),
        "sdpa_backward": (
            lambda **x: sdpa_backward(grad, out, of_out, q, k, v, **x).dq,
            ("is_causal", "deterministic"),
        ),
        "sdpa_varlen": (
            lambda **x: sdpa_varlen(rows, rows, rows, ENDS, ENDS, 5, 5, **x),
            ("is_causal", "return_lse", "deterministic"),
        ),
        "sdpa_varlen_backward": (
            lambda **x: (
                sdpa_varlen_backward(grad_rows, packed_out, packed_lse, rows, rows, rows, ENDS, ENDS, 5, 5, **x).dq
            ),
            ("is_causal", "deterministic"),
        ),
        "sdpa_paged": (lambda **x: sdpa_paged(*paged, page_layout="HND", **x), ("is_causal", "return_lse")),
        "sdpa_paged_varlen": (
            lambda **x: sdpa_paged_varlen(*packed, page_layout="HND", **x),
            ("is_causal", "return_lse", "batch_invariant"),
        ),
        "sdpa_fp8": (lambda **x: sdpa_fp8(fp8, fp8, fp8, scales, **x)[0].float(), ("is_causal", "return_lse")),
        "sdpa_fp8_backward": (
            lambda **x: sdpa_fp8_backward(fp8, fp8, fp8, fp8, fp8, lse, backward_scales, **x)[0].float(),
            ("is_causal", "deterministic"),
        ),
        "fp8_attention": (lambda **x: fp8_attention(half, half, half, **x), ("is_causal",)),
        "kernels.attention": (lambda **x: kernels.attention(q, k, v, **x), ("is_causal",)),
        "rms_norm": (lambda **x: rms_norm(q, weight, **x), ("zero_centered",)),
        "nn.RMSNorm": (lambda **x: nn.RMSNorm(8, **x)(q), ("zero_centered",)),
        "nn.Attention": (
            lambda **x: torch.manual_seed(0) and nn.Attention(16, 2, **x)(square[0, 0].repeat(1, 2)[None]),
            ("is_causal", "bias", "sinks", "packed"),
        ),
    }


@pytest.mark.usefixtures("reference_alone")  # the oldest cuDNN has no sinks
@pytest.mark.parametrize("name", calls_with_flags())
def test_flags_of_numpy_are_accepted(name):
    call, flags = calls_with_flags()[name]
    for flag in flags:
        for value in (False, True) if name not in ("drop-in, grouped", "sdpa, alibi") else (True,):
            torch.testing.assert_close(call(**{flag: np.bool_(value)}), call(**{flag: value}), rtol=0, atol=0)
        for wrong in (1, "yes", np.int64(1)):
            with pytest.raises(OptionError, match=f"^{flag}: got"):
                call(**{flag: wrong})


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_integers_of_numpy_are_accepted_everywhere(kind):
    q, k, v = qkv()
    window = (kind(2), kind(0))
    rows = torch.randn(9, 2, 8)
    image, filters = torch.randn(2, 4, 9, 9), torch.randn(4, 2, 3, 3)
    half = torch.randn(2, 4, 16, 16, dtype=torch.bfloat16)
    for given, wanted in (
        (sdpa(q, k, v, window_size=window), sdpa(q, k, v, window_size=(2, 0))),
        (sdpa(q, k, v, window_size=np.array(window)), sdpa(q, k, v, window_size=(2, 0))),
        *[
            tuple(
                sdpa_varlen(rows, rows, rows, ENDS, ENDS, n, n, window_size=w)
                for n, w in ((kind(5), window), (5, (2, 0)))
            )
        ],
        tuple(fp8_attention(half, half, half, window_size=w) for w in (window, (2, 0))),
        (
            conv2d(image, filters, stride=kind(2), padding=(kind(1), kind(0)), dilation=kind(1), groups=kind(2)),
            conv2d(image, filters, stride=2, padding=(1, 0), groups=2),
        ),
    ):
        torch.testing.assert_close(given, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64])
def test_numbers_of_numpy_are_accepted_everywhere(kind):
    q, k, v = qkv()
    half = torch.randn(2, 4, 16, 16, dtype=torch.bfloat16)
    one, fp8 = torch.ones(1), half.to(torch.float8_e4m3fn)
    for call in (
        lambda x: kernels.attention(q, k, v, scale=x),
        lambda x: fp8_attention(half, half, half, scale=x),
        lambda x: sdpa_fp8(fp8, fp8, fp8, Fp8Scales(*[one] * 6), scale=x)[0].float(),
        lambda x: rms_norm(q, eps=x),
        lambda x: layer_norm(q, eps=x),
    ):
        torch.testing.assert_close(call(kind(2)), call(2.0), rtol=0, atol=0)
    for norm in (rms_norm, layer_norm):
        with pytest.raises(OptionError, match=r"^eps: got"):
            norm(q, eps=np.bool_(True))


def test_a_mask_of_a_higher_rank_adds_a_batch():
    """As in PyTorch, whose compiled and meta calls give this; its eager kernels on the CPU refuse it."""
    for shapes in (
        ((2, 32), (1, 32), (1, 16), (1, 2, 1)),
        ((2, 32), (3, 32), (3, 16), (4, 2, 3)),
        ((2, 32), (3, 32), (3, 16), (5, 1, 2, 3)),
        ((4, 2, 32), (4, 3, 32), (4, 3, 16), (2, 4, 2, 3)),
        ((2, 4, 2, 32), (2, 4, 3, 32), (2, 4, 3, 16), (3, 1, 1, 2, 3)),
        ((2, 2, 4, 2, 32), (2, 2, 4, 3, 32), (2, 2, 4, 3, 16), (3, 1, 2, 4, 1, 3)),
    ):
        q, k, v, mask = (torch.randn(shape) for shape in shapes)
        q.requires_grad_()
        meta = torch.nn.functional.scaled_dot_product_attention(*(x.to("meta") for x in (q, k, v, mask)))
        weights = (q.double() @ k.double().mT * 32**-0.5 + mask.double()).softmax(-1)
        out, wanted = scaled_dot_product_attention(q, k, v, mask), weights @ v.double()
        assert out.shape == meta.shape == wanted.shape
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
        grad = torch.randn_like(out)
        found, exact = torch.autograd.grad(out, q, grad)[0], torch.autograd.grad(wanted, q, grad.double())[0]
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)
        explained = describer_of(scaled_dot_product_attention)(*(x.bfloat16() for x in (q, k, v, mask)))
        assert explained.operation is sdpa_forward


@pytest.mark.parametrize("enable_gqa", [False, True])
def test_keys_or_values_without_heads_are_named(enable_gqa):
    for shapes in (
        ((2, 24, 8), (0, 1, 8), (0, 1, 8)),
        ((4, 1, 8), (0, 1, 8), (2, 1, 8)),
        ((1, 2, 1, 8), (1, 0, 1, 8), (1, 2, 1, 8)),
    ):
        q, k, v = (torch.randn(shape) for shape in shapes)
        with pytest.raises(ShapeError, match=r"^(key|value|query): got 0 heads"):
            scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)
