"""Gradients against float64 in delicate cases: very negative log-sum-exps, large finite masks, every head dim."""

from __future__ import annotations

import dense_calls
import packed_calls
import pytest
import torch
from attention_checks import make

import cudnn_sdpa

LENGTHS = [1, 2, 33, 127, 128, 129, 192, 256, 300]


@pytest.mark.parametrize("skv", LENGTHS)
@pytest.mark.parametrize("sq", LENGTHS)
def test_a_very_negative_lse(sq, skv):
    """On cuDNN 9.19 such gradients are NaN where the last tile is partly filled, unless lengths are given."""
    for shift in (-100.0, -800.0):
        for dim in (64, 128):
            c = dense_calls.plain(sq=sq, skv=skv, dims=(dim, dim), scale=dim**-0.5, is_causal=False, shift=shift)
            t = dense_calls.tensors(c)
            leaves = [t[name].requires_grad_() for name in "qkv"]
            out, lse = cudnn_sdpa.sdpa(*leaves, scale=c.scale, return_lse=True)
            assert (lse < shift / 2).all()
            for x in (out, lse, *torch.autograd.grad(out, leaves, t["grad_out"])):
                assert x.isfinite().all()
            assert dense_calls.check(c) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"is_causal": True, "causal_alignment": "bottom_right"},
        {"window_size": (40, 3)},
        {"mask": "float", "mask_shape": (2, 4, 192, 200), "mask_grad": True},
        {"lengths": "q kv"},
        {"deterministic": True},
        {"dropout_p": 0.1},
        {"softcap": 1000.0},
    ],
    ids=str,
)
def test_a_very_negative_lse_with_options(options, dtype):
    for sq, skv in ((192, 200), (200, 192), (130, 130)):
        sizes = {"mask_shape": (2, 4, sq, skv)} if "mask" in options else {}
        for shift in (-100.0, -800.0):
            c = dense_calls.plain(**{"is_causal": False, **options, **sizes}, sq=sq, skv=skv, shift=shift, dtype=dtype)
            assert dense_calls.check(c) == []


def test_a_very_negative_lse_in_packed_sequences():
    for length in (1, 33, 127, 129, 192, 300):
        for shift in (-100.0, -800.0):
            c = packed_calls.plain(lengths_q=(length, 5, 128), lengths_kv=(length, 200, 3), shift=shift)
            assert packed_calls.check(c) == []


FINFO = {dtype: float(torch.finfo(dtype).min) for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(
    ("of_mask", "low"),
    [
        *((torch.float32, low) for low in (FINFO[torch.float32], -2.5e38, -2.2e38, -1e9)),
        *((torch.bfloat16, low) for low in (FINFO[torch.bfloat16], -2.2e38, -1e9)),
        (torch.float16, FINFO[torch.float16]),
    ],
    ids=str,
)
@pytest.mark.parametrize("sq", [1, 40, 200])
def test_rows_that_a_large_finite_value_covers(sq, of_mask, low, sinks):
    """As on the CPU: a value below -2.36e38 masks a key, any other is only a large number."""
    dtype = torch.float16 if of_mask == torch.float16 else torch.bfloat16
    q, k, v = (make("bshd", 2, 4, n, 64, dtype) for n in (sq, 96, 96))
    mask = torch.randn(2, 1, sq, 96, device="cuda").to(of_mask)
    mask[0, :, ::3] = low
    mask[1, :, :, 20:] = low
    covered = torch.zeros(2, 4, sq, dtype=torch.bool)
    covered[0, :, ::3] = True
    given = {"q": q, "k": k, "v": v, "attn_mask": mask}
    given |= {"sinks": torch.randn(4, device="cuda") + 1} if sinks else {}
    out, lse = cudnn_sdpa.sdpa(**given, return_lse=True)
    on_cpu = {name: x.cpu() for name, x in given.items()}
    wanted, wanted_lse = cudnn_sdpa.sdpa(**on_cpu, return_lse=True)
    torch.testing.assert_close(out.cpu(), wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.cpu(), wanted_lse, rtol=1e-5, atol=2e-3)
    is_masked = low < -2.36e38
    if is_masked or sinks:  # a sink outweighs any such score
        assert not out.cpu()[covered].any()
    else:
        assert wanted[covered].any()
    if not is_masked:  # the LSE of a row at -1e9 has lost the number of keys in float32, and cuDNN's gradients need it
        return
    leaves, leaves_on_cpu = ([x.requires_grad_() for x in of.values()] for of in (given, on_cpu))
    grad_out = torch.randn_like(out)
    found = torch.autograd.grad(cudnn_sdpa.sdpa(**given), leaves, grad_out)
    expected = torch.autograd.grad(cudnn_sdpa.sdpa(**on_cpu), leaves_on_cpu, grad_out.cpu())
    for name, one, other in zip(given, found, expected, strict=True):
        assert one.isfinite().all(), name
        assert dense_calls.difference(one.cpu().double(), other.double()) < 2e-2, name
    assert not found[0].cpu()[covered].any()


HEAD_DIMS = [*((d, d) for d in range(8, 257, 8)), (192, 128), (64, 32), (32, 64), (128, 64)]


@pytest.mark.parametrize(("dim", "dim_v"), HEAD_DIMS)
def test_head_dims(dim, dim_v):
    usual = {"dims": (dim, dim_v), "scale": 1.7 * dim**-0.5, "sq": 45, "skv": 175}
    assert dense_calls.check(dense_calls.plain(**usual, causal_alignment="bottom_right")) == []
    assert dense_calls.check(dense_calls.plain(**usual, is_causal=False, sinks=True, dtype=torch.float16)) == []
    assert packed_calls.check(packed_calls.plain(dims=(dim, dim_v), scale=usual["scale"], sinks=True)) == []


@pytest.mark.parametrize("dims", [(264, 264), (512, 512), (64, 512)], ids=str)
def test_head_dims_without_gradients_are_refused_at_once(dims):
    """Before the loss is differentiated, although the forward pass has kernels for them."""
    t = dense_calls.tensors(dense_calls.plain(dims=dims))
    leaves = [t[name].requires_grad_() for name in "qkv"]
    for _ in range(3):
        with pytest.raises(cudnn_sdpa.UnsupportedError, match=f"head dims {dims[0]} and {dims[1]}") as caught:
            cudnn_sdpa.sdpa(*leaves)
        assert "head dims of up to" in caught.value.suggestion
        with torch.no_grad():
            assert cudnn_sdpa.sdpa(*leaves).isfinite().all()
