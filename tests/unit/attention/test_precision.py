"""The reference for scores too large for a float32 logarithm, and for chunks of the keys."""

from __future__ import annotations

import pytest
import torch
from float64_reference import gradients

import cudnn_sdpa
from cudnn_sdpa import kernels
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense import reference as dense_reference

LOWEST = torch.finfo(torch.float32).min


def relative(found, exact):
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-12))


def large_scores(heads=2, sq=5, skv=7, **more):
    return {
        "q": torch.randn(2, heads, sq, 8),
        "k": torch.randn(2, heads, skv, 8),
        "v": torch.randn(2, heads, skv, 16),
        **more,
    }


def assert_right(tensors, **options):
    """Output and gradients against float64, of the same float32 scores."""
    leaves = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in tensors.items()}
    out = cudnn_sdpa.sdpa(**leaves, **options)
    grad_out = torch.randn_like(out)
    wanted, _, exact = gradients(tensors, grad_out, **options)
    assert relative(out.detach(), wanted) < 1e-4
    found = torch.autograd.grad(out, [leaves[name] for name in exact], grad_out)
    size = grad_out.double().norm() * tensors["q"].abs().max().clamp_min(1)  # zero up to rounding errors of this size
    for name, gradient in zip(exact, found, strict=True):
        assert (gradient.double() - exact[name]).norm() < 1e-4 * exact[name].norm() + 1e-5 * size, name


@pytest.mark.parametrize("low", [-1e4, -1e9, LOWEST / 2, LOWEST])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_masked_by_a_large_finite_value(low, sinks):
    """float32 scores near -1e9 are all equal, so the weights of a masked row are equal; near LOWEST they are zero."""
    mask = torch.zeros(5, 7)
    mask[1] = mask[4] = low
    mask[2, 3:] = low
    tensors = large_scores(attn_mask=mask)
    tensors["q"][:, :, [1, 4]] = 0  # the same rounded scores: float64 would keep q·k next to -1e9
    if sinks:
        tensors["sinks"] = torch.full((2,), low)
    if low == LOWEST:
        tensors["q"] = tensors["q"].abs() * 0.1  # nothing below the lowest finite value
        tensors["k"] = tensors["k"].abs() * 0.1
    assert_right(tensors)


def by_each_function(tensors, mask):
    """The output, and the gradients of all tensors, of a call with a float mask, by each function that takes one."""
    options = {"attn_mask": mask, "scale": 0.3}

    def in_place_of_cudnn(setting):
        with cudnn_sdpa.cpu_checks("h200"), setting:  # cuDNN has no float32
            return cudnn_sdpa.sdpa(**tensors, **options)

    q, k, v = (tensors[name] for name in "qkv")
    return {
        "sdpa": lambda: cudnn_sdpa.sdpa(**tensors, **options),
        "drop-in": lambda: cudnn_sdpa.scaled_dot_product_attention(q, k, v, **options),
        "kernels": lambda: kernels.attention(q, k, v, mask=mask, scale=0.3),
        "reference": lambda: kernels.reference_attention(q, k, v, mask, scale=0.3),
        "fallback to PyTorch": lambda: in_place_of_cudnn(cudnn_sdpa.fallback("torch")),
        "fallback to PyTorch's functions": lambda: dense_reference.by_pytorch(
            from_fields(ForwardArguments, q, k, v, attn_mask=mask, scale=0.3)
        ),
        "own kernels": lambda: in_place_of_cudnn(cudnn_sdpa.providers("cudnn", "own")),
    }


@pytest.mark.parametrize("low", [LOWEST, float(torch.finfo(torch.bfloat16).min), -2.4e38, -2.3e38, -1e9])
@pytest.mark.parametrize("name", by_each_function({**dict.fromkeys("qkv")}, None))
def test_values_that_mask_a_key(name, low):
    """One meaning for all functions, that of cuDNN: below -2.36e38, minus infinity; above, only a large number."""
    tensors = {n: torch.randn(2, 2, 6, 8, requires_grad=True) for n in "qkv"}
    mask = torch.randn(6, 6)
    covered, mask[1, 2:] = [0, 3], low
    mask[covered] = low
    mask.requires_grad_()
    out = by_each_function(tensors, mask)[name]()
    exact, lse, wanted = gradients({**tensors, "attn_mask": mask}, torch.ones_like(out), scale=0.3)
    is_masked = low < -2.36e38
    assert bool(lse[:, :, covered].isneginf().all()) is is_masked
    mean = 0.0 if is_masked else tensors["v"].mean(2, keepdim=True)
    torch.testing.assert_close(out[:, :, covered], torch.zeros_like(out[:, :, covered]) + mean)
    kept = [row for row in range(6) if row not in covered]
    torch.testing.assert_close(out[:, :, kept].double(), exact[:, :, kept], rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out.sum(), [*tensors.values(), mask])
    for one, (which, other) in zip(found, wanted.items(), strict=True):
        if is_masked:
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4, msg=which)
    if is_masked:
        assert not found[-1][covered].any()
        assert found[-1][kept].any()


def test_lse_and_sinks_of_rows_that_a_finite_minimum_masks():
    tensors = {n: torch.randn(1, 2, 4, 8) for n in "qkv"}
    mask = torch.randn(4, 4)
    mask[2] = LOWEST
    lse = cudnn_sdpa.sdpa(**tensors, attn_mask=mask, return_lse=True)[1]
    assert lse.isneginf().nonzero().tolist() == [[0, 0, 2], [0, 1, 2]]
    sinks = torch.randn(2)
    out, lse = cudnn_sdpa.sdpa(**tensors, attn_mask=mask, sinks=sinks, return_lse=True)
    assert torch.equal(lse[0, :, 2], sinks)
    assert not out[:, :, 2].any()


@pytest.mark.parametrize("sink", [-1e4, -100.0, 100.0, 1e4, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sinks_far_above_and_far_below_the_scores(sink, dtype):
    """exp(sink − largest score) overflows; of a row without keys the sink is the only score."""
    tensors = large_scores(sinks=torch.tensor([sink, 0.5]))
    tensors = {name: x if name == "sinks" else x.to(dtype) for name, x in tensors.items()}
    for options in ({}, {"is_causal": True}, {"is_causal": True, "window_size": (0, 0)}):
        assert_right(tensors, **options)
    call = {**tensors, "seq_lens_kv": torch.tensor([7, 0], dtype=torch.int32)}
    out, lse = cudnn_sdpa.sdpa(**call, return_lse=True)
    assert out.isfinite().all()
    assert (lse[1] == tensors["sinks"].to(lse.dtype).view(2, 1)).all()


@pytest.mark.parametrize("largest", [100.0, 46341.0, 4e7])
def test_large_scores(largest):
    """Values of few digits, so that scores are exact in float32 and only the softmax may be wrong."""
    tensors = large_scores()
    for name in "qk":
        tensors[name] = tensors[name].mul(8).round().div(8)
    scores = tensors["q"] @ tensors["k"].mT
    tensors["q"] *= 2.0 ** int(torch.log2(largest / scores.abs().max()))
    assert_right(tensors, scale=1.0)


def test_a_row_of_one_score_repeated():
    """Each of n equal keys has the weight 1/n, however large their score."""
    for number in (3.0, 1e5, 1e9, -1e9, 1e30):
        k = torch.full((1, 2, 6, 8), number)
        q, v = torch.full((1, 2, 1, 8), 0.125, requires_grad=True), torch.randn(1, 2, 6, 8, requires_grad=True)
        out = cudnn_sdpa.sdpa(q, k, v, scale=1.0)
        torch.testing.assert_close(out[0, :, 0], v[0].mean(1))
        (grad_v,) = torch.autograd.grad(out.sum(), v)
        torch.testing.assert_close(grad_v, torch.full_like(v, 1 / 6))
