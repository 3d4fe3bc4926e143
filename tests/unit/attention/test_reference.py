"""`sdpa` on CPU tensors against float64, and against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cudnn_sdpa import sdpa

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CAUSAL = [
    pytest.param({}, id="dense"),
    pytest.param({"is_causal": True}, id="top_left"),
    pytest.param({"is_causal": True, "causal_alignment": "bottom_right"}, id="bottom_right"),
]


def random_qkv(
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    lengths: tuple[int, int] = (13, 17),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, heads[0], lengths[0], dims[0], dtype=torch.float64)
    k = torch.randn(batch, heads[1], lengths[1], dims[0], dtype=torch.float64)
    v = torch.randn(batch, heads[1], lengths[1], dims[1], dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def check(expected_attention, assert_rounded, q, k, v, **options):
    out, lse = sdpa(q, k, v, return_lse=True, **options)
    expected_out, expected_lse = expected_attention(q, k, v, **options)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert_rounded(out, expected_out)
    assert_rounded(lse, expected_lse)
    torch.testing.assert_close(sdpa(q, k, v, **options), out, rtol=0, atol=0)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", CAUSAL)
@pytest.mark.parametrize("lengths", [(13, 13), (5, 19), (19, 5), (1, 11), (11, 1)])
def test_values_and_lse_match_float64(expected_attention, assert_rounded, dtype, mask, lengths):
    q, k, v = random_qkv(lengths=lengths, dtype=dtype)
    check(expected_attention, assert_rounded, q, k, v, **mask)


def test_scale_zero_is_the_mean_of_the_values():
    q, k, v = random_qkv(heads=(2, 2), dtype=torch.float64)
    out = sdpa(q, k, v, scale=0.0)
    torch.testing.assert_close(out, v.mean(dim=2, keepdim=True).expand_as(out))


def test_rows_past_the_length_have_zeros_and_lse_minus_infinity():
    q, k, v = random_qkv(batch=2, lengths=(8, 8))
    lengths = torch.tensor([3, 0], dtype=torch.int32)
    out, lse = sdpa(q, k, v, seq_lens_q=lengths, return_lse=True)
    assert out[0, :, :3].abs().amin() > 0
    assert torch.equal(out[0, :, 3:], torch.zeros_like(out[0, :, 3:]))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert lse[0, :, :3].isfinite().all()
    assert lse[0, :, 3:].isneginf().all()
    assert lse[1].isneginf().all()


def test_keys_past_the_length_have_no_influence_even_if_they_are_nan():
    q, k, v = random_qkv(batch=1, lengths=(4, 10))
    lengths = torch.tensor([6], dtype=torch.int32)
    expected = sdpa(q, k[:, :, :6], v[:, :, :6])
    k[:, :, 6:] = torch.nan
    torch.testing.assert_close(sdpa(q, k, v, seq_lens_kv=lengths), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bottom_right_queries_before_the_first_key_are_fully_masked(dtype):
    q, k, v = random_qkv(lengths=(11, 4), dtype=dtype)
    out, lse = sdpa(q, k, v, is_causal=True, causal_alignment="bottom_right", return_lse=True)
    assert torch.equal(out[:, :, :7], torch.zeros_like(out[:, :, :7]))
    assert lse[:, :, :7].isneginf().all()
    assert lse[:, :, 7:].isfinite().all()
    torch.testing.assert_close(out[:, :, 7:], sdpa(q[:, :, 7:], k, v, is_causal=True))


@pytest.mark.parametrize("magnitude", [60.0, 900.0])
def test_extreme_scores_neither_overflow_nor_vanish(expected_attention, assert_rounded, magnitude):
    q, k, v = random_qkv(lengths=(5, 6), dtype=torch.float64)
    for sign in (1.0, -1.0):
        keys = sign * magnitude * (1 + k.abs())
        check(expected_attention, assert_rounded, q.abs(), keys, v)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("shape", [(0, 4, 8, 16), (2, 4, 0, 16), (0, 4, 0, 16)])
def test_no_queries_give_an_empty_result(shape, return_lse):
    q = torch.randn(shape)
    k = torch.randn(shape[0], 2, 9, 16)
    v = torch.randn(shape[0], 2, 9, 24)
    result = sdpa(q, k, v, is_causal=True, return_lse=return_lse)
    out = result[0] if return_lse else result
    assert out.shape == (*shape[:3], 24)
    assert out.dtype == q.dtype
    if return_lse:
        assert result[1].shape == shape[:3]
        assert result[1].dtype == torch.float32


def test_a_sink_of_minus_infinity_has_no_effect():
    q, k, v = (x.requires_grad_() for x in random_qkv(dtype=torch.float64))
    sinks = torch.full((4,), -torch.inf, requires_grad=True)
    mask = torch.rand(13, 17) < 0.5
    mask[3], mask[4:, 0] = False, True
    results = []
    for options in ({}, {"sinks": sinks}):
        out, lse = sdpa(q, k, v, attn_mask=mask, return_lse=True, **options)
        results.append((out, lse, *torch.autograd.grad(out.square().sum(), (q, k, v, *options.values()))))
    for without, with_sinks in zip(*results, strict=False):
        torch.testing.assert_close(with_sinks, without)
    out, lse, *_, grad_sinks = results[1]
    assert torch.equal(out[:, :, 3], torch.zeros_like(out[:, :, 3]))
    assert lse[:, :, 3].isneginf().all()
    assert torch.equal(grad_sinks, torch.zeros(4))


def test_the_default_device_does_not_matter():
    q, k, v = (x.requires_grad_() for x in random_qkv(heads=(6, 3)))
    options = {"is_causal": True, "alibi": True, "sinks": torch.randn(6), "return_lse": True}
    results = []
    for device in (None, "meta"):
        with torch.device(device or "cpu"):
            torch.manual_seed(3)
            out, lse = sdpa(q, k, v, **options)
            dropped = sdpa(q, k, v, dropout_p=0.5)
            results.append((out, lse, dropped, *torch.autograd.grad(out.sum() + dropped.sum(), (q, k, v))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_inputs_are_not_modified():
    q, k, v = random_qkv()
    lengths = torch.tensor([7, 11], dtype=torch.int32)
    before = [tensor.clone() for tensor in (q, k, v, lengths)]
    sdpa(q, k, v, is_causal=True, causal_alignment="bottom_right", seq_lens_kv=lengths, return_lse=True)
    for tensor, copy in zip((q, k, v, lengths), before, strict=True):
        assert torch.equal(tensor, copy)
